"""Mistakes about lse and the sink logit. [LSE]"""

from dataclasses import replace

import numpy as np

from attnconform.conformance.deviations.deviation import deviates
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rules import SoftCap
from attnconform.reference.states import PartialState, add_sink, finish
from attnconform.reference.steps import Steps


class ConvertsLse(Steps):
    """The reference with one hook: the lse of a row that is not empty."""

    def finish(self, problem: AttentionProblem, qo_head: int, state: PartialState) -> tuple[FloatArray, float]:
        out, lse = super().finish(problem, qo_head, state)
        return out, lse if np.isneginf(lse) else self.convert(lse, state)

    def convert(self, lse: float, state: PartialState) -> float:
        """The lse that is returned."""
        raise NotImplementedError


@deviates("LSE-NATURAL", fault_class="L", report="BR-37 sgl-project/sglang#35045; VSA Triton")
class ReturnsLseInBaseTwo(ConvertsLse):
    """lse is a logarithm to base 2, and is not declared so."""

    def convert(self, lse: float, state: PartialState) -> float:
        return lse / float(np.log(2.0))


@deviates("LSE-NATURAL", fault_class="L", report="BR-38 meta-pytorch/attention-gym#37")
class ReturnsAnLseOfZero(ConvertsLse):
    """lse is 0 everywhere."""

    def convert(self, lse: float, state: PartialState) -> float:
        return 0.0


@deviates("LSE-NATURAL", fault_class="L", report="article 1, 3.2: log of the sum without the maximum")
class LeavesTheMaximumOutOfLse(ConvertsLse):
    """lse is the logarithm of the sum after the maximum was subtracted."""

    def convert(self, lse: float, state: PartialState) -> float:
        return lse - state.m if np.isfinite(state.m) else lse


@deviates("LSE-NATURAL", fault_class="L", report="article 1, 3.2: the maximum stored where lse belongs")
class ReturnsTheMaximumForLse(ConvertsLse):
    """lse is the row's maximum."""

    def convert(self, lse: float, state: PartialState) -> float:
        return state.m if np.isfinite(state.m) else lse


@deviates("LSE-NATURAL", fault_class="L", report="no report: the sum stored where its logarithm belongs")
class ReturnsTheSumForLse(ConvertsLse):
    """The logarithm of the sum is forgotten."""

    def convert(self, lse: float, state: PartialState) -> float:
        return state.m + state.l if np.isfinite(state.m) else lse


class AddsTheSink(Steps):
    """The reference with one hook: how a sink logit enters a row's state."""

    def finish(self, problem: AttentionProblem, qo_head: int, state: PartialState) -> tuple[FloatArray, float]:
        if problem.sink_logits is None:
            return super().finish(problem, qo_head, state)
        return self.with_sink(problem, qo_head, state, float(problem.sink_logits[qo_head]))

    def with_sink(
        self, problem: AttentionProblem, qo_head: int, state: PartialState, sink: float
    ) -> tuple[FloatArray, float]:
        """Output and lse of a row of a problem with sinks."""
        raise NotImplementedError


@deviates("LSE-SINK", fault_class="S", report="BR-32 ROCm/rocm-libraries#12227")
class CountsTheSinkTwice(AddsTheSink):
    """The sink logit enters the denominator twice."""

    def with_sink(
        self, problem: AttentionProblem, qo_head: int, state: PartialState, sink: float
    ) -> tuple[FloatArray, float]:
        return finish(add_sink(add_sink(state, sink), sink))


@deviates("LSE-SINK", fault_class="A", report="BR-32 ROCm/rocm-libraries#12227: never, where no split has work")
class ForgetsTheSink(AddsTheSink):
    """The sink logit enters nowhere."""

    def with_sink(
        self, problem: AttentionProblem, qo_head: int, state: PartialState, sink: float
    ) -> tuple[FloatArray, float]:
        return finish(state)


@deviates("LSE-SINK", fault_class="L", report="BR-82 NVIDIA/cudnn-frontend#421: an lse without the sink")
class LeavesTheSinkOutOfLse(AddsTheSink):
    """The sink is in the output's denominator, and not in lse."""

    def with_sink(
        self, problem: AttentionProblem, qo_head: int, state: PartialState, sink: float
    ) -> tuple[FloatArray, float]:
        return finish(add_sink(state, sink))[0], finish(state)[1]


@deviates("LSE-SINK", fault_class="L", report="no report: an lse with the sink, an output without")
class LeavesTheSinkOutOfTheOutput(AddsTheSink):
    """The sink is in lse, and not in the output's denominator."""

    def with_sink(
        self, problem: AttentionProblem, qo_head: int, state: PartialState, sink: float
    ) -> tuple[FloatArray, float]:
        return finish(state)[0], finish(add_sink(state, sink))[1]


@deviates("LSE-SINK", fault_class="G", report="article 2, 1.2: sinks of the KV head")
class TakesTheSinkOfTheKvHead(AddsTheSink):
    """The sink logit is that of the KV head."""

    def with_sink(
        self, problem: AttentionProblem, qo_head: int, state: PartialState, sink: float
    ) -> tuple[FloatArray, float]:
        assert problem.sink_logits is not None
        return finish(add_sink(state, float(problem.sink_logits[self.kv_head(problem, qo_head)])))


@deviates("LSE-SINK", fault_class="A", report="BR-32 ROCm/rocm-libraries#12227: a wrong scale in one variant")
class ScalesTheSink(AddsTheSink):
    """The sink logit is multiplied by the scale of the scores."""

    def with_sink(
        self, problem: AttentionProblem, qo_head: int, state: PartialState, sink: float
    ) -> tuple[FloatArray, float]:
        return finish(add_sink(state, problem.sm_scale * sink))


@deviates("LSE-SINK", fault_class="L", report="article 1, 3.1: numerator and denominator on one base")
class AddsTheSinkWithoutTheMaximum(AddsTheSink):
    """exp(sink) joins a sum that has the maximum subtracted."""

    def with_sink(
        self, problem: AttentionProblem, qo_head: int, state: PartialState, sink: float
    ) -> tuple[FloatArray, float]:
        if not state.l:
            return finish(add_sink(state, sink))
        return finish(replace(state, l=state.l + float(np.exp(sink))))


@deviates("LSE-SINK", fault_class="E", report="BR-07 ikawrakow/ik_llama.cpp#2344: empty rows with sinks on")
class ForgetsTheSinkOfAnEmptyRow(AddsTheSink):
    """A row that sees no key has an lse of -inf though it has a sink."""

    def with_sink(
        self, problem: AttentionProblem, qo_head: int, state: PartialState, sink: float
    ) -> tuple[FloatArray, float]:
        return finish(add_sink(state, sink) if state.l else state)


@deviates("LSE-SINK", fault_class="L", report="no report: a power of two of a sink that log2 e was not multiplied into")
class RaisesTwoToTheSink(AddsTheSink):
    """The sink joins the denominator as a power of two, and the scores as powers of e."""

    def with_sink(
        self, problem: AttentionProblem, qo_head: int, state: PartialState, sink: float
    ) -> tuple[FloatArray, float]:
        return finish(add_sink(state, float(np.log(2.0)) * sink))


@deviates("LSE-SINK", fault_class="A", report="no report: a sink that stands among the scores before their rules")
class CapsTheSink(AddsTheSink):
    """The sink logit goes through the soft cap, as the scores do."""

    def with_sink(
        self, problem: AttentionProblem, qo_head: int, state: PartialState, sink: float
    ) -> tuple[FloatArray, float]:
        for rule in problem.score_rules:
            sink = rule.cap * float(np.tanh(sink / rule.cap)) if isinstance(rule, SoftCap) else sink
        return finish(add_sink(state, sink))


@deviates("LSE-SINK", fault_class="G", report="no report: the head's place in its group where its number is meant")
class TakesTheSinkOfTheHeadInsideItsGroup(AddsTheSink):
    """The sink logit is that of the head's place within its group."""

    def with_sink(
        self, problem: AttentionProblem, qo_head: int, state: PartialState, sink: float
    ) -> tuple[FloatArray, float]:
        assert problem.sink_logits is not None
        return finish(add_sink(state, float(problem.sink_logits[qo_head % problem.group_size])))


@deviates("LSE-SINK", fault_class="S", report="BR-32 ROCm/rocm-libraries#12227: twice, where split 0 has no work")
class AddsTheSinkAgainAfterAnEmptySplit(AddsTheSink):
    """The sink counts twice in a row that sees keys in the second half of its request alone."""

    def attend(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, q: FloatArray, k: FloatArray, v: FloatArray
    ) -> tuple[FloatArray, float]:
        positions = self.effective(problem, where, qo_head).values
        self.is_first_half_empty = bool((2 * positions >= int(problem.seqlen_kv[where.request])).all())
        return super().attend(problem, where, qo_head, q, k, v)

    def with_sink(
        self, problem: AttentionProblem, qo_head: int, state: PartialState, sink: float
    ) -> tuple[FloatArray, float]:
        is_again = self.is_first_half_empty and state.l > 0
        return finish(add_sink(add_sink(state, sink) if is_again else state, sink))


@deviates("LSE-SINK", fault_class="E", report="BR-07 ikawrakow/ik_llama.cpp#2344: NaN of empty rows with sinks on")
class SubtractsTheMaximumOfAnEmptyRowFromItsSink(AddsTheSink):
    """The sink of a row that sees no key is exp(sink - -inf): the output is 0, and lse is NaN."""

    def with_sink(
        self, problem: AttentionProblem, qo_head: int, state: PartialState, sink: float
    ) -> tuple[FloatArray, float]:
        out, lse = finish(add_sink(state, sink))
        return out, lse if state.l else np.nan


@deviates(
    "LSE-SINK", fault_class="E", report="article 1, 3.2: log of the sum without the maximum, where the sink is it"
)
class LeavesTheSinkOutOfTheLseOfAnEmptyRow(AddsTheSink):
    """The lse of a row that sees no key is the logarithm of its one weight, 0, without the sink that is its maximum."""

    def with_sink(
        self, problem: AttentionProblem, qo_head: int, state: PartialState, sink: float
    ) -> tuple[FloatArray, float]:
        out, lse = finish(add_sink(state, sink))
        return out, lse if state.l else 0.0
