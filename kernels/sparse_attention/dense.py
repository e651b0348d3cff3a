"""The dense path: the sparse one's answer, by torch operations over every committed key. [SAFE-PATH, FALLBACK-REASON]

It starts from the same logical cache: keys by position through the page table, never scratch buffers, a sorted table or
a padded head_dim. What a row may not see is taken out before the maximum, and slots of other requests are not looked
at. Any head_dim, dtype and depth of rules; sums in float32, or float64 where the tensors are. It allocates, and is for
batches that the kernels do not take or would be slower at. [MASK-BEFORE-MAX, EMPTY-OUT, LSE-SINK, SET-IDENTITY]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from attnconform.kernels.sparse_attention.candidates import (
    CandidateLists,
    CanonicalLists,
    RowBlocks,
    build_lists,
    enumerate_runs,
    lists_per_block,
    to_slots,
)
from attnconform.kernels.sparse_attention.dropout import Dropout
from attnconform.kernels.sparse_attention.edge_masks import allowed_edges, kept_edges
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.plan import (
    CheckedCache,
    Integers,
    check_cache,
    check_candidates,
    check_sink_logits,
    full_device,
)
from attnconform.kernels.sparse_attention.quantization import KVQuantization
from attnconform.kernels.sparse_attention.rules import Alibi, MaskRule, RelativeBias, ScoreRule, SoftCap


@dataclass(frozen=True, kw_only=True, eq=False)
class DensePlan:
    """What a dense run needs, checked as `plan` checks it."""

    cache: CheckedCache
    num_pages: int
    num_qo_heads: int
    num_kv_heads: int
    layout: str
    sm_scale: float
    members: tuple[Tensor, ...] | None  # per request (num_qo_heads, seqlen_q, seqlen_kv): S of every row and head
    mask_rule: MaskRule | None
    score_rules: tuple[ScoreRule, ...]
    sink_logits: Tensor | None
    k_quant: KVQuantization | None
    v_quant: KVQuantization | None
    dropout: Dropout | None


def plan_dense(
    *,
    qo_indptr: Integers,
    seqlen_kv: Integers,
    page_table: Tensor,
    page_size: int,
    num_pages: int,
    num_qo_heads: int,
    num_kv_heads: int,
    sm_scale: float,
    device: torch.device | str,
    q_offset: Integers | None = None,
    candidates: CandidateLists | None = None,
    window: int | None = None,
    num_sink_tokens: int = 0,
    mask_rule: MaskRule | None = None,
    score_rules: Sequence[ScoreRule] = (),
    sink_logits: Tensor | None = None,
    layout: str = "NHD",
    k_quant: KVQuantization | None = None,
    v_quant: KVQuantization | None = None,
    dropout: Dropout | None = None,
    owned: Tensor | None = None,
    **_: object,  # what only a kernel asks: head dimensions, dtype, hints
) -> DensePlan:
    """The dense path for the arguments of `plan`. Raises PlanError for the same faults. [SAFE-REFUSE, SAFE-OWNER]"""
    device = full_device(device)
    cache = check_cache(qo_indptr, seqlen_kv, q_offset, page_table, page_size, num_pages, owned, device)
    members = None
    if candidates is not None:
        members = _members(candidates, cache, num_qo_heads, num_kv_heads, window, num_sink_tokens)
    return DensePlan(
        cache=cache,
        num_pages=num_pages,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        layout=layout,
        sm_scale=sm_scale,
        members=members,
        mask_rule=mask_rule,
        score_rules=tuple(score_rules),
        sink_logits=check_sink_logits(sink_logits, num_qo_heads, device),
        k_quant=k_quant,
        v_quant=v_quant,
        dropout=dropout,
    )


def run_dense(
    plan: DensePlan,
    q: Tensor,  # (total_q, num_qo_heads, head_dim_qk)
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse of every row, as `run` gives them."""
    rows, heads = q.shape[:2]
    out = q.new_empty((rows, heads, v_cache.shape[-1])) if out is None else out
    lse = q.new_empty((rows, heads), dtype=torch.float32) if lse is None else lse
    bounds = plan.cache.qo_indptr.tolist()
    for n, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            k = _keys_of(plan, n, k_cache, k_scale, plan.k_quant, q.dtype)
            v = _keys_of(plan, n, v_cache, v_scale, plan.v_quant, q.dtype)
            result, total = _attend(plan, n, q[start:end], k, v)
            out[start:end] = result.to(out.dtype)
            lse[start:end] = total.to(lse.dtype)
    return out, lse


def _attend(plan: DensePlan, n: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of the rows of one request."""
    group = plan.num_qo_heads // plan.num_kv_heads
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,thd->hqt", q.to(k.dtype), k) * plan.sm_scale
    q_idx = _positions(plan, n)
    distance = torch.arange(len(k), device=q.device) - q_idx[:, None]
    scores = reduce(lambda s, rule: _apply(rule, s, distance), plan.score_rules, scores)
    scores = scores.masked_fill(~admitted(plan, n), float("-inf"))
    terms = scores
    if plan.sink_logits is not None:
        terms = torch.cat([scores, plan.sink_logits.to(scores.dtype)[:, None, None].expand(-1, len(q), 1)], dim=2)
    # a row of no term has -inf throughout
    lse = torch.logsumexp(terms, dim=2) if terms.shape[2] else scores.new_full(scores.shape[:2], float("-inf"))
    weights = torch.exp(scores - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    if plan.dropout is not None:
        weights = weights * kept_edges(plan.dropout, n, plan.num_qo_heads, q_idx, len(k)) * plan.dropout.keep_scale
    return torch.einsum("hqt,thd->qhd", weights, v), lse.T


def admitted(plan: DensePlan, n: int) -> Tensor:
    """E of every row and head of one request, (num_qo_heads, seqlen_q, seqlen_kv)."""
    allowed = allowed_edges(plan.mask_rule, n, plan.num_qo_heads, _positions(plan, n), int(plan.cache.seqlen_kv[n]))
    return allowed if plan.members is None else allowed & plan.members[n]


def _positions(plan: DensePlan, n: int) -> Tensor:
    """Logical positions of the rows of one request."""
    seqlen_q = int(plan.cache.qo_indptr[n + 1] - plan.cache.qo_indptr[n])
    return plan.cache.q_offset[n] + torch.arange(seqlen_q, device=plan.cache.q_offset.device)


def _apply(rule: ScoreRule, scores: Tensor, distance: Tensor) -> Tensor:
    """Scores after one rule. [SCORE-ORDER]"""
    match rule:
        case Alibi(slopes):
            return scores + scores.new_tensor(slopes)[:, None, None] * distance
        case SoftCap(cap):
            return cap * torch.tanh(scores / cap)
        case RelativeBias(tables):
            reach = len(tables[0]) // 2
            return scores + scores.new_tensor(tables)[:, distance.clamp(-reach, reach) + reach]
    raise PlanError("SCORE-ORDER", "score_rules", repr(rule), "the dense path has Alibi, SoftCap and RelativeBias")


def _keys_of(
    plan: DensePlan, n: int, cache: Tensor, scale: Tensor | None, quant: KVQuantization | None, dtype: torch.dtype
) -> Tensor:
    """Keys or values of one request by logical position, (seqlen_kv, num_kv_heads, dim), dequantized."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    page_size = plan.cache.page_size
    position = torch.arange(int(plan.cache.seqlen_kv[n]), device=cache.device)
    slot = to_slots(torch.full_like(position, n), position, plan.cache.page_table, page_size)
    page, offset = slot // page_size, slot % page_size
    numbers = (cache[page, offset] if plan.layout == "NHD" else cache[page, :, offset]).to(wide)
    if quant is None or scale is None:
        return numbers
    place = {"page": page, "token": slot}.get(quant.granularity)
    factor = (scale if place is None else scale[place]).to(wide)
    return numbers * (factor if quant.granularity in ("tensor", "channel") else factor[..., None])


def _members(
    candidates: CandidateLists,
    cache: CheckedCache,
    num_qo_heads: int,
    num_kv_heads: int,
    window: int | None,
    num_sink_tokens: int,
) -> tuple[Tensor, ...]:
    """S of every row and head of every request, element by element. [SET-UNION]"""
    blocks = check_candidates(candidates, cache)
    heads = lists_per_block(candidates.sharing, num_qo_heads, num_kv_heads)
    lists = build_lists(
        candidates, blocks, heads, window=window, num_sink_tokens=num_sink_tokens,
        seqlen_kv=cache.seqlen_kv, page_table=cache.page_table, page_size=cache.page_size,
    )  # fmt: skip
    requests = range(cache.seqlen_kv.numel())
    by_block = (_listed(n, cache, blocks, lists, heads) for n in requests)
    repeats = num_qo_heads // heads
    return tuple(
        _of_rows(n, listed, cache, candidates.q_block_size, window or 0).repeat_interleave(repeats, dim=0)
        for n, listed in enumerate(by_block)
    )


def _listed(n: int, cache: CheckedCache, blocks: RowBlocks, lists: CanonicalLists, heads: int) -> Tensor:
    """Entries of one request's lists, (2, num_blocks, heads, seqlen_kv): those of windows alone, and all others."""
    own = torch.nonzero(blocks.request == n).flatten()
    size = (2, len(own), heads, int(cache.seqlen_kv[n]))
    listed = torch.zeros(size, dtype=torch.bool, device=own.device)
    if len(own):
        owner, _ = enumerate_runs(lists.indptr.long().diff())
        block = owner // heads - own[0]
        is_own = (block >= 0) & (block < len(own))
        at = (block[is_own], owner[is_own] % heads, lists.positions[is_own].long())
        listed[(lists.members[is_own].long(), *at)] = True
    return listed


def _of_rows(n: int, listed: Tensor, cache: CheckedCache, q_block_size: int, window: int) -> Tensor:
    """S of every row, (heads, seqlen_q, seqlen_kv): an entry of windows alone is of the rows whose window has it."""
    row = torch.arange(int(cache.qo_indptr[n + 1] - cache.qo_indptr[n]), device=listed.device)
    distance = (int(cache.q_offset[n]) + row)[:, None] - torch.arange(listed.shape[3], device=listed.device)
    of_windows, of_all = listed[:, row // q_block_size].permute(0, 2, 1, 3)
    return of_all | of_windows & ((distance >= 0) & (distance < window))
