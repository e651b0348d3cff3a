"""Mistakes in canonical rows, merged branches and merged groups, made where a backend writes them. [SET, GQA]"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from attnconform.conformance.adapters.reference_structures import ReferenceStructures
from attnconform.conformance.deviations.deviation import deviates
from attnconform.reference.branches import Branch, BranchPolicy, check_branch, repeat_positions
from attnconform.reference.candidates import HOLE
from attnconform.reference.canonical import CanonicalRow, RequestPages
from attnconform.reference.coordinates import FloatArray, IntArray, PageOffsets, Slots
from attnconform.reference.group_merge import GroupLists, GroupPolicy, keep_private, shared_lists
from attnconform.reference.scored_list import ScoredList


@deviates("SET-CANONICAL", fault_class="K", report="article 1, 7.3 (16): the condition t < T left out for the window")
class ListsTheWindowPastTheEnd(ReferenceStructures):
    """Window and sink positions join as they come, also where the request has no such token yet."""

    def canonical_row(
        self, dynamic: IntArray, window: IntArray, sinks: IntArray, request: RequestPages, last_visible: int | None
    ) -> CanonicalRow:
        super().canonical_row(dynamic, window, sinks, request, last_visible)  # refuses what it must
        room = request.page_size * len(request.page_table_row)
        longer = replace(request, seqlen_kv=room, owned=None)
        return super().canonical_row(dynamic, window[window < room], sinks[sinks < room], longer, None)


@deviates("SET-CANONICAL", fault_class="T", report="article 1, 7.3: slots sorted, positions left where they were")
class SortsSlotsAlone(ReferenceStructures):
    """Slots are put in ascending order for better loads, and positions stay in theirs."""

    def canonical_row(
        self, dynamic: IntArray, window: IntArray, sinks: IntArray, request: RequestPages, last_visible: int | None
    ) -> CanonicalRow:
        right = super().canonical_row(dynamic, window, sinks, request, last_visible)
        return replace(right, slots=Slots(np.sort(right.slots.values)))


@deviates("SET-CANONICAL", fault_class="T", report="article 1, 1.2: a physical page divided as if it were logical")
class NamesPhysicalPages(ReferenceStructures):
    """The page of a triple is the physical one."""

    def canonical_row(
        self, dynamic: IntArray, window: IntArray, sinks: IntArray, request: RequestPages, last_visible: int | None
    ) -> CanonicalRow:
        right = super().canonical_row(dynamic, window, sinks, request, last_visible)
        return replace(right, where=PageOffsets(right.slots.values // request.page_size, right.where.offset))


@deviates("SET-VALIDATE", fault_class="A", report="article 1, 1.1: a wrong page reads another request's cache")
class ReadsPagesOfAnyone(ReferenceStructures):
    """Nobody asks whom a page belongs to."""

    def canonical_row(
        self, dynamic: IntArray, window: IntArray, sinks: IntArray, request: RequestPages, last_visible: int | None
    ) -> CanonicalRow:
        return super().canonical_row(dynamic, window, sinks, replace(request, owned=None), last_visible)


@deviates("SET-VALIDATE", fault_class="A", report="article 1, 1.1: causality is validated with range and owner")
class TakesTheFutureOfACausalList(ReferenceStructures):
    """A list's declared end is not looked at."""

    def canonical_row(
        self, dynamic: IntArray, window: IntArray, sinks: IntArray, request: RequestPages, last_visible: int | None
    ) -> CanonicalRow:
        return super().canonical_row(dynamic, window, sinks, request, None)


@deviates("SET-VALIDATE", fault_class="P", report="article 1, 7.3: an index into a tail block that is not committed")
class DropsWhatIsOutOfRange(ReferenceStructures):
    """An entry of the selector outside the request is left out instead of refused."""

    def canonical_row(
        self, dynamic: IntArray, window: IntArray, sinks: IntArray, request: RequestPages, last_visible: int | None
    ) -> CanonicalRow:
        kept = np.where((dynamic >= 0) & (dynamic < request.seqlen_kv), dynamic, HOLE)
        return super().canonical_row(kept, window, sinks, request, last_visible)


class MergesByAnotherPolicy(ReferenceStructures):
    """Branches merged by one policy where another one is declared."""

    declared: BranchPolicy
    used: BranchPolicy

    def merge_branches(self, parts: Sequence[Branch], policy: BranchPolicy) -> Branch:
        return super().merge_branches(parts, self.used if policy == self.declared else policy)


@deviates("SET-BRANCH-COVER", fault_class="K", report="article 1, 1.1: three meanings of a position in two branches")
class KeepsTheFirstBranch(ReferenceStructures):
    """Where the last branch should stand, the first one does."""

    def merge_branches(self, parts: Sequence[Branch], policy: BranchPolicy) -> Branch:
        return super().merge_branches(parts[::-1] if policy == "cover" else parts, policy)


@deviates("SET-BRANCH-LARGER", fault_class="K", report="article 1, 1.1: the larger route score is not the last one")
class CoversWhereTheLargerStands(MergesByAnotherPolicy):
    """Where the larger score should stand, the last branch's does."""

    declared, used = "keep_larger_score", "cover"


@deviates("SET-BRANCH-LARGER", fault_class="K", report="article 1, 1.1: score and gate come from one branch")
class TakesTheGateOfAnotherBranch(ReferenceStructures):
    """The larger score stands with the last branch's gate."""

    def merge_branches(self, parts: Sequence[Branch], policy: BranchPolicy) -> Branch:
        right = super().merge_branches(parts, policy)
        if policy != "keep_larger_score":
            return right
        return replace(right, gates=super().merge_branches(parts, "cover").gates)


@deviates("SET-BRANCH-GATES", fault_class="K", report="article 1, 1.1: gates of branches add up")
class KeepsOneGate(MergesByAnotherPolicy):
    """Where gates should add up, the gate of the larger score stands alone."""

    declared, used = "accumulate_gates", "keep_larger_score"


@deviates("SET-BRANCH-GATES", fault_class="K", report="article 1, 7.3: a repeated index as a weight")
class AddsWhatOneBranchRepeats(ReferenceStructures):
    """A position that one branch names twice has both gates added, and is not refused."""

    def merge_branches(self, parts: Sequence[Branch], policy: BranchPolicy) -> Branch:
        if policy != "accumulate_gates":
            return super().merge_branches(parts, policy)
        singles = [
            Branch(*(a[i : i + 1] for a in vars(part).values())) for part in parts for i in range(len(part.gates))
        ]
        for single in singles:
            check_branch(single)
        return super().merge_branches(singles, policy)


@deviates("SET-BRANCH-SOFTMAX", fault_class="K", report="article 1, 3.2: repeated tokens in one softmax, times a gate")
class SharesOneSoftmax(ReferenceStructures):
    """All branches go through one softmax, in which a position stands once a branch and is weighed by its gate."""

    def gate_branches(
        self, lists: Sequence[IntArray], gates: FloatArray, scores: FloatArray, v: FloatArray
    ) -> FloatArray:
        return repeat_positions(lists, gates, scores, v)


@deviates("SET-BRANCH-SOFTMAX", fault_class="S", report="no report: gates made to add up to 1 as if they were weights")
class NormalizesTheGates(ReferenceStructures):
    """Gates are divided by their sum."""

    def gate_branches(
        self, lists: Sequence[IntArray], gates: FloatArray, scores: FloatArray, v: FloatArray
    ) -> FloatArray:
        return super().gate_branches(lists, gates / gates.sum(), scores, v)


class MergesGroupsByAnotherPolicy(ReferenceStructures):
    """Groups merged by one policy where another one is declared."""

    declared: GroupPolicy
    used: GroupPolicy

    def merge_group(self, heads: Sequence[ScoredList], policy: GroupPolicy, budget: int) -> GroupLists:
        super().merge_group(heads, policy, budget)  # refuses what it must
        return super().merge_group(heads, self.used if policy == self.declared else policy, budget)


@deviates("GQA-MERGE-MAX", fault_class="G", report="article 1, 7.3: maximum, sum and private budgets differ")
class AddsWhereTheMaximumDecides(MergesGroupsByAnotherPolicy):
    """Scores of a group are added where their maximum is declared."""

    declared, used = "max", "sum"


@deviates("GQA-MERGE-MAX", fault_class="G", report="article 1, 7.3: the first head's list serves its group")
class AsksTheFirstHeadAlone(ReferenceStructures):
    """The first head of a group decides for all."""

    def merge_group(self, heads: Sequence[ScoredList], policy: GroupPolicy, budget: int) -> GroupLists:
        right = super().merge_group(heads, policy, budget)
        if policy != "max":
            return right
        loaded = super().merge_group(heads[:1], policy, budget).loaded
        return GroupLists(loaded, (loaded,) * len(heads))


@deviates("GQA-MERGE-SUM", fault_class="G", report="article 1, 7.3: a sum divided by the heads that list a position")
class AveragesTheGroup(ReferenceStructures):
    """Scores of a group are averaged over the heads that list a position."""

    def merge_group(self, heads: Sequence[ScoredList], policy: GroupPolicy, budget: int) -> GroupLists:
        right = super().merge_group(heads, policy, budget)
        return shared_lists(heads, lambda said: sum(said) / len(said), budget=budget) if policy == "sum" else right


@deviates("GQA-MERGE-SUM", fault_class="A", report="no report: logits added as if they were weights")
class AddsNegativeScores(ReferenceStructures):
    """Negative scores are added like any other."""

    def merge_group(self, heads: Sequence[ScoredList], policy: GroupPolicy, budget: int) -> GroupLists:
        return (
            shared_lists(heads, sum, budget=budget) if policy == "sum" else super().merge_group(heads, policy, budget)
        )


@deviates("GQA-MERGE-PRIVATE", fault_class="G", report="article 1, 7.3: a union of private lists that all heads attend")
class AttendsWhatItsGroupLoads(ReferenceStructures):
    """Every head attends what the group loads, whatever its own budget."""

    def merge_group(self, heads: Sequence[ScoredList], policy: GroupPolicy, budget: int) -> GroupLists:
        right = super().merge_group(heads, policy, budget)
        return replace(right, of_head=(right.loaded,) * len(heads))


@deviates("GQA-MERGE-PRIVATE", fault_class="G", report="article 1, 7.3: a private budget shared out among heads")
class SharesOneBudget(ReferenceStructures):
    """The heads of a group divide one budget among them."""

    def merge_group(self, heads: Sequence[ScoredList], policy: GroupPolicy, budget: int) -> GroupLists:
        if policy != "private":
            return super().merge_group(heads, policy, budget)
        return keep_private(heads, budget=max(1, budget // len(heads)))


@deviates("GQA-MERGE-TIE", fault_class="K", report="article 1, 5.2: equal scores, and another set in the next run")
class ListsTheHigherOfEquals(ReferenceStructures):
    """Of equal scores the higher position is listed."""

    def merge_group(self, heads: Sequence[ScoredList], policy: GroupPolicy, budget: int) -> GroupLists:
        mirrored = [ScoredList(-head.positions, head.scores) for head in heads]
        right = super().merge_group(mirrored, policy, budget)
        return GroupLists(np.sort(-right.loaded), tuple(np.sort(-listed) for listed in right.of_head))
