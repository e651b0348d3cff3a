"""Bounds of out and lse: the entry point. [BOUND-OUT] [BOUND-LSE] [BOUND-PROBABILISTIC]"""

from dataclasses import dataclass, field

import numpy as np

from attnconform.conformance.bounds.block import Array, AttentionBlock
from attnconform.conformance.bounds.forward_probable import ProbableForward
from attnconform.conformance.bounds.forward_worst import WorstForward
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.bounds.rounding import any_in_row
from attnconform.conformance.bounds.softmax import Softmax, compute_operands, compute_softmax


@dataclass(frozen=True)
class ForwardBounds:
    """Largest admissible |got - exact|; 0 where a row sees nothing."""

    out_worst: Array  # (rows, head_dim_vo)
    out_prob: Array  # (rows, head_dim_vo)
    lse_worst: Array  # (rows,)
    lse_prob: Array  # (rows,)
    terms: ProbableForward | None = field(repr=False)  # for backward_bounds; None where no row sees anything


def forward_bounds(block: AttentionBlock, numerics: Numerics) -> ForwardBounds:
    """Worst-case and probable error of every element of out and lse. [BOUND-OUT] [BOUND-LSE]

    A row that sees no key and no sink has bounds of 0: its out is exactly 0, its lse exactly -inf. One that sees a
    sink only has an exact out, and a sink logit that passed through a kernel's arithmetic as lse.
    """
    x = compute_softmax(block)
    if not x.visible.any():
        empty_out, empty_lse = np.zeros((x.num_rows, block.v.shape[1])), np.zeros(x.num_rows)
        return ForwardBounds(empty_out, empty_out, empty_lse, empty_lse, terms=None)
    worst = WorstForward(x, compute_operands(x, numerics), numerics)
    probable = ProbableForward(worst)
    # A sink alone gives sums of zeros.
    has_key = any_in_row(x.mask[:, : len(block.k)])
    outs = [np.where(has_key, bound, 0.0) for bound in (worst.out, probable.out)]
    listed = [scatter_rows(x, bound) for bound in (*outs, worst.lse, probable.lse)]
    return ForwardBounds(
        out_worst=listed[0],
        out_prob=listed[1],
        lse_worst=listed[2][:, 0],
        lse_prob=listed[3][:, 0],
        terms=probable,
    )


def scatter_rows(x: Softmax, rows: Array) -> Array:
    """Back to all listed rows; 0 for those that see nothing."""
    listed = np.zeros((x.num_rows, rows.shape[1]))
    listed[x.visible] = rows
    return listed
