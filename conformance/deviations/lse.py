"""Mistakes about lse and the sink logit. [LSE]"""

from dataclasses import replace

import numpy as np

from attnconform.conformance.deviations.deviation import deviates
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.problem import AttentionProblem
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
