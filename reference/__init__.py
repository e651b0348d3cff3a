"""What SPEC.md means: float64 and mpmath, slow and obvious. Imports no framework and no kernel."""

from attnconform.reference.attention import (
    EffectiveSets,
    attention,
    attention_gradients,
    check_tensors,
    effective_sets,
)
from attnconform.reference.block_mask import (
    BlockLists,
    BlockMask,
    build_block_mask,
    decode_block_mask,
    transpose_block_mask,
)
from attnconform.reference.cache import PagedCache
from attnconform.reference.candidates import HOLE, Candidates, candidate_set
from attnconform.reference.coordinates import PageOffsets, Positions, Slots, to_page_offsets, to_slots
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import AttentionProblem, check_problem, default_q_offset
from attnconform.reference.rules import (
    Alibi,
    And,
    Causal,
    CustomMask,
    CustomScore,
    Document,
    HeadWindow,
    MaskRule,
    Or,
    PrefixLM,
    RelativeBias,
    ScoreRule,
    SoftCap,
    Window,
)
from attnconform.reference.states import PartialState, empty_state, finish, merge, merge_outputs
from attnconform.reference.steps import AttentionResult, Gradients, Steps

__all__ = [
    "HOLE",
    "Alibi",
    "And",
    "AttentionProblem",
    "AttentionResult",
    "BlockLists",
    "BlockMask",
    "Candidates",
    "Causal",
    "CustomMask",
    "CustomScore",
    "Document",
    "EffectiveSets",
    "Gradients",
    "HeadWindow",
    "MaskRule",
    "Or",
    "PageOffsets",
    "PagedCache",
    "PartialState",
    "Positions",
    "PrefixLM",
    "RefusedInput",
    "RelativeBias",
    "ScoreRule",
    "Slots",
    "SoftCap",
    "Steps",
    "Window",
    "attention",
    "attention_gradients",
    "build_block_mask",
    "candidate_set",
    "check_problem",
    "check_tensors",
    "decode_block_mask",
    "default_q_offset",
    "effective_sets",
    "empty_state",
    "finish",
    "merge",
    "merge_outputs",
    "to_page_offsets",
    "to_slots",
    "transpose_block_mask",
]
