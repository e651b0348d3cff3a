"""The forward pass of Gemma 3 in plain torch, for reading queries and keys out of real text.

Weights come from a GGUF file, dequantized to float32. The pass is written for one sequence: `prefill` over many
tokens at once (attention in blocks of query rows, so memory stays bounded), then `step` for one token at a time
against the keys and values kept so far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from attnconform.traces.recorder.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Observer = Callable[[int, torch.Tensor, torch.Tensor], None]

LOCAL_ROPE_BASE = 10_000.0  # not in the GGUF: fixed by the architecture
GLOBAL_EVERY = 6  # five local layers, then a global one
QUERY_ROWS = 256  # rows of attention in memory at once


@dataclass(frozen=True)
class Geometry:
    """The numbers of the model that the pass needs."""

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    rope_base: float
    eps: float

    def layer_window(self, layer: int) -> int | None:
        """Keys a row of this layer sees, or None for all earlier ones."""
        return None if (layer + 1) % GLOBAL_EVERY == 0 else self.window


class Gemma3:
    """Weights, and the keys and values of the tokens seen so far."""

    def __init__(self, weights: dict[str, torch.Tensor], geometry: Geometry, *, max_seqlen: int = 32_768) -> None:
        self.weights = weights
        self.geometry = geometry
        self.seqlen = 0
        # One allocation for good: growing these a token at a time leaves the heap in shreds.
        shape = (geometry.num_layers, geometry.num_kv_heads, max_seqlen, geometry.head_dim)
        self.keys, self.values = torch.empty(shape), torch.empty(shape)

    @torch.inference_mode()
    def prefill(self, tokens: torch.Tensor, observe: Observer) -> torch.Tensor:  # (seqlen_q,) -> (seqlen_q, hidden)
        """Final hidden states of the first tokens of a sequence."""
        self.seqlen = 0
        return self._forward(tokens, observe)

    @torch.inference_mode()
    def step(self, token: int, observe: Observer) -> torch.Tensor:  # -> (1, hidden)
        """Final hidden state of one more token."""
        return self._forward(torch.tensor([token]), observe)

    def _forward(self, tokens: torch.Tensor, observe: Observer) -> torch.Tensor:
        start = self.seqlen
        embedding = self.weights["token_embd.weight"]
        x = embedding[tokens] * math.sqrt(embedding.shape[1])
        for layer in range(self.geometry.num_layers):
            x = x + self._norm(self._attention(x, layer, start, observe), f"blk.{layer}.post_attention_norm")
            x = x + self._norm(self._feed_forward(x, layer), f"blk.{layer}.post_ffw_norm")
        self.seqlen += len(tokens)
        return self._norm(x, "output_norm")

    def _attention(self, x: torch.Tensor, layer: int, start: int, observe: Observer) -> torch.Tensor:
        geometry, name = self.geometry, f"blk.{layer}"
        h = self._norm(x, f"{name}.attn_norm")
        q, k, v = (functional.linear(h, self.weights[f"{name}.attn_{part}.weight"]) for part in "qkv")
        q, k, v = (t.reshape(len(x), -1, geometry.head_dim).transpose(0, 1) for t in (q, k, v))
        window = geometry.layer_window(layer)
        base = geometry.rope_base if window is None else LOCAL_ROPE_BASE
        q = rotate(self._norm(q, f"{name}.attn_q_norm"), start, base)
        k = rotate(self._norm(k, f"{name}.attn_k_norm"), start, base)
        stop = start + x.shape[0]
        self.keys[layer, :, start:stop], self.values[layer, :, start:stop] = k, v
        k, v = self.keys[layer, :, :stop], self.values[layer, :, :stop]
        observe(layer, q, k)
        out = self._attend(layer, q, k, v, start, window)
        return functional.linear(out.transpose(0, 1).flatten(1), self.weights[f"{name}.attn_output.weight"])

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None
    ) -> torch.Tensor:
        """Attention of the rows from `start` on over all keys so far; a subclass may have another's."""
        return attend(q, k, v, start, window)

    def _feed_forward(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        name = f"blk.{layer}"
        h = self._norm(x, f"{name}.ffn_norm")
        gate = functional.gelu(functional.linear(h, self.weights[f"{name}.ffn_gate.weight"]), approximate="tanh")
        return functional.linear(
            gate * functional.linear(h, self.weights[f"{name}.ffn_up.weight"]), self.weights[f"{name}.ffn_down.weight"]
        )

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        # A GGUF of Gemma stores 1 + weight already.
        return functional.rms_norm(x, (x.shape[-1],), self.weights[f"{name}.weight"], self.geometry.eps)

    @torch.inference_mode()
    def negative_log_likelihoods(self, hidden: torch.Tensor, targets: torch.Tensor, rows: int = 128) -> torch.Tensor:
        """-ln p(target) of each row, in float32, a few rows at a time: the vocabulary is large."""
        embedding = self.weights["token_embd.weight"]
        parts = [slice(first, first + rows) for first in range(0, len(targets), rows)]
        logits = (functional.linear(hidden[part], embedding) for part in parts)
        losses = [functional.cross_entropy(x, targets[p], reduction="none") for x, p in zip(logits, parts, strict=True)]
        return torch.cat(losses)


def rotate(x: torch.Tensor, start: int, base: float) -> torch.Tensor:  # (heads, seqlen, head_dim)
    """x with rotary position embedding, halves paired (d, d + head_dim / 2)."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(start, start + x.shape[1], dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend(
    q: torch.Tensor,  # (num_qo_heads, seqlen_q, head_dim)
    k: torch.Tensor,  # (num_kv_heads, seqlen_kv, head_dim)
    v: torch.Tensor,  # likewise
    start: int,
    window: int | None,
) -> torch.Tensor:
    """Causal attention of rows start, start + 1, ...; with a window, row i sees j where i - j < window."""
    group_size = q.shape[0] // k.shape[0]
    outs = []
    for first in range(0, q.shape[1], QUERY_ROWS):
        rows = torch.arange(first, min(first + QUERY_ROWS, q.shape[1])) + start
        low = 0 if window is None else max(0, int(rows[0]) - window + 1)
        high = int(rows[-1]) + 1
        distance = rows[:, None] - torch.arange(low, high)
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        keys, values = (t[:, low:high].repeat_interleave(group_size, 0) for t in (k, v))
        scores = q[:, first : first + QUERY_ROWS] @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        outs.append(scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ values)
    return torch.cat(outs, 1)


def load(path: Path) -> tuple[Gemma3, Tokenizer]:
    """The model and its tokenizer, from a GGUF file of architecture gemma3."""
    import gguf  # here, because the pass itself needs torch alone

    reader = gguf.GGUFReader(path)
    geometry = read_geometry(path)
    weights = {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    tokens, scores, types, bos = (
        reader.fields[f"tokenizer.ggml.{part}"].contents()
        for part in ("tokens", "scores", "token_type", "bos_token_id")
    )
    return Gemma3(weights, geometry), Tokenizer(tokens, scores, types, bos=bos)


def read_geometry(path: Path) -> Geometry:
    """The geometry alone, without the weights."""
    import gguf

    fields = gguf.GGUFReader(path).fields
    architecture = fields["general.architecture"].contents()
    if architecture != "gemma3":
        raise ValueError(f"{path}: general.architecture is {architecture!r}, want 'gemma3'")
    return Geometry(*(fields[f"gemma3.{name}"].contents() for name in GEOMETRY_FIELDS))


# In the order of Geometry's fields.
GEOMETRY_FIELDS = (
    "block_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.sliding_window",
    "rope.freq_base",
    "attention.layer_norm_rms_epsilon",
)
