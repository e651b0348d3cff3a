"""Mistakes about heads: which KV head a query head reads, and whose lists it uses. [GQA]"""

from dataclasses import replace

import numpy as np

from attnconform.conformance.deviations.deviation import deviates
from attnconform.reference.coordinates import FloatArray, IntArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.steps import AttentionResult, Steps


@deviates("GQA-MAP", fault_class="G", report="BR-83 XunhaoLai/native-sparse-attention-triton#27")
class MapsHeadsInterleaved(Steps):
    """Query head h reads KV head h modulo num_kv_heads."""

    def kv_head(self, problem: AttentionProblem, qo_head: int) -> int:
        return qo_head % problem.num_kv_heads


@deviates("GQA-MAP", fault_class="G", report="BR-83 XunhaoLai/native-sparse-attention-triton#27: the wrong count")
class DividesHeadsByTheNumberOfKvHeads(Steps):
    """Query head h reads KV head h // num_kv_heads: right where the ratio is square."""

    def kv_head(self, problem: AttentionProblem, qo_head: int) -> int:
        return min(qo_head // problem.num_kv_heads, problem.num_kv_heads - 1)


@deviates("GQA-MAP", fault_class="G", report="article 2, 1.2: one KV head assumed")
class ReadsTheFirstKvHead(Steps):
    """Every query head reads KV head 0."""

    def kv_head(self, problem: AttentionProblem, qo_head: int) -> int:
        return 0


@deviates("GQA-MAP", fault_class="G", report="BR-83 XunhaoLai/native-sparse-attention-triton#27: one operand mapped")
class ReadsValuesOfAnotherHead(Steps):
    """K comes from the right KV head, V from the interleaved one."""

    def attend(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, q: FloatArray, k: FloatArray, v: FloatArray
    ) -> tuple[FloatArray, float]:
        swapped = v.copy()
        swapped[:, self.kv_head(problem, qo_head)] = v[:, qo_head % problem.num_kv_heads]
        return super().attend(problem, where, qo_head, q, k, swapped)


@deviates(
    "GQA-MAP", fault_class="G", report="BR-41 Dao-AILab/flash-attention#2528: heads packed into rows, unpacked wrong"
)
class StoresHeadsWithinGroupsFirst(Steps):
    """Heads are computed group by group and stored as if member by member."""

    def forward(self, problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
        result = super().forward(problem, q, k, v)
        order = np.arange(problem.num_qo_heads).reshape(problem.num_kv_heads, -1).T.ravel()
        return replace(result, out=result.out[:, order], lse=result.lse[:, order])


class PicksLists(Steps):
    """The reference with one hook: the query heads whose lists a head uses."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed = [Steps.candidates(self, problem, where, h).values for h in self.heads(problem, qo_head)]
        return Positions(np.unique(np.concatenate(listed)))

    def heads(self, problem: AttentionProblem, qo_head: int) -> range:
        """Query heads whose lists are read."""
        raise NotImplementedError


@deviates("GQA-LISTS", fault_class="G", report="flashinfer vsa_sm100_blk128: the first head of a group, silently")
class UsesTheListOfTheFirstHeadOfTheGroup(PicksLists):
    """The list of a group's first head serves the whole group."""

    def heads(self, problem: AttentionProblem, qo_head: int) -> range:
        first = qo_head // problem.group_size * problem.group_size
        return range(first, first + 1)


@deviates("GQA-LISTS", fault_class="G", report="article 1, 2.1: a group merged in attention and not before it")
class AttendsTheUnionOfTheGroup(PicksLists):
    """Every head attends to what any head of its group lists."""

    def heads(self, problem: AttentionProblem, qo_head: int) -> range:
        first = qo_head // problem.group_size * problem.group_size
        return range(first, first + problem.group_size)


@deviates("GQA-LISTS", fault_class="G", report="article 2, 2.1: broadcasting over heads")
class UsesTheListOfHeadZero(PicksLists):
    """One list serves every head."""

    def heads(self, problem: AttentionProblem, qo_head: int) -> range:
        return range(1)


class FindsLists(Steps):
    """The reference with one hook: the index of the list a row and head use."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        lists = problem.candidates
        if lists is None:
            return super().candidates(problem, where, qo_head)
        index = self.index(problem, where, qo_head) % lists.num_lists
        entries = lists.entries(index)
        inside = entries[entries * lists.block_size < int(problem.seqlen_kv[where.request])]
        alone = replace(lists, indptr=np.array([0, len(inside)]), indices=inside, sharing="shared", q_block_size=2**30)
        first = replace(where, request=0, local=0)
        moved = replace(problem, candidates=alone, seqlen_kv=problem.seqlen_kv[[where.request]])
        return super().candidates(moved, first, 0)

    def index(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> int:
        """Which list is read."""
        raise NotImplementedError


@deviates("GQA-LISTS", fault_class="K", report="BR-56 NVIDIA/TensorRT-LLM#17285: a head-major view read as contiguous")
class ReadsListsHeadMajor(FindsLists):
    """Lists are stored row by row and read head by head."""

    def index(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> int:
        assert problem.candidates is not None
        row, head = divmod(problem.list_index(where, qo_head), problem.lists_per_block)
        return head * (problem.candidates.num_lists // problem.lists_per_block) + row


@deviates(
    "GQA-LISTS", fault_class="K", report="BR-44 vllm-project/vllm#51848: per-token and per-block metadata mixed up"
)
class ReadsAListForEveryRow(FindsLists):
    """A list of several query rows is looked up by row, as if each row had its own."""

    def index(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> int:
        return where.row * problem.lists_per_block + problem.list_index(where, qo_head) % problem.lists_per_block


@deviates("COORD-ROW", fault_class="T", report="BR-64 invergent-ai/surogate#110")
class AddsTheBatchOffsetTwice(FindsLists):
    """The offset of a request's lists is added twice."""

    def index(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> int:
        first: IntArray = problem.qo_indptr
        return problem.list_index(where, qo_head) + int(first[where.request]) * problem.lists_per_block
