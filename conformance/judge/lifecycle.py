"""Step 6: plans, runs and replays in sequence. What is made anew holds nothing of what was there before. [PLAN]

A backend without plans (`attnconform.conformance.lifecycle`) answers the same sequences through forward calls.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnconform.conformance.backend import Backend, Forward, Tensors
from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.hygiene import first_difference, same_outputs
from attnconform.conformance.judge.storage import TORCH_DTYPES, store_inputs
from attnconform.conformance.judge.trial import (
    INPUTS,
    LN_2,
    NAN,
    BackendCrash,
    Observed,
    Trial,
    as_float64,
    with_values,
)
from attnconform.conformance.judge.values import Comparison, compare_forward, worst_row_is_empty
from attnconform.conformance.judge.variations import (
    has_custom_mask,
    knows_requests,
    with_a_request_ended,
    with_another_dtype,
    with_half_the_keys,
    with_ids_mirrored,
    with_other_numbers,
    with_request_appended,
    with_requests,
    with_requests_reversed,
)
from attnconform.conformance.judge.verdict import Finding, State
from attnconform.conformance.lifecycle import offers_steps
from attnconform.conformance.views import ProblemView
from attnconform.reference.coordinates import BoolArray, FloatArray, IntArray


class OfHandle(Backend):
    """A backend whose every call is a run of one handle."""

    def __init__(self, backend: Backend, handle: Any) -> None:
        super().__init__(backend.device)
        self.backend, self.handle = backend, handle
        self.capabilities, self.refusals = backend.capabilities, backend.refusals

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        return self.backend.run(self.handle, tensors)


@dataclass
class Session:
    """Plans and runs of the case's backend, counted as the case's calls."""

    trial: Trial  # of the case itself

    @property
    def has_plans(self) -> bool:
        return offers_steps(self.trial.backend, "plan", "run")

    def plan(self, trial: Trial, view: ProblemView | None = None) -> Any:
        """A handle of the trial's problem; None where the backend makes no plans."""
        if not self.has_plans:
            return None
        dtype = torch_dtype(trial)
        return self.trial.call(self.trial.backend.plan, view or trial.view, dtype)

    def plan_again(self, handle: Any, trial: Trial) -> Any:
        """The handle, or a new one where plans are made once, for another problem."""
        if not offers_steps(self.trial.backend, "plan", "run", "replan"):
            return self.plan(trial)
        return self.trial.call(self.trial.backend.replan, handle, trial.view)

    def run(self, trial: Trial, handle: Any, **options: Any) -> Observed:
        """A run of the handle with the trial's numbers, or others that are given; a forward call without plans."""
        runner = copy(trial)
        runner.calls = 0
        if self.has_plans:
            runner.backend = OfHandle(trial.backend, handle)
        try:
            return runner.run(options.pop("values", trial.values), **options)
        finally:
            self.trial.calls += runner.calls

    def run_on(self, trial: Trial, handle: Any, seen: Observed) -> Observed:
        """A run on the very tensors of an earlier one, as they are now."""
        backend = self.trial.backend
        if self.has_plans:
            return observed_again(seen, self.trial.call(backend.run, handle, seen.tensors), trial)
        return observed_again(seen, self.trial.call(backend.forward, trial.view, seen.tensors), trial)


def torch_dtype(trial: Trial) -> torch.dtype:
    """The storage dtype of q and out."""
    return TORCH_DTYPES[trial.case.structure.dtype]


def observed_again(seen: Observed, forward: Forward, trial: Trial) -> Observed:
    """What another call on the same tensors gave, in the contract's conventions."""
    base = LN_2 if trial.backend.capabilities.lse_base == "2" else 1.0
    out, lse = trial.settled_out(forward.out), forward.lse
    return replace(
        seen,
        out=as_float64(out),
        lse=None if lse is None else as_float64(lse) * base,
        out_bits=out,
        lse_bits=None if lse is None else lse.detach().clone(),
        forward=forward,
    )


def past_bound(trial: Trial, observed: Observed, values: Any = None) -> Comparison | None:
    """The first output with an element past its bound; None where the answer is right."""
    given = values or trial.values
    oracle = trial.oracle if values is None else trial.oracle_of(values)
    return next((c for c in compare_forward(trial, given, observed, oracle) if c.worst_ratio > 1), None)


def off(trial: Trial, observed: Observed, values: Any = None) -> str | None:
    """The worst element past its bound, in words; None where the answer is right."""
    comparison = past_bound(trial, observed, values)
    return None if comparison is None else comparison.message(comparison.worst)


def off_or_other_bits(trial: Trial, observed: Observed, first: Observed) -> str | None:
    """How an answer differs from a first one: in a bit where determinism is declared, else past its bound."""
    if trial.backend.capabilities.determinism == "none":
        return off(trial, observed)
    return None if same_outputs(first, observed) else first_difference(first, observed)


def stale(clause: str, what: str, difference: str | None, state: State = "FAIL_value") -> list[Finding]:
    """A finding where there is a difference."""
    return [] if difference is None else [Finding(state=state, clauses=(clause,), message=f"{what}: {difference}")]


def is_asked(trial: Trial, clause: str, *methods: str) -> bool:
    """Whether a case exercises the clause before a backend that has the steps it takes."""
    is_plain = trial.case.structure.page_stride is None
    return clause in trial.case.clauses and is_plain and offers_steps(trial.backend, *methods)


def other_problems(trial: Trial) -> dict[str, Trial]:
    """Problems on the same tensors: shorter requests, and other lists of the very same lengths."""
    structure, declares = trial.case.structure, trial.backend.capabilities.declares
    if structure.empty_row != "zero" or not (declares("empty", "first") and declares("listing", "holes")):
        return {}
    found = {"half the keys": with_half_the_keys(trial), "other pages, scale and offsets": with_other_numbers(trial)}
    if structure.candidates is not None:
        found["other lists of the same lengths"] = with_ids_mirrored(trial)
    return found


def other_batches(trial: Trial) -> dict[str, Trial]:
    """Batches of as many rows: the requests in the other order, and one that has no keys any more."""
    structure, declares = trial.case.structure, trial.backend.capabilities.declares
    found = {}
    if len(structure.seqlens_q) > 1 and not knows_requests(structure):
        found["the batch in reverse"] = with_requests_reversed(trial)[0]
    takes_no_keys = declares("empty", "first") and declares("lengths", "empty_request")
    if structure.empty_row == "zero" and takes_no_keys and any(structure.seqlens_kv):
        found["a request that ended"] = with_a_request_ended(trial)
    return found


@checks("PLAN-REPLAN")
def check_planning_again(trial: Trial) -> list[Finding]:
    """Long, then short, other lists of the same lengths, other batches, then long again: each answer is its own."""
    if not is_asked(trial, "PLAN-REPLAN"):
        return []
    session = Session(trial)
    handle = session.plan(trial)
    first = session.run(trial, handle)
    found = stale("PLAN-REPLAN", "planned and run", off(trial, first))
    for what, other in (other_problems(trial) | other_batches(trial)).items():
        handle = session.plan_again(handle, other)
        found += of_another_problem(other, session.run(other, handle), what)
    found += in_another_dtype(trial, session) + in_a_smaller_batch(trial, session) + in_a_larger_batch(trial, session)
    handle = session.plan_again(handle, trial)
    return found + stale(
        "PLAN-REPLAN",
        "planned for the first problem again",
        off_or_other_bits(trial, session.run(trial, handle), first),
    )


def in_another_dtype(trial: Trial, session: Session) -> list[Finding]:
    """A finding where the same structure, planned in another dtype, is not answered in that dtype."""
    other = with_another_dtype(trial)
    if not trial.backend.capabilities.declares("dtype", other.case.structure.dtype):
        return []
    observed = session.run(other, session.plan(other))
    return stale("PLAN-REPLAN", f"planned for {other.case.structure.dtype}", off(other, observed))


def in_a_smaller_batch(trial: Trial, session: Session) -> list[Finding]:
    """A finding where one request alone is not answered as itself, after a batch of none, whatever that gives."""
    nobody = with_requests(trial, [])
    with suppress(BackendCrash):  # no clause says what becomes of a batch without requests
        session.run(nobody, session.plan(nobody))
    rows = trial.case.structure.seqlens_q
    alone = with_requests(trial, [rows.index(max(rows))])
    return of_another_problem(alone, session.run(alone, session.plan(alone)), "one of its requests alone")


def in_a_larger_batch(trial: Trial, session: Session) -> list[Finding]:
    """A finding where one more request, longer than any before, is not answered: earlier calls measured nothing out."""
    if has_custom_mask(trial.case.structure.mask_rule):  # it need not know another request
        return []
    larger = with_request_appended(trial)
    return of_another_problem(larger, session.run(larger, session.plan(larger)), "one request more, and a longer one")


def of_another_problem(other: Trial, observed: Observed, what: str) -> list[Finding]:
    """A finding about a plan made again; a row that sees no key any more may be wrong for that alone. [EMPTY-OUT]"""
    wrong = past_bound(other, observed)
    if wrong is None:
        return []
    clauses = ("EMPTY-OUT", "PLAN-REPLAN") if worst_row_is_empty(other, wrong) else ("PLAN-REPLAN",)
    message = f"planned for {what}: {wrong.message(wrong.worst)}"
    return [Finding(state="FAIL_value", clauses=clauses, message=message)]


@checks("PLAN-WORKSPACE")
def check_dirty_workspace(trial: Trial) -> list[Finding]:
    """A run after a run of NaN gives the bits of the run before it."""
    if not is_asked(trial, "PLAN-WORKSPACE"):
        return []
    session = Session(trial)
    handle = session.plan(trial)
    first, found = session.run(trial, handle), []
    for names in ("qkv", "v"):  # NaN scores may be taken for none, and then leave no NaN behind
        dirty = {name: np.full_like(getattr(trial.values, name), NAN) for name in names}
        session.run(trial, handle, values=with_values(trial.values, **dirty))
        difference = off_or_other_bits(trial, session.run(trial, handle), first)
        found += stale(
            "PLAN-WORKSPACE", f"after a run of NaN in {' and '.join(names)}", difference, "FAIL_interference"
        )
    return found


@checks("PLAN-INPUTS")
def check_inputs_in_place(trial: Trial) -> list[Finding]:
    """q, k and v written over where they lie: the next run of the same plan on them answers for what is there now."""
    if not is_asked(trial, "PLAN-INPUTS"):
        return []
    session = Session(trial)
    handle = session.plan(trial)
    seen = session.run(trial, handle)
    values = trial.with_seed(trial.case.seed + (1 << 41))
    write_over(seen.tensors, stored(trial, values, trial.owned))
    again = session.run_on(trial, handle, seen)
    return stale("PLAN-INPUTS", "with q, k and v written over in place", off(trial, again, values))


def stored(trial: Trial, values: Any, owned: BoolArray) -> Tensors:
    """Tensors of other numbers, in the layout of the case."""
    tensors, _ = store_inputs(
        trial.case.structure, trial.problem, values.q, values.k, values.v,
        owned=owned, device=trial.backend.device, poison=NAN,
    )  # fmt: skip
    return tensors


def write_over(tensors: Tensors, new: Tensors) -> None:
    """Replaces the numbers of every input where it lies, and poisons the outputs."""
    for name in INPUTS:
        into = getattr(tensors, name)
        if into is not None:
            into.copy_(getattr(new, name))
    poison(tensors)


def poison(tensors: Tensors) -> None:
    """Outputs that hold NaN, so that what is not written shows. [SAFE-WRITE]"""
    tensors.out.fill_(NAN)
    tensors.lse.fill_(NAN)


@checks("PLAN-APART")
def check_two_plans(trial: Trial) -> list[Finding]:
    """Several plans alive at once: each runs as if it were alone."""
    if not is_asked(trial, "PLAN-APART", "plan", "run"):
        return []
    session, found = Session(trial), []
    handle, others = session.plan(trial), other_problems(trial)
    first, alive = session.run(trial, handle), {}
    for what, other in others.items():
        alive[what] = session.plan(other)
        again = session.run(trial, handle)
        found += stale("PLAN-APART", f"beside a plan for {what}", off_or_other_bits(trial, again, first))
    for what, second in alive.items():  # when all of them are made: the next one may have taken what is this one's
        observed = session.run(others[what], second)
        found += stale("PLAN-APART", f"the plan for {what}, after all others", off(others[what], observed))
    return found


@dataclass(frozen=True)
class HandsOut(ProblemView):
    """A view that keeps the index tensors it hands out, to write over them later. [PLAN-COPY]"""

    handed: list[torch.Tensor] = field(default_factory=list)

    def tensor(self, array: IntArray | BoolArray | FloatArray, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        handed = super().tensor(array, dtype)
        if not (dtype.is_floating_point or dtype == torch.bool):
            self.handed.append(handed)
        return handed


@checks("PLAN-COPY")
def check_index_storage(trial: Trial) -> list[Finding]:
    """Index arrays written over after planning have no influence, unless the backend declares that it reads them live.

    They are filled with 0, a page and a position that every problem has.
    """
    if not is_asked(trial, "PLAN-COPY", "plan", "run") or trial.backend.capabilities.live_indices:
        return []
    session, structure = Session(trial), trial.case.structure
    view = HandsOut(trial.problem, structure.hints, trial.backend.device, structure.interleaved)
    handle = session.plan(trial, view)
    first = session.run(trial, handle)
    what = "with index arrays written over after planning"
    with zeros_in_index_arrays(trial, view.handed):
        try:
            again = session.run(trial, handle)
        except BackendCrash as crash:
            return stale("PLAN-COPY", what, str(crash), "FAIL_interference")
    return stale("PLAN-COPY", what, off_or_other_bits(trial, again, first), "FAIL_interference")


@contextmanager
def zeros_in_index_arrays(trial: Trial, handed: list[torch.Tensor]) -> Iterator[None]:
    """Page table, lists and all tensors that were handed out hold 0 within; the problem's own arrays get theirs back.

    What decides where a case's tensors lie is computed before.
    """
    assert trial.owned is not None
    lists = trial.problem.candidates
    arrays = [trial.problem.cache.page_table, *([] if lists is None else [lists.indices])]
    before = [array.copy() for array in arrays]
    for array in arrays:
        array[...] = 0
    for tensor in handed:
        tensor.zero_()
    try:
        yield
    finally:
        for array, old in zip(arrays, before, strict=True):
            array[...] = old


@checks("PLAN-ALLOCATE")
def check_allocations(trial: Trial) -> list[Finding]:
    """A run that is not the plan's first takes no memory: torch's allocator is asked for none."""
    if not is_asked(trial, "PLAN-ALLOCATE", "plan", "run"):
        return []
    session = Session(trial)
    handle = session.plan(trial)
    seen = session.run(trial, handle)
    counted = count_allocations(trial.backend.device, lambda: trial.call(trial.backend.run, handle, seen.tensors))
    if not counted:
        return []
    message = f"a run asks torch for memory, {counted}"
    return [Finding(state="FAIL_leak", clauses=("PLAN-ALLOCATE",), message=message)]


def count_allocations(device: str, call: Callable[[], object]) -> str:
    """How often and for what a call asked torch for memory; empty where it did not."""
    if not device.startswith("cuda"):
        with Allocations() as watch:
            call()
        return "" if not watch.found else f"{len(watch.found)} times, first of all {watch.found[0]}"
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    call()
    count = int(torch.cuda.memory_stats(device)["allocation.all.allocated"] - before)
    return f"{count} times" if count else ""


class Allocations(TorchDispatchMode):
    """Operators whose results lie in memory that none of their arguments has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {address(t) for t in tensors_in((args, tuple((kwargs or {}).values())))}
        new = [t for t in tensors_in((result,)) if address(t) not in given and t.untyped_storage().nbytes()]
        self.found += [f"{t.untyped_storage().nbytes()} bytes by {func}" for t in new]
        return result


def tensors_in(items: Any) -> Iterator[torch.Tensor]:
    """Tensors among arguments or results, also within lists."""
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from tensors_in(item)


def address(tensor: torch.Tensor) -> int:
    """Where a tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()


@checks("PLAN-REPLAY")
def check_replay(trial: Trial) -> list[Finding]:
    """A launch captured on a short problem, replayed on a long one and back, equals plan and run each time.

    Where the plan can be made again the storage is its own; where not, new numbers come in the same tensors alone.
    """
    if not is_asked(trial, "PLAN-REPLAY", "plan", "run", "capture"):
        return []
    session = Session(trial)
    short = other_problems(trial).get("half the keys") if offers_steps(trial.backend, "replan") else None
    handle = session.plan(trial)
    seen = session.run(trial, handle)
    if short is not None:
        handle = session.plan_again(handle, short)
    try:
        captured = trial.backend.capture(handle, seen.tensors)
    except NotImplementedError as error:
        message = f"not judged, nothing is captured on {trial.backend.device}: {error or 'capture is not implemented'}"
        return [Finding(state="UNSUPPORTED", clauses=("PLAN-REPLAY",), message=message)]
    found = []
    sequence = [("short", short), ("long", trial), ("short, after long", short), ("long again", trial)]
    for what, other in sequence if short is not None else [("unchanged", trial)]:
        if short is not None and other is not None:
            handle = session.plan_again(handle, other)
        found += stale("PLAN-REPLAY", f"replayed {what}", replayed_off(session, captured, seen, other or trial))
    values = trial.with_seed(trial.case.seed + (1 << 41))
    write_over(seen.tensors, stored(trial, values, trial.owned))
    what = "replayed on other numbers in the same tensors"
    return found + stale("PLAN-REPLAY", what, replayed_off(session, captured, seen, trial, values))


def replayed_off(session: Session, captured: Any, seen: Observed, trial: Trial, values: Any = None) -> str | None:
    """How a replay's answer is off that of its own plan and run, or off the oracle."""
    poison(seen.tensors)
    again = observed_again(seen, session.trial.call(captured.replay), trial)
    if trial.backend.capabilities.determinism == "none":
        return off(trial, again, values)
    fresh = session.run(trial, session.plan(trial), values=values or trial.values)
    return off(trial, again, values) or off_or_other_bits(trial, again, fresh)


LIFECYCLE_CHECKS = (
    check_planning_again,
    check_dirty_workspace,
    check_inputs_in_place,
    check_two_plans,
    check_index_storage,
    check_allocations,
    check_replay,  # last: it may say that it was not judged
)
