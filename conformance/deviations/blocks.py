"""Mistakes about blocks: what a listed block admits, and what a block mask stands for. [BLOCK]"""

from dataclasses import replace

import numpy as np

from attnconform.conformance.deviations.deviation import deviates
from attnconform.reference.candidates import Candidates
from attnconform.reference.coordinates import BoolArray, IntArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rule_values import mask_allows
from attnconform.reference.steps import Steps

TILE = 32  # keys that a kernel loads at once, more than a listed block
MASK_TILE = 8  # keys of a block of the block mask
ROWS_PER_TILE = 4  # query rows that share a tile


@deviates("BLOCK-BIND", fault_class="B", report="BR-65 Dao-AILab/flash-attention#2897; eager FlexAttention")
class IgnoresTheLists(Steps):
    """Every committed key that the mask rule allows is attended, whatever is listed."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        return Positions(np.arange(int(problem.seqlen_kv[where.request])))


@deviates("BLOCK-BIND", fault_class="B", report="article 1, 5.2: a dense path below a length threshold")
class GoesDenseWhereAListCoversHalf(Steps):
    """A row that lists half of its keys or more attends to all of them."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed, seqlen_kv = super().candidates(problem, where, qo_head), int(problem.seqlen_kv[where.request])
        return Positions(np.arange(seqlen_kv)) if 2 * len(listed) >= seqlen_kv else listed


@deviates(
    "BLOCK-BIND", fault_class="B", report="no report: a dense kernel for short requests, under the sparse one's name"
)
class GoesDenseForShortRequests(Steps):
    """A request of fewer than 24 keys is attended whole under its mask, whatever is listed."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        is_short = int(problem.seqlen_kv[where.request]) < 24
        return super().candidates(replace(problem, candidates=None) if is_short else problem, where, qo_head)


@deviates("BLOCK-MEMBER", fault_class="B", report="article 1, 1.2: S against U")
class AdmitsTheWholePage(Steps):
    """Every committed token of a page that holds a candidate is attended."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed, page_size = super().candidates(problem, where, qo_head), problem.cache.page_size
        return whole_groups(listed, page_size, int(problem.seqlen_kv[where.request]))


@deviates("BLOCK-MEMBER", fault_class="B", report="article 1, 1.2: page length and kernel tile differ")
class AdmitsTheWholeTile(Steps):
    """Every committed token of a tile that holds a candidate is attended."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed = super().candidates(problem, where, qo_head)
        return whole_groups(listed, TILE, int(problem.seqlen_kv[where.request]))


def whole_groups(listed: Positions, size: int, seqlen_kv: int) -> Positions:
    """All positions of the aligned groups of `size` that hold a listed one."""
    tokens = (np.unique(listed.values // size)[:, None] * size + np.arange(size)).ravel()
    return Positions(tokens[tokens < seqlen_kv])


@deviates("BLOCK-MEMBER", fault_class="B", report="article 2, 6.3: the union of several tokens' candidates as full")
class AttendsWhatAnyRowOfTheTileLists(Steps):
    """The rows of a query tile attend the union of their lists."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        start = where.local // ROWS_PER_TILE * ROWS_PER_TILE
        seqlen_q = int(np.diff(problem.qo_indptr)[where.request])
        neighbours = [neighbour(where, local) for local in range(start, min(start + ROWS_PER_TILE, seqlen_q))]
        listed = [Steps.candidates(self, problem, row, qo_head).values for row in neighbours]
        return Positions(np.unique(np.concatenate(listed)))


def neighbour(where: QueryRow, local: int) -> QueryRow:
    """Another row of the same request."""
    shift = local - where.local
    return replace(where, row=where.row + shift, local=local, q_idx=where.q_idx + shift)


class ReadsBlocks(Steps):
    """The reference with one hook: the candidates of a problem at block granularity."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        lists = problem.candidates
        if lists is None or lists.granularity == "token":
            return super().candidates(problem, where, qo_head)
        changed = replace(problem, candidates=self.change(problem, lists))
        listed = super().candidates(changed, where, qo_head).values
        return Positions(listed[listed < self.end(problem, where)])

    def change(self, problem: AttentionProblem, lists: Candidates) -> Candidates:
        """The lists as the mistake reads them."""
        return lists

    def end(self, problem: AttentionProblem, where: QueryRow) -> int:
        """Where the request ends."""
        return int(problem.seqlen_kv[where.request])


@deviates("BLOCK-EXPAND", fault_class="B", report="no report: a block id and a position have one type")
class TakesABlockForAToken(ReadsBlocks):
    """A block id is attended as a position."""

    def change(self, problem: AttentionProblem, lists: Candidates) -> Candidates:
        return replace(lists, granularity="token", block_size=1)


@deviates("BLOCK-EXPAND", fault_class="B", report="article 1, 1.2: page length and block length mixed up")
class ExpandsBlocksByThePageSize(ReadsBlocks):
    """A listed block is as long as a page."""

    def change(self, problem: AttentionProblem, lists: Candidates) -> Candidates:
        return replace(lists, block_size=problem.cache.page_size)


@deviates("BLOCK-EXPAND", fault_class="B", report="BR-74 microsoft/SeerAttention#33")
class DropsTheRaggedLastBlock(ReadsBlocks):
    """A last block that is not full is left out."""

    def end(self, problem: AttentionProblem, where: QueryRow) -> int:
        assert problem.candidates is not None
        size = problem.candidates.block_size
        return int(problem.seqlen_kv[where.request]) // size * size


@deviates("BLOCK-EXPAND", fault_class="B", report="BR-73 hao-ai-lab/FastVideo#925: block lengths of another layout")
class LosesTheLastTokenOfABlock(ReadsBlocks):
    """A block ends one token early."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed, lists = super().candidates(problem, where, qo_head).values, problem.candidates
        if lists is None or lists.granularity == "token":
            return Positions(listed)
        return Positions(listed[listed % lists.block_size != lists.block_size - 1])


class ReadsABlockMask(Steps):
    """The reference with the mask of a dense problem read block by block, and one hook for a block."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        if problem.candidates is not None or problem.mask_rule is None:
            return super().effective(problem, where, qo_head)
        kv_idx = np.arange(int(problem.seqlen_kv[where.request]))
        allowed = mask_allows(problem.mask_rule, where.request, where.q_idx, kv_idx, qo_head)
        tiles = np.split(allowed, range(MASK_TILE, len(allowed), MASK_TILE))
        kept = [self.members(tile) + i * MASK_TILE for i, tile in enumerate(tiles)]
        return Positions(np.concatenate([np.empty(0, dtype=np.int64), *kept]))

    def members(self, allowed: BoolArray) -> IntArray:
        """Offsets within a block that the row attends."""
        return np.flatnonzero(allowed)


@deviates("BLOCK-FULL", fault_class="B", report="article 2, 2.2: a block called full by its corner")
class CallsABlockFullByItsFirstElement(ReadsABlockMask):
    """A block whose first element is allowed is attended whole."""

    def members(self, allowed: BoolArray) -> IntArray:
        return np.arange(len(allowed)) if allowed[:1].any() else np.flatnonzero(allowed)


@deviates("BLOCK-FULL", fault_class="B", report="article 2, 2.2: full taken from what some row sees, not every row")
class CallsABlockFullBySomeRow(Steps):
    """A block that the next row of its tile sees whole is attended whole by this row as well."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        right = super().effective(problem, where, qo_head)
        if problem.candidates is not None or problem.mask_rule is None:
            return right
        kv_idx = np.arange(int(problem.seqlen_kv[where.request]))
        allowed = mask_allows(problem.mask_rule, where.request, where.q_idx + 1, kv_idx, qo_head)
        is_last = where.row + 1 == problem.qo_indptr[where.request + 1]
        full = [
            t for t in np.split(kv_idx, range(MASK_TILE, len(kv_idx), MASK_TILE)) if not is_last and allowed[t].all()
        ]
        return Positions(np.unique(np.concatenate([right.values, *full])))


@deviates("BLOCK-COMPLETE", fault_class="B", report="article 2, 2.1: partial blocks left out")
class DropsPartialBlocks(ReadsABlockMask):
    """Only blocks that are full are listed."""

    def members(self, allowed: BoolArray) -> IntArray:
        return np.flatnonzero(allowed) if allowed.all() else np.empty(0, dtype=np.int64)


@deviates("BLOCK-COMPLETE", fault_class="B", report="article 2, 2.1: the block where one edge is alone")
class DropsABlockWithOneEdge(ReadsABlockMask):
    """A block with a single edge is called empty."""

    def members(self, allowed: BoolArray) -> IntArray:
        return np.flatnonzero(allowed) if allowed.sum() != 1 else np.empty(0, dtype=np.int64)


@deviates("BLOCK-EXCLUSIVE", fault_class="B", report="article 2, 2.2: a full block among the partial ones as well")
class ListsFullBlocksAsPartialToo(ReadsABlockMask):
    """A full block stands in both lists and is attended twice."""

    def members(self, allowed: BoolArray) -> IntArray:
        kept = np.flatnonzero(allowed)
        return np.append(kept, kept) if allowed.all() else kept


@deviates("BLOCK-DECODE", fault_class="B", report="article 1, 1.2 and article 2, 2.1: the end of a row is exclusive")
class ReadsOneBlockPastTheFullOnes(Steps):
    """The block after a row's last full one is attended without its mask."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        right = super().effective(problem, where, qo_head)
        if problem.candidates is not None or problem.mask_rule is None:
            return right
        kv_idx = np.arange(int(problem.seqlen_kv[where.request]))
        tiles = np.split(kv_idx, range(MASK_TILE, len(kv_idx), MASK_TILE))
        full = [i for i, tile in enumerate(tiles) if tile.size and np.isin(tile, right.values).all()]
        past = tiles[full[-1] + 1] if full and full[-1] + 1 < len(tiles) else kv_idx[:0]
        return Positions(np.union1d(right.values, past))


@deviates("BLOCK-DECODE", fault_class="B", report="BR-71 pytorch/pytorch#136232: a block mask built for another length")
class UsesTheBlockMaskOfTheLongestRequest(Steps):
    """One block mask, that of the longest request, serves every request."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        if problem.candidates is not None or problem.mask_rule is None:
            return super().effective(problem, where, qo_head)
        listed = self.candidates(problem, where, qo_head).values
        longest = int(problem.seqlen_kv.argmax())
        q_idx = int(problem.q_offset[longest]) + where.local
        right = mask_allows(problem.mask_rule, where.request, where.q_idx, listed, qo_head)
        live = np.unique(listed[mask_allows(problem.mask_rule, longest, q_idx, listed, qo_head)] // MASK_TILE)
        return Positions(listed[right & np.isin(listed // MASK_TILE, live)])
