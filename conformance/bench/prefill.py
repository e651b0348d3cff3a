"""Suite prefill: long prompts under a window, documents, ALiBi and a soft cap, against compiled FlexAttention."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attnconform.conformance.bench.row import BenchRow
from attnconform.conformance.bench.timing import measure

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
PAGE_SIZE = 16
DOCUMENT_LEN = 7_000


@dataclass(frozen=True)
class PrefillWork:
    """One kind of prompt."""

    name: str
    batch: int
    seqlen: int
    window: int | None = None
    documents: bool = False
    alibi: bool = False
    soft_cap: float | None = None

    @property
    def edges(self) -> int:
        """(query, key) pairs of one head."""
        idx = torch.arange(self.seqlen)
        first = torch.zeros_like(idx) if self.window is None else (idx - self.window + 1).clamp_min(0)
        if self.documents:
            first = torch.maximum(first, idx // DOCUMENT_LEN * DOCUMENT_LEN)
        return self.batch * int((idx - first + 1).sum())

    @property
    def flops(self) -> int:
        return 4 * self.edges * NUM_QO_HEADS * HEAD_DIM


WORKS = (
    PrefillWork("window 4096, T 32768", 1, 32_768, window=4_096),
    PrefillWork("window 4096 + documents, T 32768", 1, 32_768, window=4_096, documents=True),
    PrefillWork("window 4096 + ALiBi, T 32768", 1, 32_768, window=4_096, alibi=True),
    PrefillWork("window 4096 + soft cap 20, T 32768", 1, 32_768, window=4_096, soft_cap=20.0),
    PrefillWork("causal, batch 2, T 8192", 2, 8_192),
)


def slopes() -> list[float]:
    return [2.0 ** (-8 * (h + 1) / NUM_QO_HEADS) for h in range(NUM_QO_HEADS)]


def our_prefill(work: PrefillWork, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
    """The bundled kernel over pages that lie in order; q is (tokens, heads, dim), k and v are paged."""
    from attnconform.kernels import sparse_attention
    from attnconform.kernels.sparse_attention import rules

    parts: list[Any] = [rules.Causal()]
    if work.window is not None:
        parts.append(rules.Window(left=work.window - 1))
    if work.documents:
        parts.append(rules.Document((tuple(range(0, work.seqlen, DOCUMENT_LEN)),) * work.batch))
    score: list[Any] = [rules.Alibi(tuple(slopes()))] if work.alibi else []
    score += [rules.SoftCap(work.soft_cap)] if work.soft_cap else []
    pages = work.seqlen // PAGE_SIZE
    plan = sparse_attention.plan(
        qo_indptr=torch.arange(work.batch + 1, device="cuda") * work.seqlen,
        seqlen_kv=torch.full((work.batch,), work.seqlen, device="cuda"),
        page_table=torch.arange(work.batch * pages, device="cuda").view(work.batch, pages).int(),
        page_size=PAGE_SIZE,
        num_pages=work.batch * pages,
        num_qo_heads=NUM_QO_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim_qk=HEAD_DIM,
        head_dim_vo=HEAD_DIM,
        sm_scale=1 / math.sqrt(HEAD_DIM),
        dtype=q.dtype,
        device="cuda",
        mask_rule=rules.And(tuple(parts)) if len(parts) > 1 else parts[0],
        score_rules=score,
    )
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")
    return lambda: sparse_attention.run(plan, q, k, v, out=out, lse=lse)


def flex_prefill(work: PrefillWork, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
    """Compiled FlexAttention on the same data; its inputs are made contiguous once, outside the timing."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def keeps(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        keep = q_idx >= kv_idx
        if work.window is not None:
            keep = keep & (q_idx - kv_idx < work.window)
        if work.documents:
            keep = keep & (q_idx // DOCUMENT_LEN == kv_idx // DOCUMENT_LEN)
        return keep

    table = torch.tensor(slopes(), device="cuda")
    cap = work.soft_cap

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if work.alibi:
            s = s + table[h] * (kv_idx - q_idx)
        return s if cap is None else cap * torch.tanh(s / cap)

    def heads_first(x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.reshape(work.batch, work.seqlen, heads, HEAD_DIM).transpose(1, 2).contiguous()

    mask = create_block_mask(keeps, None, None, work.seqlen, work.seqlen, device="cuda")
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    qt, kt, vt = heads_first(q, NUM_QO_HEADS), heads_first(k, NUM_KV_HEADS), heads_first(v, NUM_KV_HEADS)
    score_mod = score if work.alibi or cap is not None else None
    return lambda: compiled(qt, kt, vt, score_mod=score_mod, block_mask=mask, enable_gqa=True, return_lse=True)


def prefill_rows(peer: str | None, works: tuple[PrefillWork, ...] = WORKS) -> Iterator[BenchRow]:
    """Forward of every work, beside the peer's."""
    for work in works:
        tokens = work.batch * work.seqlen
        q = torch.randn(tokens, NUM_QO_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        shape = (tokens // PAGE_SIZE, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
        k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        ours = our_prefill(work, q, k, v)
        timing, peer_time, error, check = measure(ours, seconds=0.5), None, "", ""
        if peer == "flex":
            try:
                theirs = flex_prefill(work, q, k, v)
                want = theirs()[0].transpose(1, 2).reshape(q.shape)
                check = f"max |difference|: out {(want.float() - ours()[0].float()).abs().max():.2e}"
                peer_time = measure(theirs, seconds=0.5)
            except Exception as failure:
                error = f"{type(failure).__name__}: {str(failure).splitlines()[0][:200]}"
        yield BenchRow(
            suite="prefill",
            work=work.name,
            stage="attention",
            ours=timing,
            peer=peer_time,
            peer_name=peer or "",
            peer_error=error,
            flops=work.flops,
            bytes=2 * (q.numel() + k.numel()) * 2,
            check=check,
        )
        torch.cuda.empty_cache()
