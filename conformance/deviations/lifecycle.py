"""Mistakes that one call does not show: plans, workspaces and replays of another call; other batches. [PLAN]"""

from copy import copy
from dataclasses import replace

import msgspec
import numpy as np
import torch

from attnconform.conformance.adapters.reference_plans import Plan, ReferencePlans, Repeats
from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Forward, Tensors
from attnconform.conformance.deviations.deviation import deviates, faithful
from attnconform.conformance.deviations.variants import DECLARED, ComputesInFloat32, merge_float32
from attnconform.conformance.views import ProblemView
from attnconform.reference.coordinates import FloatArray, IntArray, Positions
from attnconform.reference.planned_attention import PlannedAttention
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.states import PartialState, empty_state
from attnconform.reference.steps import AttentionResult, Steps


@deviates("PLAN-REPLAN", fault_class="C", report="BR-95 NVIDIA/TensorRT-LLM#18443: a schedule of earlier lengths")
class KeepsThePlanWhereTheRowsFit(ReferencePlans):
    """Planning again for as many rows leaves the plan as it was."""

    def replan(self, handle: Plan, problem: ProblemView) -> Plan:
        return handle


@deviates("PLAN-REPLAN", fault_class="C", report="article 1, 5.2: a plan found without its candidates")
class FindsPlansWithoutTheirCandidates(StepsBackend):
    """A problem is looked up by its shapes and lengths, and the lists of the first one serve."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.found: dict[object, AttentionProblem] = {}

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        spec = problem.spec
        key = (spec.qo_indptr.tobytes(), spec.seqlen_kv.tobytes(), spec.num_qo_heads, spec.head_dim_qk, tensors.q.dtype)
        lists = self.found.setdefault(key, spec).candidates
        is_alike = lists is not None and spec.candidates is not None and lists.num_lists == spec.candidates.num_lists
        stale = replace(spec, candidates=lists) if is_alike else spec
        return super().forward(replace(problem, spec=stale), tensors)


class FindsPlans(StepsBackend):
    """The reference with one hook: what a problem takes from the first one that had its shapes."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.found: dict[object, AttentionProblem] = {}

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        spec = problem.spec
        shapes = (spec.qo_indptr.tobytes(), tensors.q.shape, tensors.k_cache.shape, tensors.q.dtype)
        first = self.found.setdefault(shapes, spec)
        return super().forward(replace(problem, spec=self.stale(spec, first)), tensors)

    def stale(self, spec: AttentionProblem, first: AttentionProblem) -> AttentionProblem:
        """The problem with what was planned for the first one."""
        raise NotImplementedError


@deviates("PLAN-REPLAN", fault_class="C", report="no report: a plan found under its lengths alone")
class FindsPlansWithoutTheirPageTable(FindsPlans):
    """A problem is looked up by its shapes, and the page table of the first one serves."""

    def stale(self, spec: AttentionProblem, first: AttentionProblem) -> AttentionProblem:
        if first.cache.page_table.shape != spec.cache.page_table.shape:
            return spec
        return replace(spec, cache=replace(spec.cache, page_table=first.cache.page_table))


@deviates("PLAN-REPLAN", fault_class="C", report="BR-95 alibaba/rtp-llm#378: planned for earlier lengths")
class FindsPlansWithoutTheirLengths(FindsPlans):
    """A problem is looked up by its shapes, and attended to the length that the first one had."""

    def stale(self, spec: AttentionProblem, first: AttentionProblem) -> AttentionProblem:
        has_pages = (first.seqlen_kv <= spec.cache.page_table.shape[1] * spec.cache.page_size).all()
        return replace(spec, seqlen_kv=first.seqlen_kv, cache=first.cache) if has_pages else spec


@deviates("PLAN-REPLAN", fault_class="C", report="no report: the scale compiled in, and found again without it")
class FindsPlansWithoutTheirScale(FindsPlans):
    """A problem is looked up by its shapes, and scaled by what the first one was scaled by."""

    def stale(self, spec: AttentionProblem, first: AttentionProblem) -> AttentionProblem:
        return replace(spec, sm_scale=first.sm_scale)


@deviates("PLAN-REPLAN", fault_class="C", report="no report: sink logits uploaded once")
class FindsPlansWithoutTheirSinks(FindsPlans):
    """A problem is looked up by its shapes, and the sink logits of the first one serve."""

    def stale(self, spec: AttentionProblem, first: AttentionProblem) -> AttentionProblem:
        return replace(spec, sink_logits=first.sink_logits if spec.sink_logits is not None else None)


@deviates("PLAN-REPLAN", fault_class="C", report="no report: a seed captured with the graph")
class FindsPlansWithoutTheirSeed(FindsPlans):
    """A problem is looked up by its shapes, and drops the edges that the first one dropped."""

    def stale(self, spec: AttentionProblem, first: AttentionProblem) -> AttentionProblem:
        return replace(spec, dropout=first.dropout if spec.dropout is not None else None)


@deviates("PLAN-REPLAN", fault_class="C", report="no report: a captured query offset")
class FindsPlansWithoutTheirOffsets(FindsPlans):
    """A problem is looked up by its shapes, and its queries stand where those of the first one stood."""

    def stale(self, spec: AttentionProblem, first: AttentionProblem) -> AttentionProblem:
        return replace(spec, q_offset=first.q_offset)


@deviates("PLAN-REPLAN", fault_class="C", report="no report: an epilogue's numbers compiled in")
class FindsPlansWithoutTheirGates(FindsPlans):
    """A problem is looked up by its shapes, and gated as the first one was."""

    def stale(self, spec: AttentionProblem, first: AttentionProblem) -> AttentionProblem:
        return replace(spec, epilogue=first.epilogue)


@deviates("PLAN-REPLAN", fault_class="C", report="no report: window and sink positions as constants of a kernel")
class FindsPlansWithoutTheirLocalKeys(FindsPlans):
    """A problem is looked up by its shapes, and has the window and the sink positions of the first one."""

    def stale(self, spec: AttentionProblem, first: AttentionProblem) -> AttentionProblem:
        lists, before = spec.candidates, first.candidates
        if lists is None or before is None:
            return spec
        local = replace(lists, window=before.window, num_sink_tokens=before.num_sink_tokens)
        return replace(spec, candidates=local)


@deviates("PLAN-REPLAN", fault_class="Q", report="no report: a scale of codes read when the plan was made")
class FindsPlansWithoutTheirCodeScales(FindsPlans):
    """A problem is looked up by its shapes, and its codes are worth what those of the first one were."""

    def stale(self, spec: AttentionProblem, first: AttentionProblem) -> AttentionProblem:
        return replace(spec, k_quant=first.k_quant, v_quant=first.v_quant)


@deviates("PLAN-REPLAN", fault_class="C", report="BR-101 pytorch/pytorch#185449: a key without what the code is for")
class FindsPlansWithoutTheirDtype(StepsBackend):
    """A problem is looked up by its shapes, and its output is rounded to the dtype of the first one."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.found: dict[object, torch.dtype] = {}

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        first = self.found.setdefault(tensors.q.shape, tensors.q.dtype)
        out = torch.from_numpy(result.out).to(first).to(torch.float64).numpy()
        super().store(tensors, replace(result, out=out))


@deviates("PLAN-REPLAN", fault_class="C", report="BR-95 alibaba/rtp-llm#378: planned for earlier lengths")
class KeepsTheLongestLengths(ReferencePlans):
    """Lengths only grow when a plan is made again, so that a shorter batch sees keys of the one before."""

    def replan(self, handle: Plan, problem: ProblemView) -> Plan:
        before = handle.planned.problem
        handle = super().replan(handle, problem)
        longest = np.maximum(before.seqlen_kv, problem.spec.seqlen_kv)
        table = before.cache.page_table
        if (before.seqlen_kv >= problem.spec.seqlen_kv).all() and problem.spec.candidates is None:
            cache = replace(handle.planned.problem.cache, page_table=table)
            handle.planned.problem = replace(handle.planned.problem, seqlen_kv=longest, cache=cache)
        return handle


@deviates("PLAN-WORKSPACE", fault_class="C", report="BR-05 Dao-AILab/flash-attention#2906: NaN scaled by 0")
class ScalesItsWorkspaceByZero(StepsBackend):
    """Rows are added to 0 times what the workspace held, which NaN survives."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.workspace: FloatArray = np.zeros(0)

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        if self.workspace.shape != result.out.shape:
            self.workspace = np.zeros(result.out.shape)
        self.workspace = result.out + 0.0 * self.workspace
        super().store(tensors, AttentionResult(self.workspace, result.lse))


@deviates("PLAN-WORKSPACE", fault_class="S", report="BR-98 vllm-project/vllm#25520: a dirty workspace")
class MergesALeftoverSplit(ReferencePlans):
    """A split that is not written is merged as the workspace holds it, by a weight of 0."""

    def plan(self, problem: ProblemView, dtype: torch.dtype) -> Plan:
        made = super().plan(problem, dtype)
        made.planned.out[...] = 0
        return made

    def run(self, handle: Plan, tensors: Tensors) -> Forward:
        left = handle.planned.out[..., 0] * 0.0
        result = super().run(handle, tensors)
        tensors.lse.add_(torch.from_numpy(left))
        return result


@deviates("PLAN-INPUTS", fault_class="C", report="article 1, 5.2: scratch is not the cache")
class FindsResultsByAddress(StepsBackend):
    """A call on tensors at addresses that it has seen gives what it gave."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.seen: dict[int, tuple[Tensors, AttentionResult]] = {}

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        known = self.seen.get(id(tensors))
        if known is None:
            result = super().forward(problem, tensors)
            self.seen = {id(tensors): (tensors, result.saved)}  # held, so that its address is not given away
            return result
        self.store(tensors, known[1])
        return Forward(tensors.out, tensors.lse, saved=known[1])


@deviates("PLAN-INPUTS", fault_class="C", report="article 1, 5.2: scratch is not the cache")
class GathersKeysOnce(ReferencePlans):
    """Keys are copied in a plan's first run, and later runs read the copy."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.gathered: dict[int, tuple[Plan, FloatArray]] = {}

    def load(self, handle: Plan, tensors: Tensors) -> tuple[FloatArray, FloatArray, FloatArray]:
        q, k, v = super().load(handle, tensors)
        first = self.gathered.setdefault(id(handle), (handle, k.copy()))
        return q, first[1], v


@deviates("PLAN-APART", fault_class="C", report="BR-95 alibaba/rtp-llm#1084: two wrappers, one plan")
class SharesOneTaskTable(ReferencePlans):
    """Plans for as many rows share their tables, and the last one planned is what runs."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.tables: dict[tuple[int, ...], PlannedAttention] = {}

    def plan(self, problem: ProblemView, dtype: torch.dtype) -> Plan:
        made = super().plan(problem, dtype)
        shared = self.tables.setdefault(made.planned.out.shape, made.planned)
        shared.replan(problem.spec)
        return replace(made, planned=shared)


@deviates("PLAN-COPY", fault_class="C", report="article 1, 5.1: who owns index storage, and for how long")
class ReadsIndexStorageLate(ReferencePlans):
    """A plan keeps the caller's own page table and lists, and reads them when it runs."""

    def plan(self, problem: ProblemView, dtype: torch.dtype) -> Plan:
        made = super().plan(problem, dtype)
        made.planned.problem = problem.spec
        return made


@deviates("PLAN-ALLOCATE", fault_class="A", report="article 1, 5.1: workspace is reserved when a plan is made")
class AllocatesInRun(ReferencePlans):
    """Every run takes new memory for its copies of q, k and v."""

    def load(self, handle: Plan, tensors: Tensors) -> tuple[FloatArray, FloatArray, FloatArray]:
        q, k, v = (torch.empty_like(x) for x in (handle.q, handle.k, handle.v))
        return super().load(replace(handle, q=q, k=k, v=v), tensors)


@deviates("PLAN-REPLAY", fault_class="C", report="article 1, 7.2: swapped tensor references")
class ReplaysOldStorage(ReferencePlans):
    """Planning again makes new tables, and a captured launch keeps those that it was captured with."""

    def replan(self, handle: Plan, problem: ProblemView) -> Plan:
        handle.planned = PlannedAttention(problem.spec, steps=self.steps)
        return handle

    def capture(self, handle: Plan, tensors: Tensors) -> Repeats:
        return super().capture(copy(handle), tensors)


@deviates("PLAN-REPLAY", fault_class="C", report="BR-95 NVIDIA/TensorRT-LLM#18443")
class ReplaysTheGridOfTheCapture(ReferencePlans):
    """A replay covers as many keys of each request as there were when it was captured."""

    def capture(self, handle: Plan, tensors: Tensors) -> Repeats:
        captured = handle.planned.problem.seqlen_kv.copy()

        def launch() -> Forward:
            now = handle.planned.problem
            handle.planned.problem = cut_to(now, np.minimum(now.seqlen_kv, captured))
            try:
                return self.run(handle, tensors)
            finally:
                handle.planned.problem = now

        return Repeats(launch)


def cut_to(problem: AttentionProblem, lengths: IntArray) -> AttentionProblem:
    """The problem without the keys past some lengths, listed or not."""
    lists = problem.candidates
    if lists is None:
        return replace(problem, seqlen_kv=lengths)
    blocks = -(-np.diff(problem.qo_indptr) // lists.q_block_size) * problem.lists_per_block
    ids = np.repeat(np.repeat(-(-lengths // lists.block_size), blocks), np.diff(lists.indptr))
    cut = replace(lists, indices=np.where(lists.indices < ids, lists.indices, -1))
    return replace(problem, seqlen_kv=lengths, candidates=cut)


class AsManySplitsAsRequests(Steps):
    """The reference in float32, with as many splits as the batch has requests."""

    num_requests = 1

    def forward(self, problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
        self.num_requests = max(problem.batch_size, 1)
        return super().forward(problem, q, k, v)

    def splits(self, num_keys: int) -> list[slice]:
        size = max(-(-num_keys // self.num_requests), 1)
        return [slice(start, start + size) for start in range(0, num_keys, size)]

    def state(self, scores: FloatArray, v: FloatArray) -> PartialState:
        return merge_float32(empty_state(v.shape[1]), super().state(scores, v))

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        merged = empty_state(head_dim_vo)
        for state in states:
            merged = merge_float32(merged, state)
        return merged


@deviates("DETERMINISM-BATCH", fault_class="N", report="no report: splits chosen by what the batch leaves idle")
class SplitsByTheBatch(StepsBackend):
    """The number of splits depends on the number of requests, and batch invariance is declared."""

    steps = AsManySplitsAsRequests()
    capabilities = msgspec.structs.replace(DECLARED, determinism="batch_invariant")


@faithful
class IsBatchInvariantAsDeclared(StepsBackend):
    """Keys are added in float32 in tiles of 16, whatever else is in the batch, and batch invariance is declared."""

    steps = ComputesInFloat32()
    capabilities = msgspec.structs.replace(DECLARED, determinism="batch_invariant")


@faithful
class PlansFirst(ReferencePlans):
    """A plan is made, run and captured, with storage of its own."""


@deviates("SET-REPRESENTATION", fault_class="B", report="article 2, 6.3: table on, mask only, dense")
class TakesAWholeListForDense(Steps):
    """A list of everything that is committed goes a dense way, where the mask rule is forgotten."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed = self.candidates(problem, where, qo_head)
        is_whole = problem.candidates is not None and len(listed) == int(problem.seqlen_kv[where.request])
        return listed if is_whole else super().effective(problem, where, qo_head)


@deviates("SCORE-WEIGHTS", fault_class="Q", report="no report: values held in a narrow range inside the kernel")
class ClampsValues(Steps):
    """Values past 3.5 are taken for 3.5."""

    def values(self, problem: AttentionProblem, slots: IntArray, kv_head: int, v: FloatArray) -> FloatArray:
        return np.minimum(super().values(problem, slots, kv_head, v), 3.5)


@deviates("SCORE-WEIGHTS", fault_class="Q", report="no report: a sum in fixed point")
class RoundsOutputsToAFixedQuantum(StepsBackend):
    """Outputs are multiples of 2^-20, which a sum in fixed point gives."""

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        super().store(tensors, replace(result, out=np.rint(result.out * 2.0**20) / 2.0**20))
