"""Checks of the structures that a backend builds: the reference passes, every mistake is found and named."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from attnconform.conformance import clauses
from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.adapters.reference_structures import COSTS, ReferenceStructures
from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structures import STRUCTURE_CLAUSES, structure_cases
from attnconform.conformance.deviations.deviation import DEVIATIONS, Deviation
from attnconform.conformance.deviations.structures import is_structural
from attnconform.conformance.judge.cost_structures import questions
from attnconform.conformance.judge.judge import run_checks
from attnconform.conformance.judge.structures import STRUCTURE_CHECKS
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.verdict import Finding
from attnconform.conformance.structures import METHODS, Structures, offers, offers_any
from attnconform.reference.block_mask import BlockMask
from attnconform.reference.branches import Branch
from attnconform.reference.candidates import HOLE
from attnconform.reference.canonical import CanonicalRow
from attnconform.reference.coordinates import IntArray, PageOffsets, Positions, Slots
from attnconform.reference.errors import RefusedInput
from attnconform.reference.page_pool import PagePool
from attnconform.reference.plan_storage import WAIT
from attnconform.reference.problem import AttentionProblem

CASES = structure_cases(matrix("L1"))
MISTAKES = [deviation for deviation in DEVIATIONS.values() if is_structural(deviation)]
NEW_AREAS = ("FORMAT", "COST", "PLAN", "FALLBACK")
NEW_BLOCK_CLAUSES = {
    "BLOCK-RAGGED", "BLOCK-EXTENT", "BLOCK-CONSERVATIVE", "BLOCK-INTERVAL", "BLOCK-CANDIDATES", "BLOCK-INTERSECT",
    "BLOCK-UNITE", "BLOCK-BROADCAST-HEADS", "BLOCK-BROADCAST-BATCH", "BLOCK-OFFSET", "BLOCK-SLICE", "BLOCK-CROP",
    "BLOCK-ADMIT", "BLOCK-PHYSICAL", "BLOCK-UNTOUCHED", "BLOCK-STATISTICS",
}  # fmt: skip
NEW_LIST_CLAUSES = {
    "SET-CANONICAL", "SET-VALIDATE", "SET-BRANCH-COVER", "SET-BRANCH-LARGER", "SET-BRANCH-GATES", "SET-BRANCH-SOFTMAX",
    "GQA-MERGE-MAX", "GQA-MERGE-SUM", "GQA-MERGE-PRIVATE", "GQA-MERGE-TIE", "COORD-FORK", "COORD-COPY-ON-WRITE",
    "COORD-FREE", "COORD-GENERATION", "MASK-LEAK",
}  # fmt: skip


def findings_of(backend: Backend, *clause_ids: str) -> Iterator[Finding]:
    """What the structure checks find, case after case; only those of some clauses, where these are named."""
    chosen = [c for c in STRUCTURE_CHECKS if not clause_ids or set(clause_ids) & set(clauses_of(c))]
    for case in CASES:
        yield from run_checks(Trial(case, backend), chosen)


def clauses_of(check: Callable[[Trial], list[Finding]]) -> tuple[str, ...]:
    return clauses.CHECKS[f"{check.__module__}.{check.__qualname__}"]


def test_the_reference_passes_every_check_on_every_case() -> None:
    assert [f.message for f in findings_of(ReferenceStructures())] == []


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda d: d.id)
def test_a_mistake_is_found_and_its_clause_named(mistake: Deviation) -> None:
    found = next((f for f in findings_of(mistake.build(), mistake.clause) if mistake.clause in f.clauses), None)
    assert found is not None
    assert found.state not in ("CRASH", "HARNESS_ERROR"), found.message
    assert "\n" not in found.message


def test_no_mistake_crashes_the_suite() -> None:
    for i, mistake in enumerate(MISTAKES[::4]):
        trial = Trial(CASES[i % len(CASES)], mistake.build())
        assert "HARNESS_ERROR" not in {f.state for f in run_checks(trial, STRUCTURE_CHECKS)}, mistake.id


def test_structure_cases_are_tagged_with_what_their_checks_judge() -> None:
    assert set(STRUCTURE_CLAUSES) == {clause for check in STRUCTURE_CHECKS for clause in clauses_of(check)}
    assert {clause for case in CASES for clause in case.clauses} == set(STRUCTURE_CLAUSES)
    assert len({case.id for case in CASES}) == len(CASES) == 24
    assert {case.operation for case in CASES} == {"structure"}


LIVED = {
    "PLAN-COPY", "PLAN-ALLOCATE", "PLAN-WORKSPACE", "PLAN-INPUTS", "PLAN-APART", "PLAN-REPLAY",
}  # fmt: skip


def test_every_new_clause_has_a_check_and_a_mistake() -> None:
    wanted = {i for i in clauses.CLAUSES if i.split("-")[0] in NEW_AREAS} | NEW_BLOCK_CLAUSES | NEW_LIST_CLAUSES
    wanted -= LIVED  # those of a plan's life are judged by running it
    assert wanted <= set(STRUCTURE_CLAUSES)
    assert wanted <= {d.clause for d in MISTAKES}
    assert len(MISTAKES) >= len(wanted)


def test_a_backend_that_offers_nothing_is_not_judged() -> None:
    backend = StepsBackend()
    assert not offers_any(backend)
    assert list(findings_of(backend)) == []
    assert Trial(CASES[0], backend).calls == 0


def test_a_backend_is_judged_by_what_it_offers_alone() -> None:
    class Partly(StepsBackend, Structures):
        def transpose(self, block_mask: BlockMask) -> BlockMask:
            return block_mask

    backend = Partly()
    assert [method for method in METHODS if offers(backend, method)] == ["transpose"]
    assert {f.clauses for f in findings_of(backend)} == {("BLOCK-TRANSPOSE",)}


def test_a_figure_that_a_backend_does_not_give_is_not_judged() -> None:
    class GivesOneFigure(StepsBackend, Structures):
        def cost(self, name: str, arguments: dict[str, object]) -> float:  # type: ignore[override]
            if name != "hot_atomics":
                raise NotImplementedError(name)
            return float(COSTS[name](**arguments))

    assert list(findings_of(GivesOneFigure())) == []


def test_every_figure_of_the_reference_is_asked_for_but_those_that_repeat_another() -> None:
    asked = {question.name for question in questions()}
    assert set(COSTS) - asked == {"break_even_reads", "total_time"}  # gather_time solved for r; speedup's own sum


def test_a_method_that_raises_is_a_crash_and_names_the_error() -> None:
    class Raises(ReferenceStructures):
        def to_fixed_width(self, indptr: IntArray, indices: IntArray, width: int) -> IntArray:
            raise IndexError("out of bounds")

    found = next(f for f in findings_of(Raises()) if f.state == "CRASH")
    assert "IndexError: out of bounds" in found.message


def test_a_refusal_of_sound_arguments_is_no_refusal_but_a_crash() -> None:
    class Refuses(ReferenceStructures):
        def canonicalize(self, problem: AttentionProblem):  # type: ignore[no-untyped-def]
            raise RefusedInput("SET-RANGE", "indices", 3, "I do not like it")

    assert "refused a sound problem" in next(f.message for f in findings_of(Refuses()) if f.state == "CRASH")


# -- faithful variants -------------------------------------------------------------------------------------------------


class ListsBlocksBackwards(ReferenceStructures):
    """The order within a row is free."""

    def build_block_mask(self, problem: AttentionProblem, q_block_size: int, kv_block_size: int):  # type: ignore[no-untyped-def]
        built = super().build_block_mask(problem, q_block_size, kv_block_size)
        for mask in built:
            for lists in (mask.full, mask.partial):
                for row in range(mask.num_rows):
                    lists.of(row)[:] = lists.of(row)[::-1].copy()
        return built


class CallsEverythingPartial(ReferenceStructures):
    """A full block may be listed as partial."""

    def build_block_mask(self, problem: AttentionProblem, q_block_size: int, kv_block_size: int):  # type: ignore[no-untyped-def]
        from attnconform.conformance.deviations.block_structures import full_pairs, partial_pairs, with_pairs

        none = np.empty(0, dtype=np.int64)
        built = super().build_block_mask(problem, q_block_size, kv_block_size)
        return [with_pairs(m, none, np.sort(np.concatenate([full_pairs(m), partial_pairs(m)]))) for m in built]


class PutsHolesFirst(ReferenceStructures):
    """Holes may stand anywhere in a row."""

    def to_fixed_width(self, indptr: IntArray, indices: IntArray, width: int) -> IntArray:
        fixed = super().to_fixed_width(indptr, indices, width)
        rows = [[*[HOLE] * (row == HOLE).sum(), *row[row != HOLE]] for row in fixed]
        return np.array(rows, dtype=np.int64).reshape(fixed.shape)


class NeverCrops(ReferenceStructures):
    """A mask may always be rebuilt."""

    def crop(self, mask_of, block_mask, seqlen):  # type: ignore[no-untyped-def]
        return None

    def admit(self, mask_of, max_seqlen, q_block_size, kv_block_size):  # type: ignore[no-untyped-def]
        return False


class ShufflesTasks(ReferenceStructures):
    """The order of tasks, runs and canonical entries is free."""

    def task_table(self, indptr, target, row_ids, generations):  # type: ignore[no-untyped-def]
        table = super().task_table(indptr, target, row_ids, generations)
        return table.take(np.random.default_rng(0).permutation(len(table)))

    def to_physical(self, mask, page_table_row, page_size, num_pages):  # type: ignore[no-untyped-def]
        from attnconform.reference.blocks.physical import PhysicalBlockMask, sort_by_slot

        right = super().to_physical(mask, page_table_row, page_size, num_pages)
        return PhysicalBlockMask(sort_by_slot(right.full), sort_by_slot(right.partial))


class ReordersTriples(ReferenceStructures):
    """The order of triples and of merged entries is free, as long as each stays together."""

    def canonical_row(self, dynamic, window, sinks, request, last_visible):  # type: ignore[no-untyped-def]
        right = super().canonical_row(dynamic, window, sinks, request, last_visible)
        order = np.argsort(right.slots.values)
        where = PageOffsets(right.where.page[order], right.where.offset[order])
        return CanonicalRow(Positions(right.positions.values[order]), where, Slots(right.slots.values[order]))

    def merge_branches(self, parts, policy):  # type: ignore[no-untyped-def]
        return Branch(*(array[::-1] for array in vars(super().merge_branches(parts, policy)).values()))


class TakesTheLastFreePage(ReferenceStructures):
    """Which free page is handed out, and what a handle looks like, is free."""

    def page_pool(self, num_pages: int, page_size: int, num_rows: int):  # type: ignore[no-untyped-def]
        class FromTheEnd(PagePool):
            def _take(self, count: int) -> list[int]:
                free = np.flatnonzero(self.readers == 0)
                if len(free) < count:
                    return super()._take(count)
                self.readers[free[len(free) - count :]] = 1
                return [int(page) for page in free[::-1][:count]]

        return FromTheEnd(num_pages=num_pages, page_size=page_size, num_rows=num_rows)


class KeysByMoreThanItMust(ReferenceStructures):
    """A plan may be keyed by its device, and a mask by the dtype."""

    def plan_key(self, call):  # type: ignore[no-untyped-def]
        return super().plan_key(call), call.device, call.is_one_mask_for_heads

    def mask_key(self, call):  # type: ignore[no-untyped-def]
        return hash((super().mask_key(call), call.dtype, call.architecture, call.tier))


class WritesTheLastFreeBuffer(ReferenceStructures):
    """Which free buffer an update writes is free."""

    def replay_storage(self, num_buffers, events):  # type: ignore[no-untyped-def]
        right = super().replay_storage(num_buffers, events)
        return [answer if answer == WAIT else num_buffers - 1 - answer for answer in right]


class PutsTasksLast(ReferenceStructures):
    """Where in its storage a plan's tasks stand is free."""

    def plan_each(self, indptrs, target, capacity):  # type: ignore[no-untyped-def]
        plans = super().plan_each(indptrs, target, capacity)
        return [replace(plan, tasks=plan.tasks.take(np.arange(len(plan.tasks))[::-1])) for plan in plans]


@pytest.mark.parametrize(
    ("variant", "clause_ids"),
    [
        (ListsBlocksBackwards, ("BLOCK-COMPLETE",)),
        (CallsEverythingPartial, ("BLOCK-COMPLETE",)),
        (PutsHolesFirst, ("FORMAT-FIXED-WIDTH",)),
        (NeverCrops, ("BLOCK-CROP", "BLOCK-ADMIT")),
        (ShufflesTasks, ("FORMAT-TASK-TABLE", "BLOCK-PHYSICAL")),
        (ReordersTriples, ("SET-CANONICAL", "SET-BRANCH-COVER")),
        (TakesTheLastFreePage, ("COORD-FORK",)),
        (KeysByMoreThanItMust, ("PLAN-KEY",)),
        (WritesTheLastFreeBuffer, ("PLAN-STORAGE",)),
        (PutsTasksLast, ("PLAN-REPLAN",)),
    ],
)
def test_what_a_clause_leaves_free_is_accepted(variant: type[ReferenceStructures], clause_ids: tuple[str, ...]) -> None:
    assert [f.message for f in findings_of(variant(), *clause_ids)] == []
