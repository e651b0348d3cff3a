"""Gradients in float32 at some rows and keys of a subject, from the same saved out and lse that a backward is given.

A gradient of q needs the row's own keys only, and one of k or v every row that sees the key: a few of each, from the
first to the last, are enough to see a skipped tile, and cost next to nothing beside the backward itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnconform.conformance.bench.honesty import relative_error

CHECKED = 16  # rows, and keys
Sees = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (R,) rows, (K,) keys -> (R, num_kv_heads or 1, K) bool


@dataclass(frozen=True, eq=False)
class ScoreRule:
    """Which pairs there are, and what becomes of their scores."""

    sees: Sees
    slopes: tuple[float, ...] | None = None  # of ALiBi, for every query head
    soft_cap: float | None = None


@dataclass(frozen=True, eq=False)
class Saved:
    """What a forward leaves, in float32, queries and keys by token."""

    q: torch.Tensor  # (rows, num_kv_heads, group_size, head_dim); dout and out likewise
    k: torch.Tensor  # (tokens, num_kv_heads, head_dim)
    v: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor  # (rows, num_kv_heads, group_size)
    delta: torch.Tensor

    @classmethod
    def of(cls, tensors: tuple[torch.Tensor, ...]) -> "Saved":
        """From q, k, v, out, lse and dout as a backward takes them, pages in order."""
        q, k, v, out, lse, dout = (x.float() for x in tensors)
        heads = k.shape[-2]
        rows, keys = (len(q), heads, -1, q.shape[-1]), (-1, heads, k.shape[-1])
        delta = (out * dout).sum(-1).view(len(q), heads, -1)
        return cls(q.view(rows), k.view(keys), v.view(keys), dout.view(rows), lse.view(len(q), heads, -1), delta)

    def products(self, rule: ScoreRule, rows: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities and gradients of scaled scores, (R, num_kv_heads, group_size, K) each."""
        scale = self.q.shape[-1] ** -0.5
        score = scale * torch.einsum("rhgd,khd->rhgk", self.q[rows], self.k[keys])
        if rule.slopes is not None:
            slopes = torch.tensor(rule.slopes, device=score.device).view(*self.q.shape[1:3], 1)
            score = score + slopes * (keys - rows[:, None])[:, None, None]
        slope = torch.ones_like(score)
        if rule.soft_cap is not None:
            share = torch.tanh(score / rule.soft_cap)
            score, slope = rule.soft_cap * share, 1 - share**2
        seen = rule.sees(rows, keys)[:, :, None]
        p = torch.where(seen, torch.exp(score - self.lse[rows][..., None]), 0.0)
        dp = torch.einsum("rhgd,khd->rhgk", self.dout[rows], self.v[keys])
        return p, scale * slope * p * (dp - self.delta[rows][..., None])


@dataclass(frozen=True, eq=False)
class SomeGradients:
    """dq of some rows, dk and dv of some keys."""

    rows: torch.Tensor
    keys: torch.Tensor
    dq: torch.Tensor  # (R, num_qo_heads, head_dim)
    dk: torch.Tensor  # (K, num_kv_heads, head_dim)
    dv: torch.Tensor

    def error_of(self, gradients: Any) -> float:
        """|got - want| / |want|, the worst of the three."""
        got_dk, got_dv = (x.reshape(-1, *x.shape[-2:])[self.keys] for x in (gradients.dk, gradients.dv))
        pairs = ((gradients.dq[self.rows], self.dq), (got_dk, self.dk), (got_dv, self.dv))
        return max_of([relative_error(got, want) for got, want in pairs])


def max_of(errors: list[float]) -> float:
    """The largest; NaN is larger than any."""
    return max(errors, key=lambda error: (error != error, error))


def some_gradients(tensors: tuple[torch.Tensor, ...], rule: ScoreRule) -> SomeGradients:
    """The reference of one forward, from the first to the last row and key."""
    saved, device = Saved.of(tensors), tensors[0].device
    all_rows, all_keys = (torch.arange(len(x), device=device) for x in (saved.q, saved.k))
    rows, keys = (x[torch.linspace(0, len(x) - 1, min(CHECKED, len(x))).long()] for x in (all_rows, all_keys))
    ds = saved.products(rule, rows, all_keys)[1]
    dq = torch.einsum("rhgk,khd->rhgd", ds, saved.k).flatten(1, 2)
    p, ds = saved.products(rule, all_rows, keys)
    dk = torch.einsum("rhgk,rhgd->khd", ds, saved.q)
    dv = torch.einsum("rhgk,rhgd->khd", p, saved.dout)
    return SomeGradients(rows, keys, dq, dk, dv)
