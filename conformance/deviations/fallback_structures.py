"""Mistakes in the choice of a path, and in what is written down about it. [FALLBACK]"""

from collections.abc import Sequence
from dataclasses import replace

from attnconform.conformance.adapters.reference_structures import ReferenceStructures
from attnconform.conformance.deviations.deviation import deviates
from attnconform.reference.fallback import (
    BatchFacts,
    Decision,
    FallbackReport,
    SparsePath,
    choose_path,
    choose_paths,
    is_dense_now,
    reasons_of,
    report,
)


class DecidesOtherwise(ReferenceStructures):
    """Decisions of the reference, changed one by one; records and counts follow from them."""

    def choose_paths(self, batches: Sequence[BatchFacts], path: SparsePath) -> FallbackReport:
        right = choose_paths(batches, path).decisions
        return report(batches, [self.decide(b, d, path) for b, d in zip(batches, right, strict=True)])

    def decide(self, facts: BatchFacts, right: Decision, path: SparsePath) -> Decision:
        """The decision as the mistake makes it."""
        raise NotImplementedError


@deviates("FALLBACK-REASON", fault_class="A", report="article 1, 5.2: a reason that is recorded is the one that holds")
class NamesTheLastReason(DecidesOtherwise):
    """Of several reasons the last one is named."""

    def decide(self, facts: BatchFacts, right: Decision, path: SparsePath) -> Decision:
        reasons = reasons_of(facts, path)
        return replace(right, reason=reasons[-1]) if right.path == "fallback" and reasons else right


@deviates("FALLBACK-REASON", fault_class="D", report="article 1, 7.2: an unsupported head dimension is padded silently")
class TakesEachHeadDimensionAlone(ReferenceStructures):
    """Head dimensions of queries and of values are looked up one by one, not as a pair."""

    def choose_paths(self, batches: Sequence[BatchFacts], path: SparsePath) -> FallbackReport:
        pairs = frozenset((qk, vo) for qk, _ in path.head_dims for _, vo in path.head_dims)
        return choose_paths(batches, replace(path, head_dims=pairs))


@deviates("FALLBACK-REASON", fault_class="A", report="article 1, 5.2: a workspace that is too small is a reason")
class RunsWithoutEnoughWorkspace(ReferenceStructures):
    """What a batch needs of workspace is not compared with what there is."""

    def choose_paths(self, batches: Sequence[BatchFacts], path: SparsePath) -> FallbackReport:
        return choose_paths(batches, replace(path, workspace_bytes=max(b.workspace_bytes for b in batches)))


@deviates("FALLBACK-RECORD", fault_class="A", report="article 1, 5.2: reason, lengths, batch and time of each fallback")
class RecordsNoTime(ReferenceStructures):
    """Records hold no seconds."""

    def choose_paths(self, batches: Sequence[BatchFacts], path: SparsePath) -> FallbackReport:
        right = choose_paths(batches, path)
        return replace(right, records=tuple(replace(record, seconds=0.0) for record in right.records))


@deviates("FALLBACK-RECORD", fault_class="A", report="article 1, 5.2: a few fallbacks vanish in the total")
class RecordsAReasonOnce(ReferenceStructures):
    """Only the first fallback of each reason leaves a record."""

    def choose_paths(self, batches: Sequence[BatchFacts], path: SparsePath) -> FallbackReport:
        right = choose_paths(batches, path)
        first = {record.reason: record for record in reversed(right.records)}
        return replace(right, records=tuple(r for r in right.records if r is first[r.reason]))


@deviates("FALLBACK-COUNT", fault_class="A", report="article 1, 7.2: the share of requests that fall back is an alarm")
class CountsBatchesForRequests(ReferenceStructures):
    """The share is that of batches, whatever their size."""

    def choose_paths(self, batches: Sequence[BatchFacts], path: SparsePath) -> FallbackReport:
        right = choose_paths(batches, path)
        ran = len(batches) - right.num_refused
        return replace(right, request_share=len(right.records) / ran)


@deviates("FALLBACK-COUNT", fault_class="A", report="article 1, 7.3: everything counted as fallback hides the severity")
class CountsRefusalsAsFallbacks(ReferenceStructures):
    """Refused batches stand among the fallbacks' counters."""

    def choose_paths(self, batches: Sequence[BatchFacts], path: SparsePath) -> FallbackReport:
        right = choose_paths(batches, path)
        return replace(right, counts={**right.counts, "refused": right.num_refused}, num_refused=0)


@deviates("FALLBACK-HYSTERESIS", fault_class="C", report="article 1, 5.2: a plan anew at every small change of shape")
class HasOneThreshold(ReferenceStructures):
    """Sparse is entered again as soon as the rate is below the threshold at which it was left."""

    def choose_paths(self, batches: Sequence[BatchFacts], path: SparsePath) -> FallbackReport:
        return choose_paths(batches, replace(path, enter_below=path.leave_above))


@deviates("FALLBACK-HYSTERESIS", fault_class="C", report="no report: the state of the rate stands still meanwhile")
class LosesSightOfTheRate(ReferenceStructures):
    """A batch that falls back for another reason does not move the state of the rate."""

    def choose_paths(self, batches: Sequence[BatchFacts], path: SparsePath) -> FallbackReport:
        is_dense, decisions = False, []
        for facts in batches:
            if facts.fault is not None:
                decisions.append(Decision(path="refused", reason=facts.fault))
                continue
            if not reasons_of(facts, path):
                is_dense = is_dense_now(facts.candidate_rate, path, was_dense=is_dense)
            decisions.append(choose_path(facts, path, is_dense=is_dense))
        return report(batches, decisions)


@deviates("FALLBACK-EMPTY", fault_class="E", report="article 1, 5.2: no candidates among the conditions of a fallback")
class LeavesThePathForEmptyRows(DecidesOtherwise):
    """A batch with an empty row runs dense."""

    def decide(self, facts: BatchFacts, right: Decision, path: SparsePath) -> Decision:
        leaves = right.path == "sparse" and facts.num_empty_rows
        return Decision(path="fallback", reason="empty") if leaves else right


@deviates("FALLBACK-SECURITY", fault_class="A", report="article 1, 7.3: a wrong owner is not repaired by a dense path")
class FallsBackForAnOwnersFault(DecidesOtherwise):
    """A batch that names another request's page runs dense."""

    def decide(self, facts: BatchFacts, right: Decision, path: SparsePath) -> Decision:
        return Decision(path="fallback", reason="rule") if facts.fault is not None else right


@deviates("FALLBACK-SECURITY", fault_class="A", report="article 1, 7.3: severity covered up by another reason")
class FindsFaultsOnTheSparsePathAlone(DecidesOtherwise):
    """A batch that falls back anyway is not looked at for faults."""

    def decide(self, facts: BatchFacts, right: Decision, path: SparsePath) -> Decision:
        reasons = reasons_of(facts, path)
        return Decision(path="fallback", reason=reasons[0]) if facts.fault is not None and reasons else right
