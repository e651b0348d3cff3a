"""Deviations as a set: what they cover, that each has an idea of its own, and that each starts afresh."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.adapters.reference_structures import ReferenceStructures
from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case, build_problem
from attnconform.conformance.clauses import CLAUSES
from attnconform.conformance.deviations import DEVIATIONS, FAULT_CLASSES, VARIANTS
from attnconform.conformance.deviations.blocks import ReadsABlockMask
from attnconform.conformance.deviations.deviation import Deviation, add, idea_of, kebab_case
from attnconform.conformance.deviations.masks import ReadsRules
from attnconform.conformance.deviations.observation import observe, trial_of
from attnconform.conformance.judge.trial import BackendCrash, Trial
from attnconform.reference.steps import Steps

ALL = list(DEVIATIONS.values())
HARMLESS = Deviation("harmless", "SET-HOLE", "Nothing is wrong.", "none", "K", StepsBackend)
SMALL = 24  # rows times heads of a case that is cheap enough to run for every deviation


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other's cores cost more than these small tensors do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_clause_that_a_problem_of_the_matrix_exercises_has_a_deviation() -> None:
    problems = [c for c in matrix("L1") if c.operation in ("forward", "backward", "refusal")]
    bounds = {clause for clause in CLAUSES if clause.startswith("BOUND-")}
    exercised = bounds.union(*(case.clauses for case in problems))
    assert exercised - {d.clause for d in ALL} == set()


def test_every_deviation_breaks_a_clause_of_the_spec() -> None:
    assert {d.clause for d in ALL} - set(CLAUSES) == set()


def test_every_class_of_real_bugs_has_a_deviation() -> None:
    assert {d.fault_class for d in ALL} == set(FAULT_CLASSES)


def test_there_are_more_than_two_hundred_deviations_and_two_dozen_variants() -> None:
    assert len(ALL) >= 200
    assert len(VARIANTS) >= 24


@pytest.mark.parametrize("entry", [*ALL, *VARIANTS.values()], ids=lambda e: e.id)
def test_an_id_is_words_and_an_idea_is_one_sentence(entry: Deviation) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", entry.id)
    assert entry.idea.endswith(".")
    assert entry.idea.count(". ") == 0


def test_no_two_entries_have_the_same_idea() -> None:
    times = Counter([*(d.idea for d in ALL), *(v.idea for v in VARIANTS.values())])
    assert [idea for idea, count in times.items() if count > 1] == []


def test_every_deviation_says_what_it_stands_for() -> None:
    assert [d.id for d in ALL if len(d.report) < 8] == []


def test_every_build_is_a_fresh_backend() -> None:
    deviation = DEVIATIONS["keeps-leftover-accumulators"]
    case = next(c for c in matrix("L1") if c.operation == "forward")
    used = deviation.build()
    first, second = (Trial(case, used).base.out for _ in range(2))
    fresh = Trial(case, deviation.build()).base.out
    assert np.array_equal(first, fresh)
    assert not np.array_equal(second, fresh)


def varied_cases(count: int) -> list[Case]:
    """Small cases, each with as many clauses and axis values as possible that no earlier one has."""
    pool = [c for c in matrix("L1") if c.operation in ("forward", "backward") and num_rows(c) <= SMALL]
    seen: set[tuple[str, str]] = set()
    chosen: list[Case] = []
    for _ in range(count):
        case = max(pool, key=lambda c: (len(traits(c) - seen), c.id))
        seen |= traits(case)
        pool.remove(case)
        chosen.append(case)
    return chosen


def num_rows(case: Case) -> int:
    """Rows times heads."""
    return sum(case.structure.seqlens_q) * case.structure.num_qo_heads


def traits(case: Case) -> set[tuple[str, str]]:
    """What a case has to show."""
    return {(case.operation, clause) for clause in case.clauses} | set(case.axes.items())


def fingerprint(deviation: Deviation, cases: list[Case]) -> tuple[bytes, ...]:
    """The bits of everything that a deviation gives, case by case."""
    return tuple(digest(case, deviation) for case in cases)


def digest(case: Case, deviation: Deviation) -> bytes:
    """A hash of one call's outputs and traces; the exception where it raises, and the path of a forward after it."""
    backend = deviation.build()
    try:
        call = observe(case, backend)
    except BackendCrash as crash:
        return f"{crash} {path_of_forward(case, backend)}".encode()
    arrays = [*call.outputs().values(), call.forward.lse]
    if call.gradients is not None:
        arrays += [call.gradients.dsink, *(call.gradients.dscore or ())]
    traces = (call.forward.path, call.forward.mutated, call.forward.overruns)
    return hashlib.md5(b"".join(a.tobytes() for a in arrays if a is not None) + repr(traces).encode()).digest()


def path_of_forward(case: Case, backend: Backend) -> str:
    """The path that a forward takes; nothing where it raises."""
    try:
        return trial_of(case, backend).base.path
    except BackendCrash:
        return ""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_two_deviations_do_the_same_thing_under_two_names() -> None:
    cases = varied_cases(72)
    few, many = cases[:12], cases[12:]
    # those of structures have no numbers of their own
    groups = alike([d for d in ALL if not isinstance(d.build(), ReferenceStructures)], few)
    nothing = fingerprint(HARMLESS, few)
    suspected = [group for group in groups if fingerprint(group[0], few) != nothing]
    for case in many:
        suspected = [part for group in suspected for part in alike(group, [case])]
    assert [[d.id for d in group] for group in suspected] == []


def alike(deviations: list[Deviation], cases: list[Case]) -> list[list[Deviation]]:
    """Those of which there are several with the same bits on all of the cases."""
    found: dict[tuple[bytes, ...], list[Deviation]] = {}
    for deviation in deviations:
        found.setdefault(fingerprint(deviation, cases), []).append(deviation)
    return [group for group in found.values() if len(group) > 1]


@pytest.mark.parametrize("base", [ReadsRules, ReadsABlockMask], ids=lambda base: base.__name__)
def test_a_base_of_mask_mistakes_is_right_itself_where_masks_differ_by_head(base: type[Steps]) -> None:
    cases = [c for c in matrix("L1") if c.operation == "forward" and c.axes["mask"] in ("head_window", "custom")]
    for problem in (build_problem(case.structure) for case in cases[:12]):
        for where in problem.rows():
            for head in range(problem.num_qo_heads):
                got, want = (steps.effective(problem, where, head).values for steps in (base(), Steps()))
                assert np.array_equal(got, want)


def test_a_name_becomes_kebab_case() -> None:
    assert kebab_case("ReadsAHoleAsKeyZero") == "reads-a-hole-as-key-zero"


def test_an_idea_is_needed() -> None:
    nameless = type("Nameless", (Steps,), {"__doc__": None})
    with pytest.raises(ValueError, match="Nameless has no docstring"):
        idea_of(nameless)


def test_an_id_is_given_once() -> None:
    registry: dict[str, Deviation] = {}
    add(registry, HARMLESS)
    with pytest.raises(ValueError, match="harmless is registered twice"):
        add(registry, HARMLESS)
