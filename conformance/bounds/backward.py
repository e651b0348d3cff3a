"""Bounds of dQ, dK, dV and the sinks' gradient: the entry point. [BOUND-GRAD] [BOUND-VOID]"""

from dataclasses import dataclass, replace

import numpy as np

from attnconform.conformance.bounds.backward_probable import ProbableBackward
from attnconform.conformance.bounds.backward_worst import WorstBackward
from attnconform.conformance.bounds.block import Array, AttentionBlock
from attnconform.conformance.bounds.forward import ForwardBounds, forward_bounds, oracle_share, scatter_rows
from attnconform.conformance.bounds.gradients import compute_gradients
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.bounds.rounding import any_in_column, any_in_row
from attnconform.conformance.bounds.softmax import Softmax


@dataclass(frozen=True)
class BackwardBounds:
    """Largest admissible |got - exact|; 0 where nothing is seen, infinite where VOID. dk, dv sum over all rows."""

    dq_worst: Array  # (rows, head_dim_qk)
    dq_prob: Array  # (rows, head_dim_qk)
    dk_worst: Array  # (seqlen_kv, head_dim_qk)
    dk_prob: Array  # (seqlen_kv, head_dim_qk)
    dv_worst: Array  # (seqlen_kv, head_dim_vo)
    dv_prob: Array  # (seqlen_kv, head_dim_vo)
    dsink_worst: Array  # (rows,), each row's share of its head's sum; 0 without sinks
    dsink_prob: Array  # (rows,)


def backward_bounds(
    block: AttentionBlock,
    do: Array,  # (rows, head_dim_vo)
    numerics: Numerics,
    forward: ForwardBounds,  # of the same block and numerics
    dlse: Array | None = None,  # (rows,), upstream gradient of lse
    do_error: Array | None = None,  # (rows, head_dim_vo), what do itself may be off where a kernel computes it
) -> BackwardBounds:
    """Worst-case and probable error of every element of dQ, dK, dV, and per row of the sinks' gradient. [BOUND-GRAD]

    Raises ValueError where do has another shape than out, or a soft cap comes without its slope.
    """
    rows, head_dim = len(block.mask), block.v.shape[1]
    if do.shape != (rows, head_dim):
        raise ValueError(f"do has shape {do.shape}, not {(rows, head_dim)}")
    if block.cap is not None and block.slope is None:
        raise ValueError(f"cap is {block.cap}, but slope is None")
    if forward.terms is None:
        return zero_bounds(block)
    x, share = forward.terms.softmax, oracle_share(numerics)
    worst = WorstBackward(forward.terms.worst, compute_gradients(x, do, dlse, numerics, do_error))
    probable = ProbableBackward(forward.terms, worst)
    listed = {
        f"{name}_{form}": share * list_gradient(block, x, name, getattr(terms, name))
        for name in ("dq", "dk", "dv", "dsink")
        for form, terms in (("worst", worst), ("prob", probable))
    }
    return BackwardBounds(**listed)


def score_gradient_error(
    block: AttentionBlock,
    do: Array,  # (rows, head_dim_vo)
    numerics: Numerics,
    dlse: Array | None = None,
    do_error: Array | None = None,
) -> Array:
    """Worst-case error of the gradient of every final score, (rows, seqlen_kv); infinite where VOID. [BOUND-RULE]

    It is that of dS with the rules' slopes taken as 1, for a parameter's gradient starts after its rule.
    """
    flat = replace(block, slope=np.ones(block.mask.shape))
    forward = forward_bounds(flat, numerics)
    if forward.terms is None:
        return np.zeros(block.mask.shape)
    worst = WorstBackward(forward.terms.worst, compute_gradients(forward.terms.softmax, do, dlse, numerics, do_error))
    error = np.where(worst.is_void_row, np.inf, worst.ds_error + worst.ds_rounding)
    return oracle_share(numerics) * scatter_rows(forward.terms.softmax, error)[:, : len(block.k)]


def list_gradient(block: AttentionBlock, x: Softmax, name: str, bound: Array) -> Array:
    """Back to all listed rows or keys; 0 where nothing is seen, for such gradients are sums of nothing."""
    keys = len(block.k)
    if name == "dsink":
        return scatter_rows(x, bound)[:, 0] if len(x.k) > keys else np.zeros(x.num_rows)
    if name == "dq":
        return scatter_rows(x, np.where(any_in_row(x.mask[:, :keys]), bound, 0.0))
    return np.where(any_in_column(x.mask[:, :keys]), bound[:keys], 0.0)


def zero_bounds(block: AttentionBlock) -> BackwardBounds:
    """No row sees anything."""
    q, k, v, row = (np.zeros(shape) for shape in (block.q.shape, block.k.shape, block.v.shape, len(block.mask)))
    return BackwardBounds(q, q, k, k, v, v, row, row)
