"""Rules as torch callables in FlexAttention's signatures, held to the reference's values by a test.

Whatever differs between requests or between problems is a tensor that the callable captures, so that a compiled
kernel depends on a rule's structure alone and is not built again for another window or prefix. One call may hold
several requests: batch index b stands for the call's b-th request, and q_idx counts that request's query rows.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attnconform.conformance.cases.sample_rules import DECAY, REACH, STRIPE, STRIPES
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

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # b, h, q_idx, kv_idx
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # score, b, h, q_idx, kv_idx
PositionRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # b, h, logical query position, kv_idx

# A table's width is part of a compiled kernel, and a document's start is not: tables grow in steps.
TABLE_STEP = 128
FAR = 1 << 30  # beyond every position

# registered rules as torch writes them, by name
MASKS: dict[str, PositionRule] = {
    STRIPES: lambda b, h, q_pos, kv_idx: (kv_idx <= q_pos) & ((kv_idx + h) % STRIPE != 1),
}
SCORES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    DECAY: lambda score, h, q_pos, kv_idx: score * (REACH / (REACH + torch.abs(kv_idx - q_pos))),
}


def captured(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that a rule reads: its values are data to a compiled kernel, its shape is part of it."""
    return torch.tensor(values, dtype=dtype, device=device)


def lower_mask(
    rule: MaskRule | None,
    requests: Sequence[int],  # of the problem, in the order of the call's batch
    q_offset: Tensor,  # (len(requests),) logical position of each request's first query row
) -> MaskMod:
    """mask_mod of a rule; no rule allows everything. [MASK-OFFSET]"""
    allows = lower_positions(rule, requests, q_offset.device)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return allows(b, h, q_idx + q_offset[b], kv_idx)

    return mask_mod


def lower_score(rules: Sequence[ScoreRule], q_offset: Tensor) -> ScoreMod | None:
    """score_mod of rules applied in order, None where there are none. [SCORE-ORDER]"""
    if not rules:
        return None
    steps = [lower_score_rule(rule, q_offset) for rule in rules]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for step in steps:
            score = step(score, b, h, q_idx, kv_idx)
        return score

    return score_mod


def lower_positions(rule: MaskRule | None, requests: Sequence[int], device: torch.device) -> PositionRule:
    """Which logical positions a rule allows. [MASK-CAUSAL, MASK-WINDOW, MASK-PREFIX, MASK-DOCUMENT, MASK-COMPOSE]"""
    match rule:
        case None:
            return lambda b, h, q_pos, kv_idx: kv_idx >= 0
        case Causal():
            return lambda b, h, q_pos, kv_idx: kv_idx <= q_pos
        case Window(left, right):
            return lower_window(left, right, len(requests), device)
        case HeadWindow(lefts, rights):
            return lower_head_window(lefts, rights, device)
        case CustomMask(name):
            return MASKS[name]
        case PrefixLM(prefix_len):
            prefix = captured([prefix_len[n] for n in requests], torch.int32, device)
            return lambda b, h, q_pos, kv_idx: (kv_idx < prefix[b]) | (kv_idx <= q_pos)
        case Document(starts):
            return lower_document([starts[n] for n in requests], device)
        case And(parts):
            return compose(torch.logical_and, [lower_positions(part, requests, device) for part in parts])
        case Or(parts):
            return compose(torch.logical_or, [lower_positions(part, requests, device) for part in parts])


def lower_window(left: int | None, right: int | None, batch_size: int, device: torch.device) -> PositionRule:
    """Near enough on both sides; a side that is unlimited is not compared. [MASK-WINDOW]"""
    sides: list[PositionRule] = []
    if left is not None:
        before = captured([left] * batch_size, torch.int32, device)
        sides.append(lambda b, h, q_pos, kv_idx: q_pos - kv_idx <= before[b])
    if right is not None:
        after = captured([right] * batch_size, torch.int32, device)
        sides.append(lambda b, h, q_pos, kv_idx: kv_idx - q_pos <= after[b])
    return compose(torch.logical_and, sides or [lambda b, h, q_pos, kv_idx: kv_idx >= 0])


def lower_head_window(lefts: Sequence[int | None], rights: Sequence[int | None], device: torch.device) -> PositionRule:
    """Near enough on both sides of the head's own window; unlimited is farther than any position. [MASK-HEAD-WINDOW]"""
    before, after = (
        captured([FAR if size is None else size for size in sizes], torch.int32, device) for sizes in (lefts, rights)
    )
    return lambda b, h, q_pos, kv_idx: (q_pos - kv_idx <= before[h]) & (kv_idx - q_pos <= after[h])


def lower_document(starts: Sequence[tuple[int, ...]], device: torch.device) -> PositionRule:
    """Both positions in one document, read from a table that begins before position 0. [MASK-DOCUMENT]"""
    last = max(row[-1] for row in starts)
    width = -(-(last + 2) // TABLE_STEP) * TABLE_STEP
    positions = torch.arange(-1, width - 1)
    rows = [torch.searchsorted(torch.tensor(row), positions, right=True).tolist() for row in starts]
    table = captured(rows, torch.int32, device)

    def document(b: Tensor, idx: Tensor) -> Tensor:
        # What lies before the table belongs to no document, what lies after it to the last one.
        return table[b, torch.clamp(idx + 1, 0, width - 1)]

    return lambda b, h, q_pos, kv_idx: document(b, q_pos) == document(b, kv_idx)


def compose(join: Callable[[Tensor, Tensor], Tensor], parts: Sequence[PositionRule]) -> PositionRule:
    """All parts, joined. [MASK-COMPOSE]"""

    def allows(b: Tensor, h: Tensor, q_pos: Tensor, kv_idx: Tensor) -> Tensor:
        allowed = parts[0](b, h, q_pos, kv_idx)
        for part in parts[1:]:
            allowed = join(allowed, part(b, h, q_pos, kv_idx))
        return allowed

    return allows


def lower_score_rule(rule: ScoreRule, q_offset: Tensor) -> ScoreMod:
    """One rule on scores in float32. [SCORE-ALIBI, SCORE-SOFTCAP, SCORE-HEAD]"""
    match rule:
        case Alibi(slopes):
            slope = captured(slopes, torch.float32, q_offset.device)
            return lambda score, b, h, q_idx, kv_idx: score + slope[h] * (kv_idx - (q_idx + q_offset[b]))
        case RelativeBias(tables):
            table, farthest = captured(tables, torch.float32, q_offset.device), len(tables[0]) // 2
            return lambda score, b, h, q_idx, kv_idx: (
                score + table[h, torch.clamp(kv_idx - (q_idx + q_offset[b]), -farthest, farthest) + farthest]
            )
        case CustomScore(name):
            on_positions = SCORES[name]
            return lambda score, b, h, q_idx, kv_idx: on_positions(score, h, q_idx + q_offset[b], kv_idx)
        case SoftCap(cap):
            # One entry per request, so that the callable indexes it as it does every other table.
            caps = captured([cap] * len(q_offset), torch.float32, q_offset.device)
            return lambda score, b, h, q_idx, kv_idx: caps[b] * torch.tanh(score / caps[b])
