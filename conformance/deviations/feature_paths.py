"""Features that one of several paths of a kernel lacks, where every other path has them. [SCORE, LSE-SINK, GRAD]

A kernel is often several: for one query row and for many, for lists and for all keys, for rows that are split and rows
that are not, for codes and for numbers. What one of them forgets, no case on another one sees.
"""

from typing import ClassVar

import numpy as np
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backward, Forward, Tensors
from attnconform.conformance.deviations.biases import ChangesRules
from attnconform.conformance.deviations.deviation import build_backend, deviates
from attnconform.conformance.deviations.gradients import ForgetsTheSlopeOfTheCap, LeavesDsinkAtZero
from attnconform.conformance.deviations.lse import ForgetsTheSink
from attnconform.conformance.deviations.scores import IgnoresTheCap
from attnconform.conformance.views import ProblemView
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.rules import Alibi, RelativeBias, ScoreRule
from attnconform.reference.steps import Steps


class IgnoresSlopes(ChangesRules):
    """ALiBi is never added, under a soft cap neither."""

    def change(self, problem: AttentionProblem, rule: ScoreRule) -> ScoreRule:
        return Alibi((0.0,) * len(rule.slopes)) if isinstance(rule, Alibi) else rule


class IgnoresTables(ChangesRules):
    """The relative bias is never added."""

    def change(self, problem: AttentionProblem, rule: ScoreRule) -> ScoreRule:
        return RelativeBias(tuple((0.0,) for _ in rule.tables)) if isinstance(rule, RelativeBias) else rule


class OnOnePath(StepsBackend):
    """The reference, but for problems of one path, whose forward or backward another variation of it answers."""

    in_forward: ClassVar[type[Steps]] = Steps
    in_backward: ClassVar[type[Steps]] = Steps

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.forwards, self.backwards = build_backend(self.in_forward), build_backend(self.in_backward)

    def is_on_path(self, problem: ProblemView) -> bool:
        """Whether a problem takes the path that lacks something."""
        raise NotImplementedError

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        if self.is_on_path(problem):
            return self.forwards.forward(problem, tensors)
        return super().forward(problem, tensors)

    def backward(
        self, problem: ProblemView, tensors: Tensors, forward: Forward, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Backward:
        if self.is_on_path(problem):
            return self.backwards.backward(problem, tensors, forward, dout, dlse)
        return super().backward(problem, tensors, forward, dout, dlse)


def is_unsplit(problem: ProblemView) -> bool:
    """Whether rows are asked not to be split."""
    return problem.hints.num_kv_splits == 1


def granularity(problem: ProblemView) -> str:
    """dense, token or block."""
    return "dense" if problem.spec.candidates is None else problem.spec.candidates.granularity


def has_codes(problem: ProblemView) -> bool:
    """Whether a cache is quantized."""
    return problem.spec.k_quant is not None or problem.spec.v_quant is not None


def is_decode(problem: ProblemView) -> bool:
    """Whether every request has one query row."""
    return bool((np.diff(problem.spec.qo_indptr) == 1).all())


def is_prompt(problem: ProblemView) -> bool:
    """Whether requests begin with their first token and have several query rows."""
    return bool((problem.spec.q_offset == 0).all()) and not is_decode(problem)


@deviates("SCORE-ALIBI", fault_class="B", report="no report: slopes of a block path that runs prompts alone")
class IgnoresSlopesInUnsplitPromptsOfBlocks(OnOnePath):
    """ALiBi is left out of prompts over block lists that are not split."""

    in_forward = IgnoresSlopes

    def is_on_path(self, problem: ProblemView) -> bool:
        return granularity(problem) == "block" and is_unsplit(problem) and is_prompt(problem)


@deviates("SCORE-ALIBI", fault_class="A", report="no report: slopes that the kernel of whole prompts does not take")
class IgnoresSlopesInUnsplitPrompts(OnOnePath):
    """ALiBi is left out of prompts over all keys that are not split."""

    in_forward = IgnoresSlopes

    def is_on_path(self, problem: ProblemView) -> bool:
        return granularity(problem) == "dense" and is_unsplit(problem) and is_prompt(problem)


@deviates("SCORE-RELATIVE", fault_class="A", report="no report: a table that the list path of prompts does not take")
class IgnoresTablesInUnsplitPromptsOfLists(OnOnePath):
    """The relative bias is left out of prompts over token lists that are not split."""

    in_forward = IgnoresTables

    def is_on_path(self, problem: ProblemView) -> bool:
        return granularity(problem) == "token" and is_unsplit(problem) and is_prompt(problem)


@deviates("SCORE-SOFTCAP", fault_class="A", report="no report: a cap that the path of codes does not take")
class IgnoresTheCapInUnsplitListsOfCodes(OnOnePath):
    """The soft cap is left out where token lists over a quantized cache are not split."""

    in_forward = IgnoresTheCap

    def is_on_path(self, problem: ProblemView) -> bool:
        return granularity(problem) == "token" and is_unsplit(problem) and has_codes(problem)


@deviates("SCORE-SOFTCAP", fault_class="A", report="no report: a cap that the path of codes does not take")
class IgnoresTheCapInUnsplitBlocksOfCodes(OnOnePath):
    """The soft cap is left out where block lists over a quantized cache are not split."""

    in_forward = IgnoresTheCap

    def is_on_path(self, problem: ProblemView) -> bool:
        return granularity(problem) == "block" and is_unsplit(problem) and has_codes(problem)


@deviates("LSE-SINK", fault_class="L", report="no report: sinks that the path of codes does not take")
class ForgetsTheSinkOfDenseCodes(OnOnePath):
    """The sink logit enters nowhere where all keys of a quantized cache are read."""

    in_forward = ForgetsTheSink

    def is_on_path(self, problem: ProblemView) -> bool:
        return granularity(problem) == "dense" and has_codes(problem)


@deviates("LSE-SINK", fault_class="S", report="no report: a sink that joins in the merge of splits alone")
class ForgetsTheSinkOfUnsplitDecode(OnOnePath):
    """The sink logit enters nowhere where single rows over all keys are not split."""

    in_forward = ForgetsTheSink

    def is_on_path(self, problem: ProblemView) -> bool:
        return granularity(problem) == "dense" and is_unsplit(problem) and is_decode(problem)


@deviates("LSE-SINK", fault_class="S", report="no report: a sink that joins in the merge of splits alone")
class ForgetsTheSinkOfUnsplitLists(OnOnePath):
    """The sink logit enters nowhere where single rows over token lists are not split."""

    in_forward = ForgetsTheSink

    def is_on_path(self, problem: ProblemView) -> bool:
        return granularity(problem) == "token" and is_unsplit(problem) and is_decode(problem)


@deviates("LSE-SINK", fault_class="L", report="no report: sinks that the kernel of whole prompts does not take")
class ForgetsTheSinkOfUnsplitPrompts(OnOnePath):
    """The sink logit enters nowhere in prompts that are not split."""

    in_forward = ForgetsTheSink

    def is_on_path(self, problem: ProblemView) -> bool:
        return is_unsplit(problem) and is_prompt(problem)


@deviates("GRAD-SINK", fault_class="R", report="no report: dsink that the backward of codes does not give")
class LeavesDsinkOfDenseCodesAtZero(OnOnePath):
    """dsink is never accumulated where all keys of a quantized cache are read."""

    in_backward = LeavesDsinkAtZero

    def is_on_path(self, problem: ProblemView) -> bool:
        return granularity(problem) == "dense" and has_codes(problem)


@deviates("GRAD-SOFTCAP", fault_class="R", report="no report: the slope of a cap in the backward of whole prompts")
class ForgetsTheSlopeOfTheCapInPrompts(OnOnePath):
    """The derivative of the soft cap is taken for 1 in prompts over all keys."""

    in_backward = ForgetsTheSlopeOfTheCap

    def is_on_path(self, problem: ProblemView) -> bool:
        return granularity(problem) == "dense" and is_prompt(problem)


@deviates("GRAD-SOFTCAP", fault_class="R", report="no report: the slope of a cap in the backward of selected blocks")
class ForgetsTheSlopeOfTheCapInBlocksOfSingleRows(OnOnePath):
    """The derivative of the soft cap is taken for 1 where every row lists blocks of its own."""

    in_backward = ForgetsTheSlopeOfTheCap

    def is_on_path(self, problem: ProblemView) -> bool:
        lists = problem.spec.candidates
        return lists is not None and lists.granularity == "block" and lists.q_block_size == 1


@deviates("GRAD-FORMULA", fault_class="R", report="no report: weights recomputed without slopes in the path of blocks")
class ForgetsSlopesInTheBackwardOfDecodedBlocks(OnOnePath):
    """The backward recomputes weights without ALiBi where single rows list blocks."""

    in_backward = IgnoresSlopes

    def is_on_path(self, problem: ProblemView) -> bool:
        return granularity(problem) == "block" and is_decode(problem)


@deviates("GRAD-FORMULA", fault_class="R", report="no report: weights recomputed without slopes in the path of codes")
class ForgetsSlopesInTheBackwardOfBlocksOfCodes(OnOnePath):
    """The backward recomputes weights without ALiBi where blocks of a quantized cache are listed."""

    in_backward = IgnoresSlopes

    def is_on_path(self, problem: ProblemView) -> bool:
        return granularity(problem) == "block" and has_codes(problem)
