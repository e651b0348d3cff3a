"""Mistakes about which positions a list stands for: duplicates, holes, order, window, sink positions. [SET]"""

from bisect import bisect_left
from dataclasses import replace

import numpy as np

from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.deviations.masks import ReadsRules
from attnconform.reference.candidates import HOLE, candidate_set, expand_entries, sink_positions, window_positions
from attnconform.reference.coordinates import BoolArray, IntArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rule_values import mask_allows
from attnconform.reference.rules import Causal, HeadWindow, MaskRule, Window
from attnconform.reference.steps import Steps

CAPACITY = 32  # entries that a truncating kernel has room for; the matrix has longer lists


class ReadsEntries(Steps):
    """The reference with one hook: the entries of a list before they become a set."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        lists = problem.candidates
        if lists is None:
            return super().candidates(problem, where, qo_head)
        seqlen_kv = int(problem.seqlen_kv[where.request])
        return candidate_set(
            self.entries(problem, problem.list_index(where, qo_head), seqlen_kv),
            q_idx=where.q_idx,
            seqlen_kv=seqlen_kv,
            block_size=lists.block_size,
            window=lists.window,
            num_sink_tokens=lists.num_sink_tokens,
        )

    def entries(self, problem: AttentionProblem, list_idx: int, seqlen_kv: int) -> IntArray:
        """A list as given."""
        assert problem.candidates is not None
        last_entry = (seqlen_kv - 1) // problem.candidates.block_size if seqlen_kv else HOLE
        return self.change(problem.candidates.entries(list_idx), last_entry)

    def change(self, entries: IntArray, last_entry: int) -> IntArray:
        """What the mistake makes of a list."""
        return entries


class JoinsLists(Steps):
    """The reference with one hook: how D, W and A become one set."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        lists = problem.candidates
        if lists is None:
            return super().candidates(problem, where, qo_head)
        seqlen_kv = int(problem.seqlen_kv[where.request])
        entries = lists.entries(problem.list_index(where, qo_head))
        dynamic = expand_entries(entries[entries != HOLE], block_size=lists.block_size, seqlen_kv=seqlen_kv)
        local = window_positions(where.q_idx, window=lists.window, seqlen_kv=seqlen_kv)
        sinks = sink_positions(num_sink_tokens=lists.num_sink_tokens, seqlen_kv=seqlen_kv)
        return Positions(self.join(dynamic, local, sinks))

    def join(self, dynamic: IntArray, local: IntArray, sinks: IntArray) -> IntArray:
        """Positions of a row; dynamic ones as listed, duplicates included."""
        return np.unique(np.concatenate([dynamic, local, sinks]))


@deviates("SET-DUPLICATE", fault_class="K", report="attention-gym: its gather attention keeps duplicates")
class CountsADuplicateTwice(JoinsLists):
    """A position that is listed twice is attended twice."""

    def join(self, dynamic: IntArray, local: IntArray, sinks: IntArray) -> IntArray:
        others = np.setdiff1d(np.concatenate([local, sinks]), dynamic)
        return np.concatenate([dynamic, others])


@deviates("SET-DUPLICATE", fault_class="K", report="no report: a bit that is toggled, not set, for a listed position")
class CancelsADuplicate(ReadsEntries):
    """Listing a position a second time takes it out again."""

    def change(self, entries: IntArray, last_entry: int) -> IntArray:
        listed, times = np.unique(entries, return_counts=True)
        return np.asarray(listed[times % 2 == 1])


@deviates("SET-DUPLICATE", fault_class="K", report="article 1, 1.1: unique() without the sort that it needs")
class DropsOnlyAdjacentDuplicates(JoinsLists):
    """Duplicates are dropped where they stand side by side, and an unsorted list has others."""

    def join(self, dynamic: IntArray, local: IntArray, sinks: IntArray) -> IntArray:
        kept = np.ones(len(dynamic), dtype=bool)
        kept[1:] = dynamic[1:] != dynamic[:-1]
        others = np.setdiff1d(np.concatenate([local, sinks]), dynamic)
        return np.concatenate([dynamic[kept], others])


@deviates("SET-HOLE", fault_class="K", report="BR-79 NVIDIA/cudnn-frontend#676")
class StopsAtTheFirstHole(ReadsEntries):
    """The list ends at its first hole."""

    def change(self, entries: IntArray, last_entry: int) -> IntArray:
        holes = np.flatnonzero(entries == HOLE)
        return entries[: holes[0]] if holes.size else entries


@deviates("SET-HOLE", fault_class="K", report="NVIDIA/cudnn-frontend#298: a hole became key 0")
class ReadsAHoleAsKeyZero(ReadsEntries):
    """A hole is clamped to 0 and position 0 is attended."""

    def change(self, entries: IntArray, last_entry: int) -> IntArray:
        return np.maximum(entries, 0)


@deviates(
    "SET-HOLE", fault_class="K", report="BR-79 NVIDIA/cudnn-frontend#676: a valid length read over a list with gaps"
)
class CountsTheValidEntriesFromTheFront(ReadsEntries):
    """The number of valid entries is used as a length, so that a hole in front pushes a key off the end."""

    def change(self, entries: IntArray, last_entry: int) -> IntArray:
        return entries[: int((entries != HOLE).sum())]


@deviates("SET-HOLE", fault_class="K", report="TileLang sparse_mla_fwd: index -1 passes the position test")
class ReadsAHoleFromTheEnd(ReadsEntries):
    """A hole is an index that counts from the end, and the last position is attended."""

    def change(self, entries: IntArray, last_entry: int) -> IntArray:
        return np.asarray(np.where(entries == HOLE, last_entry, entries))


@deviates("SET-ORDER", fault_class="K", report="flashinfer-ai/flashinfer#5083: sorted lists assumed")
class StopsWhereTheListDescends(ReadsEntries):
    """The list is taken to be ascending, and read only as far as it is."""

    def change(self, entries: IntArray, last_entry: int) -> IntArray:
        listed = entries[entries != HOLE]
        descends = np.flatnonzero(np.diff(listed) < 0)
        return np.asarray(listed[: descends[0] + 1] if descends.size else listed)


@deviates("SET-ORDER", fault_class="K", report="flashinfer-ai/flashinfer#5083: sorted lists assumed")
class SearchesAnUnsortedList(ReadsEntries):
    """Whether a position is listed is decided by bisection, which misses entries of a list that is not sorted."""

    def change(self, entries: IntArray, last_entry: int) -> IntArray:
        listed = entries[entries != HOLE].tolist()
        found = (bisect_left(listed, entry) for entry in listed)
        is_found = [i < len(listed) and listed[i] == entry for i, entry in zip(found, listed, strict=True)]
        return np.array(listed, dtype=np.int64)[np.array(is_found, dtype=bool)]


@deviates("SET-IDENTITY", fault_class="K", report="article 1, 1.2: an interval stands for a list")
class TakesTheRangeOfTheList(ReadsEntries):
    """Everything between the smallest and the largest listed position is attended."""

    def change(self, entries: IntArray, last_entry: int) -> IntArray:
        listed = entries[entries != HOLE]
        return np.arange(listed.min(), listed.max() + 1) if listed.size else listed


@deviates("SET-IDENTITY", fault_class="K", report="article 1, 1.2: the end of indptr is exclusive")
class DropsTheLastEntry(ReadsEntries):
    """The last listed position is never read."""

    def change(self, entries: IntArray, last_entry: int) -> IntArray:
        return np.asarray(entries[entries != HOLE][:-1])


@deviates("SET-IDENTITY", fault_class="K", report="article 1, 1.2: the end of indptr is exclusive")
class ReadsOneEntryPastTheList(ReadsEntries):
    """The end of a list is taken to be inclusive, and the next list's first entry joins it."""

    def entries(self, problem: AttentionProblem, list_idx: int, seqlen_kv: int) -> IntArray:
        lists = problem.candidates
        assert lists is not None
        read = lists.indices[lists.indptr[list_idx] : lists.indptr[list_idx + 1] + 1]
        return read[read * lists.block_size < seqlen_kv]


@deviates("SET-IDENTITY", fault_class="C", report="BR-97 sgl-project/sglang#27338; article 1, 7.4: tiers that truncate")
class TruncatesLongLists(ReadsEntries):
    """A list longer than the capacity loses its end."""

    def change(self, entries: IntArray, last_entry: int) -> IntArray:
        return np.asarray(entries[entries != HOLE][:CAPACITY])


@deviates("SET-IDENTITY", fault_class="K", report="BR-80 sgl-project/sglang#30512: slots that selection left unwritten")
class PadsAShortListWithZero(ReadsEntries):
    """A list with an odd number of entries is padded with position 0."""

    def change(self, entries: IntArray, last_entry: int) -> IntArray:
        listed = entries[entries != HOLE]
        return np.append(listed, 0) if len(listed) % 2 else listed


@deviates("SET-UNION", fault_class="A", report="BR-115 EricLBuehler/mistral.rs#2094")
class ForgetsTheWindow(JoinsLists):
    """The window never joins the list."""

    def join(self, dynamic: IntArray, local: IntArray, sinks: IntArray) -> IntArray:
        return np.unique(np.concatenate([dynamic, sinks]))


@deviates("SET-UNION", fault_class="A", report="article 1, 1.1: sink positions left to the selector")
class ForgetsTheSinkPositions(JoinsLists):
    """The first positions never join the list."""

    def join(self, dynamic: IntArray, local: IntArray, sinks: IntArray) -> IntArray:
        return np.unique(np.concatenate([dynamic, local]))


@deviates("SET-UNION", fault_class="K", report="article 1, 1.1: routes that overlap are attended one after the other")
class CountsTheOverlapOfWindowAndListTwice(JoinsLists):
    """A position that is both listed and in the window is attended twice."""

    def join(self, dynamic: IntArray, local: IntArray, sinks: IntArray) -> IntArray:
        return np.concatenate([np.union1d(dynamic, sinks), local])


@deviates("SET-UNION", fault_class="K", report="article 1, 1.1: routes that overlap are attended one after the other")
class CountsTheOverlapOfSinksAndListTwice(JoinsLists):
    """A sink position that is also listed or in the window is attended twice."""

    def join(self, dynamic: IntArray, local: IntArray, sinks: IntArray) -> IntArray:
        return np.concatenate([np.union1d(dynamic, local), sinks])


@deviates("SET-UNION", fault_class="K", report="StreamingLLM: sink tokens and a window that has not left them yet")
class CountsTheOverlapOfWindowAndSinksTwice(JoinsLists):
    """A sink position that the window still holds is attended twice; listed ones are told apart."""

    def join(self, dynamic: IntArray, local: IntArray, sinks: IntArray) -> IntArray:
        return np.concatenate([np.setdiff1d(dynamic, np.union1d(local, sinks)), local, sinks])


@deviates("SET-UNION", fault_class="K", report="no report: each of two routes leaves a shared key to the other")
class DropsTheOverlapOfWindowAndList(JoinsLists):
    """A position that is both listed and in the window is attended by neither route."""

    def join(self, dynamic: IntArray, local: IntArray, sinks: IntArray) -> IntArray:
        return np.union1d(np.setxor1d(dynamic, local), sinks)


@deviates("SET-UNION", fault_class="K", report="no report: each of two routes leaves a shared key to the other")
class DropsTheOverlapOfSinksAndList(JoinsLists):
    """A sink position that is also listed is attended by neither route."""

    def join(self, dynamic: IntArray, local: IntArray, sinks: IntArray) -> IntArray:
        return np.union1d(np.setxor1d(dynamic, sinks), local)


class MovesTheWindow(Steps):
    """The reference with another window, as a number of positions and the position that it ends at."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        lists = problem.candidates
        if lists is None or not lists.window:
            return super().candidates(problem, where, qo_head)
        window, end = self.window(lists.window, where, int(problem.seqlen_kv[where.request]))
        moved = replace(problem, candidates=replace(lists, window=window))
        listed = super().candidates(moved, replace(where, q_idx=end), qo_head)
        return Positions(listed.values[listed.values >= 0])

    def window(self, window: int, where: QueryRow, seqlen_kv: int) -> tuple[int, int]:
        """Size of the window, and its last position."""
        return window, where.q_idx


@deviates("SET-UNION", fault_class="M", report="BR-43 flashinfer-ai/flashinfer#5189")
class WindowIsOneLonger(MovesTheWindow):
    """The window keeps i - j <= W, one position more than W."""

    def window(self, window: int, where: QueryRow, seqlen_kv: int) -> tuple[int, int]:
        return window + 1, where.q_idx


@deviates("SET-UNION", fault_class="M", report="BR-43 flashinfer-ai/flashinfer#5189")
class WindowIsOneShorter(MovesTheWindow):
    """The window loses its oldest position."""

    def window(self, window: int, where: QueryRow, seqlen_kv: int) -> tuple[int, int]:
        return window - 1, where.q_idx


@deviates("SET-UNION", fault_class="M", report="article 2, 5.1: decode's formula used for prefill")
class WindowEndsAtTheLastToken(MovesTheWindow):
    """Every row's window ends at the last committed position, as it does in decode."""

    def window(self, window: int, where: QueryRow, seqlen_kv: int) -> tuple[int, int]:
        return window, seqlen_kv - 1


@deviates("SET-UNION", fault_class="M", report="article 1, 1.1: recent tokens taken as those before the query")
class WindowLeavesTheQueryOut(MovesTheWindow):
    """The window holds the W positions before the query and not its own."""

    def window(self, window: int, where: QueryRow, seqlen_kv: int) -> tuple[int, int]:
        return window, where.q_idx - 1


@deviates("SET-ALIAS", fault_class="T", report="article 1, 7.3: duplicates dropped by physical address")
class DropsASecondPositionOfASlot(Steps):
    """Duplicates are dropped by slot, so that two positions on one page count once."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = super().effective(problem, where, qo_head)
        _, first = np.unique(self.slots(problem, where, kept).values, return_index=True)
        return Positions(kept.values[np.sort(first)])


@deviates("SET-ALIAS", fault_class="T", report="article 1, 7.3: an inverse page table holds one logical page a page")
class LastLogicalPageOwnsASharedPage(Steps):
    """A page listed at two places of a table is only known at the later one."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = super().effective(problem, where, qo_head)
        row = problem.cache.page_table[where.request]
        last = {int(page): logical for logical, page in enumerate(row) if page >= 0}
        logical_pages = kept.values // problem.cache.page_size
        known = np.array([last[int(row[p])] == p for p in logical_pages], dtype=bool)
        return Positions(kept.values[known])


class ReadsRulesUnderLists(ReadsRules):
    """The reference with one hook: which part of a mask rule is skipped where there are lists."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        self.has_lists = problem.candidates is not None
        return super().effective(problem, where, qo_head)

    def allows(self, rule: MaskRule | None, where: QueryRow, kv_idx: IntArray) -> BoolArray:
        return super().allows(None if self.has_lists and self.is_skipped(rule) else rule, where, kv_idx)

    def is_skipped(self, rule: MaskRule | None) -> bool:
        """Whether lists stand for this rule."""
        raise NotImplementedError


@deviates("SET-REPRESENTATION", fault_class="K", report="article 2, 6.3: a list that is taken to be causal already")
class LeavesCausalityToTheLists(ReadsRulesUnderLists):
    """Where there are lists, causality is not asked for."""

    def is_skipped(self, rule: MaskRule | None) -> bool:
        return isinstance(rule, Causal)


@deviates(
    "SET-REPRESENTATION", fault_class="A", report="BR-115 EricLBuehler/mistral.rs#2094: a path without the window"
)
class LeavesWindowsToTheLists(ReadsRulesUnderLists):
    """Where there are lists, window rules are not asked for."""

    def is_skipped(self, rule: MaskRule | None) -> bool:
        return isinstance(rule, Window | HeadWindow)


@deviates("SET-REPRESENTATION", fault_class="M", report="article 1, 1.2: a list of several rows; a mask a row")
class MasksAListByTheFirstRowOfItsBlock(Steps):
    """Rows that share a list are masked as the first of them."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed = self.candidates(problem, where, qo_head)
        rows = 1 if problem.candidates is None else problem.candidates.q_block_size
        first = where.q_idx - where.local % rows
        return Positions(listed.values[mask_allows(problem.mask_rule, where.request, first, listed.values, qo_head)])
