"""vLLM's attention over a table of pages, and its decoding over lists of slots."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from attnconform.conformance.adapters.attn_gym import listed
from attnconform.conformance.adapters.flashinfer_package import head_groups
from attnconform.conformance.adapters.per_request import requests_with_rows
from attnconform.conformance.adapters.triton_kernels import sink_tensor
from attnconform.conformance.adapters.vllm_package import VllmKernels
from attnconform.conformance.backend import Domain, Forward, OneOf, Tensors
from attnconform.conformance.views import ProblemView
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.rules import Alibi, And, PrefixLM, SoftCap, Window

NAN = float("nan")
PAGES_AHEAD = 32  # the kernel looks up the pages of a whole tile, past a request's last one too


class VllmDecode(VllmKernels):
    """decode_attention_fwd: a row is a request of its own, its list a table of pages of one token."""

    name = "vllm-decode"
    module = "vllm.v1.attention.ops.triton_decode_attention"
    dtypes = ("float32", "float16")  # it sums bfloat16, with one query head a KV head
    returns_lse = True
    supported: ClassVar[dict[str, Domain]] = {
        # a list of slots cannot tell a position listed twice from two positions of one slot
        "listing": OneOf(("sorted", "shuffled", "holes")),
        "local": OneOf(("none",)),
        "score": OneOf(("none", "softcap")),
        "sink": OneOf(("none",)),
    }

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        spec, splits = problem.spec, problem.hints.num_kv_splits or 1
        for group in head_groups(spec):
            q = tensors.q[:, group.qo_heads].contiguous()
            lists = [
                problem.slots(n, group.kv_heads.start)[keys[keys >= 0]].int()
                for n in range(spec.batch_size)
                for keys in listed(problem, n, group.qo_heads.start)
            ]
            lengths = torch.tensor([len(slots) for slots in lists], dtype=torch.int32, device=q.device)
            out, lse = q.new_empty((*q.shape[:2], spec.head_dim_vo)), q.new_empty(q.shape[:2], dtype=torch.float32)
            states = q.new_empty((*q.shape[:2], splits, spec.head_dim_vo + 1), dtype=torch.float32)
            with self.context():
                self.kernels.decode_attention_fwd(
                    q,
                    problem.by_slot(tensors.k_cache)[:, group.kv_heads],
                    problem.by_slot(tensors.v_cache)[:, group.kv_heads],
                    out,
                    lse,
                    pad(pad_sequence(lists, batch_first=True), (0, 1)),
                    lengths,
                    states,
                    splits,
                    spec.sm_scale,
                    logit_cap=cap_of(spec),
                )
            tensors.out[:, group.qo_heads], tensors.lse[:, group.qo_heads] = out, lse
        return Forward(tensors.out, tensors.lse, path="decode")


class VllmUnified(VllmKernels):
    """unified_attention over the cache as it lies.

    Its last row stands at the last key. Where a request's rows stand before, rows that are thrown away follow them; a
    row past the last key is a request of its own, its window cut by as much as it stands past it.
    """

    name = "vllm-unified"
    module = "vllm.v1.attention.ops.triton_unified_attention"
    supported: ClassVar[dict[str, Domain]] = {
        "head_dim": OneOf(("64/64", "128/128", "80/80", "96/96", "256/256")),
        "granularity": OneOf(("dense",)),
        "mask": OneOf(("none", "causal", "causal_window", "prefix")),
        "score": OneOf(("none", "alibi", "softcap")),
    }

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        pieces = list(pieces_of(problem))
        for left in dict.fromkeys(piece.left for piece in pieces):
            self.attend(problem, tensors, [piece for piece in pieces if piece.left == left], left)
        return Forward(tensors.out, None, path="unified")

    def attend(self, problem: ProblemView, tensors: Tensors, pieces: list["Piece"], left: int | None) -> None:
        """One call, whose requests are pieces with one window."""
        spec, requests = problem.spec, [piece.request for piece in pieces]
        k, v = (x if spec.cache.layout == "NHD" else x.transpose(1, 2) for x in (tensors.k_cache, tensors.v_cache))
        q = torch.cat([pad(tensors.q[piece.rows], (0, 0, 0, 0, 0, piece.rows_after)) for piece in pieces])
        # split, it leaves the rows of a request without keys as they are: they stay poisoned
        out, starts = torch.full_like(q, NAN), np.cumsum([0, *(piece.num_rows for piece in pieces)])
        with self.context():
            self.kernels.unified_attention(
                q,
                k,
                v,
                out,
                cu_seqlens_q=problem.tensor(starts),
                max_seqlen_q=max(piece.num_rows for piece in pieces),
                seqused_k=problem.tensor(np.asarray([piece.seqlen_kv for piece in pieces])),
                max_seqlen_k=max(piece.seqlen_kv for piece in pieces),
                softmax_scale=spec.sm_scale,
                causal=spec.mask_rule is not None,
                window_size=(-1 if left is None else left, 0),
                block_table=pad(problem.tensor(spec.cache.page_table[requests]).clamp(min=0), (0, PAGES_AHEAD)),
                softcap=cap_of(spec),
                q_descale=None,
                k_descale=None,
                v_descale=None,
                sinks=sink_tensor(spec, self.device),
                **rule_arguments(problem, requests),
                **split_arguments(problem, q),
            )
        for piece, start in zip(pieces, starts, strict=False):
            tensors.out[piece.rows] = out[start : start + piece.num_rows - piece.rows_after]


@dataclass(frozen=True)
class Piece:
    """Rows that are a request to the kernel."""

    request: int  # whose keys and whose page table
    rows: slice  # of q and out
    rows_after: int  # up to the last key
    seqlen_kv: int
    left: int | None  # keys that a window leaves before each row

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start) + self.rows_after


def pieces_of(problem: ProblemView) -> Iterator[Piece]:
    """Every request with rows, whole or row by row."""
    rule = problem.spec.mask_rule
    left = next((r.left for r in rule.rules if isinstance(r, Window)), None) if isinstance(rule, And) else None
    for n in requests_with_rows(problem):
        rows, seqlen_kv, first = problem.q_rows(n), int(problem.spec.seqlen_kv[n]), int(problem.spec.q_offset[n])
        rows_after = seqlen_kv - first - (rows.stop - rows.start)
        if rows_after >= 0 or rule is None:
            yield Piece(n, rows, max(rows_after, 0), seqlen_kv, left)
            continue
        for row in range(rows.start, rows.stop):
            after = seqlen_kv - 1 - first - (row - rows.start)
            reach = None if left is None else left + min(after, 0)
            keys = 0 if reach is not None and reach < 0 else seqlen_kv
            yield Piece(n, slice(row, row + 1), max(after, 0), keys, None if keys == 0 else reach)


def rule_arguments(problem: ProblemView, requests: list[int]) -> dict[str, Any]:
    """Biases, and prefixes: ranges of keys that see one another, by their first and last."""
    spec, arguments = problem.spec, {}
    if isinstance(spec.mask_rule, PrefixLM):
        ends = torch.tensor([spec.mask_rule.prefix_len[n] for n in requests], device=problem.device).int() - 1
        arguments["mm_prefix_range"] = torch.stack([torch.zeros_like(ends), ends], dim=1)[:, None]
    for rule in spec.score_rules:
        if isinstance(rule, Alibi):
            arguments["alibi_slopes"] = torch.tensor(rule.slopes, dtype=torch.float32, device=problem.device)
    return arguments


def split_arguments(problem: ProblemView, q: Tensor) -> dict[str, Any]:
    """Room for the partial states of so many splits as are asked for, rounded up to a power of two."""
    splits = 1 << ((problem.hints.num_kv_splits or 1) - 1).bit_length()
    if splits == 1:
        return {}
    states = q.new_empty((*q.shape[:2], splits, 1 << (q.shape[2] - 1).bit_length()), dtype=torch.float32)
    return {
        "seq_threshold_3D": len(q),
        "num_par_softmax_segments": splits,
        "softmax_segm_output": states,
        "softmax_segm_max": states.new_empty(states.shape[:3]),
        "softmax_segm_expsum": states.new_empty(states.shape[:3]),
    }


def cap_of(spec: AttentionProblem) -> float:
    """The soft cap, 0 for none."""
    return next((rule.cap for rule in spec.score_rules if isinstance(rule, SoftCap)), 0.0)
