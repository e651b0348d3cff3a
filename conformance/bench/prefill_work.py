"""Kinds of prompts: what each admits, as rules of the bundled kernels and as functions of the peers."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from attnconform.conformance.bench.machine import Machine
from attnconform.reference.cost.traffic import kv_bytes, step_bytes

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, and k and v by pages


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
    document_len: int = 7_000
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def tokens(self) -> int:
        return self.batch * self.seqlen

    @property
    def pages(self) -> int:
        """Pages of a request."""
        return self.seqlen // self.page_size

    @property
    def row_lengths(self) -> torch.Tensor:
        """Keys of every row of one request."""
        return torch.arange(self.seqlen) - self.first_keys + 1

    @property
    def first_keys(self) -> torch.Tensor:
        """The first key that each row sees."""
        idx = torch.arange(self.seqlen)
        first = torch.zeros_like(idx) if self.window is None else (idx - self.window + 1).clamp_min(0)
        return torch.maximum(first, idx // self.document_len * self.document_len) if self.documents else first

    @property
    def edges(self) -> int:
        """(query, key) pairs of one head."""
        return self.batch * int(self.row_lengths.sum())

    @property
    def rate(self) -> float:
        """Of the pairs of a causal prompt."""
        return self.edges / (self.batch * self.seqlen * (self.seqlen + 1) / 2)

    def without_rules(self) -> "PrefillWork":
        """The same prompt, causal and nothing else."""
        return replace(self, window=None, documents=False, alibi=False, soft_cap=None)

    @property
    def bytes(self) -> int:
        """Keys and values once, queries, outputs, lse. [COST-BYTES]"""
        width = self.dtype.itemsize
        kv = kv_bytes(
            self.tokens, head_dim_qk=self.head_dim, num_kv_heads=self.num_kv_heads, k_bytes=width, v_bytes=width
        )
        rows = self.tokens * self.num_qo_heads
        return int(
            step_bytes(kv, num_rows=rows, head_dim_qk=self.head_dim, head_dim_vo=self.head_dim, element_bytes=width)
        )

    def mask_rule(self) -> Any:
        """As the bundled kernels take it."""
        from attnconform.kernels.sparse_attention import rules

        parts: list[Any] = [rules.Causal()]
        if self.window is not None:
            parts.append(rules.Window(left=self.window - 1))
        if self.documents:
            parts.append(rules.Document((tuple(range(0, self.seqlen, self.document_len)),) * self.batch))
        return rules.And(tuple(parts)) if len(parts) > 1 else parts[0]

    def score_rules(self) -> list[Any]:
        from attnconform.kernels.sparse_attention import rules

        score: list[Any] = [rules.Alibi(tuple(self.slopes()))] if self.alibi else []
        return score + ([rules.SoftCap(self.soft_cap)] if self.soft_cap else [])

    def slopes(self) -> list[float]:
        return [2.0 ** (-8 * (h + 1) / self.num_qo_heads) for h in range(self.num_qo_heads)]

    def keeps(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """The mask as FlexAttention asks for it."""
        keep = q_idx >= kv_idx
        if self.window is not None:
            keep = keep & (q_idx - kv_idx < self.window)
        if self.documents:
            keep = keep & (q_idx // self.document_len == kv_idx // self.document_len)
        return keep


WORKS = (
    PrefillWork("window 4096, T 32768", 1, 32_768, window=4_096),
    PrefillWork("window 4096 + documents, T 32768", 1, 32_768, window=4_096, documents=True),
    PrefillWork("window 4096 + ALiBi, T 32768", 1, 32_768, window=4_096, alibi=True),
    PrefillWork("window 4096 + soft cap 20, T 32768", 1, 32_768, window=4_096, soft_cap=20.0),
    PrefillWork("causal, batch 2, T 8192", 2, 8_192),
)


def works(machine: Machine) -> list[PrefillWork]:
    """All prompts; the same kinds at a few rows in the interpreter."""
    if machine.is_real:
        return list(WORKS)
    small: dict[str, Any] = {
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "dtype": torch.float32,
        "document_len": 20,
    }
    return [
        replace(w, **small, name=f"tiny {w.name.split(',')[0]}", seqlen=48, window=None if w.window is None else 16)
        for w in WORKS
    ]


def make_inputs(work: PrefillWork, machine: Machine) -> Inputs:
    """q as (tokens, heads, dim); k and v paged, in order."""
    q = torch.randn(work.tokens, work.num_qo_heads, work.head_dim, dtype=work.dtype, device=machine.device)
    shape = (work.tokens // work.page_size, work.page_size, work.num_kv_heads, work.head_dim)
    k, v = (torch.randn(shape, dtype=work.dtype, device=machine.device) for _ in range(2))
    return q, k, v


def reference_rows(work: PrefillWork, inputs: Inputs, rows: torch.Tensor) -> torch.Tensor:
    """Some rows' outputs in float32, (rows, num_qo_heads, head_dim)."""
    q, k, v = inputs
    group = work.num_qo_heads // work.num_kv_heads
    out = torch.empty(len(rows), work.num_qo_heads, work.head_dim, device=q.device)
    slopes = torch.tensor(work.slopes(), device=q.device)
    first_keys = work.first_keys.tolist()
    for n, row in enumerate(rows.tolist()):
        request, idx = divmod(row, work.seqlen)
        keys = slice(request * work.seqlen + first_keys[idx], request * work.seqlen + idx + 1)
        ks, vs = (c.view(-1, work.num_kv_heads, work.head_dim)[keys].float() for c in (k, v))
        scores = torch.einsum("hgd,khd->hgk", q[row].float().view(work.num_kv_heads, group, -1), ks)
        scores = scores.flatten(0, 1) / work.head_dim**0.5
        if work.alibi:
            distance = torch.arange(first_keys[idx], idx + 1, device=q.device) - idx
            scores = scores + slopes[:, None] * distance
        if work.soft_cap:
            scores = work.soft_cap * torch.tanh(scores / work.soft_cap)
        p = scores.softmax(-1).view(work.num_kv_heads, group, -1)
        out[n] = torch.einsum("hgk,khd->hgd", p, vs).flatten(0, 1)
    return out
