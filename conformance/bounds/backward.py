"""Bounds of dQ, dK, dV and the sinks' gradient: the entry point. [BOUND-GRAD] [BOUND-VOID]"""

from dataclasses import dataclass

import numpy as np

from attnconform.conformance.bounds.backward_probable import ProbableBackward
from attnconform.conformance.bounds.backward_worst import WorstBackward
from attnconform.conformance.bounds.block import Array, AttentionBlock
from attnconform.conformance.bounds.forward import ForwardBounds, scatter_rows
from attnconform.conformance.bounds.gradients import compute_gradients
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.bounds.parameters import ParameterBound, bound_parameters, no_bound, sink_coefficients
from attnconform.conformance.bounds.rounding import any_in_column, any_in_row
from attnconform.conformance.bounds.score_gradient_probable import ProbableScoreGradient
from attnconform.conformance.bounds.softmax import Softmax

GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class BackwardBounds:
    """Largest admissible |got - exact|; 0 where nothing is seen, infinite where VOID. dk, dv sum over all rows."""

    dq_worst: Array  # (rows, head_dim_qk)
    dq_prob: Array  # (rows, head_dim_qk)
    dk_worst: Array  # (seqlen_kv, head_dim_qk)
    dk_prob: Array  # (seqlen_kv, head_dim_qk)
    dv_worst: Array  # (seqlen_kv, head_dim_vo)
    dv_prob: Array  # (seqlen_kv, head_dim_vo)
    dsink: ParameterBound  # (num_heads,), before it is stored; 0 without sinks


def backward_bounds(
    block: AttentionBlock,
    do: Array,  # (rows, head_dim_vo)
    numerics: Numerics,
    forward: ForwardBounds,  # of the same block and numerics
    dlse: Array | None = None,  # (rows,), upstream gradient of lse
    do_error: Array | None = None,  # (rows, head_dim_vo), what do itself may be off where a kernel computes it
    num_rows: int | None = None,  # that a sink's gradient sums over, in this block and others
) -> BackwardBounds:
    """Worst-case and probable error of every element of dQ, dK, dV and the sinks' gradients. [BOUND-GRAD]

    Raises ValueError where do has another shape than out, or a soft cap comes without its slope.
    """
    rows, head_dim = len(block.mask), block.v.shape[1]
    if do.shape != (rows, head_dim):
        raise ValueError(f"do has shape {do.shape}, not {(rows, head_dim)}")
    if block.cap is not None and block.slope is None:
        raise ValueError(f"cap is {block.cap}, but slope is None")
    if forward.terms is None:
        return zero_bounds(block)
    x = forward.terms.softmax
    worst = WorstBackward(forward.terms.worst, compute_gradients(x, do, dlse, numerics, do_error))
    probable = ProbableBackward(ProbableScoreGradient(forward.terms, worst))
    listed = {
        f"{name}_{form}": list_gradient(block, x, name, getattr(terms, name))
        for name in GRADIENTS
        for form, terms in (("worst", worst), ("prob", probable))
    }
    return BackwardBounds(**listed, dsink=bound_sinks(probable.ds, num_rows or x.num_rows))


def bound_sinks(probable: ProbableScoreGradient, num_rows: int) -> ParameterBound:
    """The sinks' part of one block."""
    x = probable.softmax
    return bound_parameters(probable, sink_coefficients(x), num_rows) if x.num_sinks else no_bound(x.num_heads)


def list_gradient(block: AttentionBlock, x: Softmax, name: str, bound: Array) -> Array:
    """Back to all listed rows or keys; 0 where nothing is seen, for such gradients are sums of nothing."""
    keys = len(block.k)
    if name == "dq":
        return scatter_rows(x, np.where(any_in_row(x.mask[:, :keys]), bound, 0.0))
    return np.where(any_in_column(x.mask[:, :keys]), bound[:keys], 0.0)


def zero_bounds(block: AttentionBlock) -> BackwardBounds:
    """No row sees anything."""
    q, k, v = (np.zeros(x.shape) for x in (block.q, block.k, block.v))
    return BackwardBounds(q, q, k, k, v, v, no_bound(block.num_heads))
