"""One case before one backend: the inputs, the oracle, and the calls that checks make."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ParamSpec, TypeVar

import msgspec
import numpy as np
import torch

from attnconform.conformance.backend import Backend, Backward, Forward, Tensors
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.cases.structure import Case, build_problem
from attnconform.conformance.cases.values import Values, build_values
from attnconform.conformance.judge.storage import store_inputs, store_upstream, true_ones
from attnconform.conformance.views import ProblemView
from attnconform.reference.attention import EffectiveSets, effective_sets
from attnconform.reference.coordinates import BoolArray, FloatArray, IntArray
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.steps import AttentionResult, Gradients, Steps

P = ParamSpec("P")
R = TypeVar("R")
LN_2 = float(np.log(2.0))
NAN = float("nan")
SECOND_POISON = -1536.0  # exact in every storage dtype, and no plausible output
INPUTS = ("q", "k_cache", "v_cache", "k_scale", "v_scale")
HUGE = 1.0e4  # finite, and so large that any influence shows
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class BackendCrash(Exception):
    """The backend raised where it should have answered; a refusal names its clause."""

    def __init__(self, message: str, clause: str = "SAFE-PATH") -> None:
        super().__init__(message)
        self.clause = clause


def first_line(error: Exception) -> str:
    """An exception's message, one line of it."""
    return str(error).strip().split("\n")[0][:300]


@dataclass(frozen=True)
class Observed:
    """What one forward call did, brought to the contract's conventions."""

    out: FloatArray  # (total_q, num_qo_heads, head_dim_vo)
    lse: FloatArray | None  # natural log, (total_q, num_qo_heads)
    out_bits: torch.Tensor  # as stored, but for signs of an empty row's zeros
    lse_bits: torch.Tensor | None
    path: str
    overruns: tuple[str, ...]  # guard bands that were written to, as `past out`
    mutated: tuple[str, ...]  # names of inputs that changed
    forward: Forward = field(repr=False)
    tensors: Tensors = field(repr=False)


@dataclass(frozen=True)
class ObservedGradients:
    """What one backward call gave; dk and dv by slot, in float64."""

    dq: FloatArray
    dk: FloatArray  # (num_slots, num_kv_heads, head_dim_qk)
    dv: FloatArray
    dsink: FloatArray | None
    dscore: tuple[FloatArray, ...] | None
    mutated: tuple[str, ...]
    raw: Backward = field(repr=False)


class Trial:
    """A case, a backend, and what they have shown so far."""

    def __init__(self, case: Case, backend: Backend) -> None:
        self.case = case
        self.backend = backend
        self.problem: AttentionProblem = build_problem(case.structure)
        self.view = ProblemView(self.problem, case.structure.hints, backend.device, case.structure.interleaved)
        self.values: Values = build_values(case, self.problem)
        self.calls = 0
        self.usage: dict[str, float] = {}
        self.usage_probable: dict[str, float] = {}
        self.unresolved = 0
        self.void = 0
        self.rewritten: set[str] = set()  # index arrays that some call changed
        self.paths: list[str] = []  # that forward calls so far have named
        self.growth: list[int] = []  # bytes that calls left behind, where memory was watched
        self.has_failed = False  # whether some check has found a failure

    @cached_property
    def edges(self) -> EffectiveSets:
        return effective_sets(self.problem)

    @cached_property
    def oracle(self) -> AttentionResult:
        return self.oracle_of(self.values)

    def oracle_of(self, values: Values) -> AttentionResult:
        """The reference on other numbers of the same case."""
        return Steps().forward(self.problem, values.q, values.k, values.v)

    def oracle_gradients(self, values: Values, result: AttentionResult) -> Gradients:
        """The reference's gradients, with the dlse that the backend can take."""
        return Steps().backward(self.problem, values.q, values.k, values.v, result, values.dout, self.dlse(values))

    def dlse(self, values: Values) -> FloatArray | None:
        return values.dlse if self.backend.capabilities.gradient_of_lse else None

    @cached_property
    def owned(self) -> BoolArray:
        """(num_slots, num_kv_heads) True where some request's committed token lies."""
        owned = np.zeros((self.problem.cache.num_slots, self.problem.num_kv_heads), dtype=bool)
        for n in range(self.problem.batch_size):
            for head in range(self.problem.num_kv_heads):
                owned[self.view.slots(n, head).cpu().numpy(), head] = True
        return owned

    @cached_property
    def selected(self) -> BoolArray:
        """(num_slots, num_kv_heads) True where some row attends the slot through that KV head."""
        selected = np.zeros((self.problem.cache.num_slots, self.problem.num_kv_heads), dtype=bool)
        for row in range(self.problem.total_q):
            for h in range(self.problem.num_qo_heads):
                selected[self.edges.of(row, h)[1], h // self.problem.group_size] = True
        return selected

    @cached_property
    def is_empty(self) -> BoolArray:
        """(total_q, num_qo_heads) True where a row attends nothing."""
        return np.asarray(self.edges.counts() == 0)

    def settled_out(self, out: torch.Tensor) -> torch.Tensor:
        """A copy of an output, an empty row's zeros without their sign, which is free and may vary. [EMPTY-OUT]"""
        if out.shape[:2] != self.is_empty.shape or not self.is_empty.any():
            return out.detach().clone()
        is_empty = torch.from_numpy(self.is_empty).to(out.device)[..., None]
        bits = out.detach().view(INTEGERS[out.dtype.itemsize])  # torch chooses among no float8
        return torch.where(is_empty & (comparable(out) == 0), torch.zeros_like(bits), bits).view(out.dtype)

    @cached_property
    def base(self) -> Observed:
        """The first run: outputs poisoned with NaN, NaN in every slot that nobody owns."""
        return self.run(self.values, unowned=NAN, poison=NAN)

    @cached_property
    def second(self) -> Observed:
        """The same call again: another poison, another filling of what nobody owns and of what no row attends."""
        return self.run_second()

    def run_second(self) -> Observed:
        """The second call, made once more."""
        return self.run(overwrite(self.values, ~self.selected, self.unselected), unowned=HUGE, poison=SECOND_POISON)

    @property
    def unselected(self) -> float:
        """What may lie in owned slots that no row attends: NaN where the backend tolerates it, else any number."""
        return NAN if self.backend.capabilities.tolerates_nonfinite else HUGE

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """One call into the backend. Raises BackendCrash for whatever it raises: the problem is a sound one."""
        self.calls += 1
        before = {name: array.copy() for name, array in index_arrays(self.problem).items()}
        try:
            return function(*args, **kwargs)
        except self.backend.refusals as error:
            clause = getattr(error, "clause", "SAFE-REFUSE")
            raise BackendCrash(f"refused a sound problem: {first_line(error)}", str(clause)) from error
        except Exception as error:
            raise BackendCrash(f"raised {type(error).__name__}: {first_line(error)}") from error
        finally:
            self.restore_index_arrays(before)

    def restore_index_arrays(self, before: dict[str, IntArray]) -> None:
        """Notes the problem's own arrays that a call changed, and puts them back for the calls to come."""
        for name, array in index_arrays(self.problem).items():
            if not np.array_equal(array, before[name]):
                self.rewritten.add(name)
                array[...] = before[name]

    @cached_property
    def without_epilogue(self) -> ProblemView:
        """The same problem with nothing done to complete rows, so that an output is a sum of values."""
        return replace(self.view, spec=replace(self.problem, epilogue=())) if self.problem.epilogue else self.view

    def run(
        self, values: Values, *, unowned: float = NAN, poison: float = NAN, view: ProblemView | None = None
    ) -> Observed:
        """One forward call; slots that nobody owns hold `unowned`."""
        k, v = values.k.copy(), values.v.copy()
        k[~self.owned], v[~self.owned] = unowned, unowned
        structure = self.case.structure
        tensors, guards = store_inputs(
            structure,
            self.problem,
            values.q,
            k,
            v,
            owned=self.owned,
            device=self.backend.device,
            unowned=unowned,
            poison=poison,
        )
        before = snapshot(tensors)
        forward = self.call(self.backend.forward, view or self.view, tensors)
        self.paths.append(forward.path)
        out, lse = self.settled_out(forward.out), forward.lse
        base = LN_2 if self.backend.capabilities.lse_base == "2" else 1.0
        return Observed(
            out=as_float64(out),
            lse=None if lse is None else as_float64(lse) * base,
            out_bits=out,
            lse_bits=None if lse is None else lse.detach().clone(),
            path=forward.path,
            overruns=true_ones({name: flag for guard in guards for name, flag in guard.overrun.items()}),
            mutated=(*changed_inputs(tensors, before), *sorted(self.rewritten)),
            forward=forward,
            tensors=tensors,
        )

    def run_backward(
        self, values: Values, observed: Observed | None = None, view: ProblemView | None = None
    ) -> ObservedGradients:
        """One backward call, after a forward call with the same numbers."""
        observed = observed or self.run(values, view=view)
        dout, to_lse = store_upstream(values.dout, self.dlse(values), self.case.structure, self.backend.device)
        before = snapshot(observed.tensors)
        arrives = {"dout": dout, "dlse": to_lse, "out": observed.forward.out, "lse": observed.forward.lse}
        kept = {name: (tensor, tensor.clone()) for name, tensor in arrives.items() if tensor is not None}
        raw = self.call(self.backend.backward, view or self.view, observed.tensors, observed.forward, dout, to_lse)
        return ObservedGradients(
            dq=as_float64(raw.dq),
            dk=as_float64(self.view.by_slot(raw.dk)),
            dv=as_float64(self.view.by_slot(raw.dv)),
            dsink=None if raw.dsink is None else as_float64(raw.dsink),
            dscore=None if raw.dscore is None else tuple(as_float64(x) for x in raw.dscore),
            mutated=(
                *changed_inputs(observed.tensors, before),
                *(name for name, (now, old) in kept.items() if not same_bits(now, old)),
                *sorted(self.rewritten),
            ),
            raw=raw,
        )

    @cached_property
    def base_gradients(self) -> ObservedGradients:
        """The first backward, of the first run."""
        return self.run_backward(self.values, self.base)

    def with_seed(self, seed: int) -> Values:
        """The case's numbers under another seed."""
        return build_values(replace_seed(self.case, seed), self.problem)


def replace_seed(case: Case, seed: int) -> Case:
    """The same case with another seed; its id no longer fits and is not used."""
    return msgspec.structs.replace(case, seed=seed)


def declared_numerics(trial: Trial) -> Numerics:
    """The arithmetic that the backend declares for inputs such as the case's."""
    structure = trial.case.structure
    return trial.backend.capabilities.numerics_of(structure.dtype, of_codes=structure.v_quant is not None)


def with_values(values: Values, **changes: FloatArray) -> Values:
    """The numbers with some arrays replaced."""
    return replace(values, **changes)


def overwrite(values: Values, where: BoolArray, fill: float) -> Values:
    """The numbers with k and v replaced at some (slot, KV head)."""
    k, v = values.k.copy(), values.v.copy()
    k[where], v[where] = fill, fill
    return with_values(values, k=k, v=v)


def index_arrays(problem: AttentionProblem) -> dict[str, IntArray]:
    """Every integer array of a problem by name; a backend reads them and leaves them as they are. [SAFE-INPUTS]"""
    arrays = {"qo_indptr": problem.qo_indptr, "seqlen_kv": problem.seqlen_kv, "q_offset": problem.q_offset}
    arrays["page_table"] = problem.cache.page_table
    if problem.candidates is not None:
        arrays |= {"indptr": problem.candidates.indptr, "indices": problem.candidates.indices}
    return arrays


def as_float64(tensor: torch.Tensor) -> FloatArray:
    """A tensor's numbers, exactly."""
    return np.asarray(tensor.detach().to(torch.float64).cpu().numpy())


def snapshot(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Copies of the inputs."""
    return {name: getattr(tensors, name).clone() for name in INPUTS if getattr(tensors, name) is not None}


def changed_inputs(tensors: Tensors, before: dict[str, torch.Tensor]) -> tuple[str, ...]:
    """Names of inputs whose bits changed, NaN payloads aside. [SAFE-INPUTS]"""
    touched = true_ones({name: other_bytes(getattr(tensors, name), old) for name, old in before.items()})
    return tuple(name for name in touched if not same_bits(getattr(tensors, name), before[name]))


def other_bytes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether any byte differs, on the device; of tensors of one dtype and shape."""
    as_integers = INTEGERS[a.dtype.itemsize]
    return (a.view(as_integers) != b.view(as_integers)).any()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal numbers, NaN where NaN, -0 apart from 0."""
    if same_bytes(a, b):  # settles nearly every comparison, at a fraction of the cost
        return True
    if a.dtype != b.dtype:
        return False
    a, b = comparable(a), comparable(b)
    return bool(torch.equal(torch.signbit(a), torch.signbit(b))) and bool(torch.allclose(a, b, 0, 0, equal_nan=True))


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's numbers in a dtype that torch compares, which is no float8; codes as float32, exactly."""
    return tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bytes, those of NaN included."""
    as_integers = INTEGERS[a.dtype.itemsize]
    return a.dtype == b.dtype and bool(torch.equal(a.view(as_integers), b.view(as_integers)))
