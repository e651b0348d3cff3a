"""How far the float64 oracle itself may be from the exact answer; the judge adds it to every bound. [BOUND-OUT]

Nothing beside ordinary scores and dtypes. With scores of 5e4 the oracle has fewer than 24 bits beyond a float32 result,
and a float64 backend errs as much as the oracle does.
"""

from dataclasses import replace

import numpy as np

from attnconform.conformance.bounds.backward import GRADIENTS, list_gradient
from attnconform.conformance.bounds.backward_worst import WorstBackward
from attnconform.conformance.bounds.block import Array, AttentionBlock
from attnconform.conformance.bounds.forward import ForwardBounds, scatter_rows
from attnconform.conformance.bounds.forward_worst import WorstForward
from attnconform.conformance.bounds.gradients import compute_gradients
from attnconform.conformance.bounds.numerics import FORMATS, NUMERICS_CLASSES
from attnconform.conformance.bounds.parameters import WorstParameters, sink_coefficients
from attnconform.conformance.bounds.softmax import compute_operands, compute_softmax
from attnconform.reference.exact import float64_error

FLOAT64 = NUMERICS_CLASSES["float64"]
# Operands that a float32 kernel makes on its way (turned, dequantized ones) are made by the oracle in float64.
FINER = FORMATS["float64"].u / FORMATS["float32"].u


def oracle_error(bounds: ForwardBounds) -> tuple[Array, Array]:
    """Of out and lse, in the shapes of out_worst and lse_worst; 0 where a row sees nothing. [BOUND-OUT] [BOUND-LSE]"""
    if bounds.terms is None:
        return np.zeros_like(bounds.out_worst), np.zeros_like(bounds.lse_worst)
    x = bounds.terms.softmax
    sizes = np.maximum(x.dot_size, x.score_size)
    out, lse = float64_error(x.weights, x.keep, sizes, x.v, x.lse[:, 0], num_terms=x.q.shape[1])
    # a row whose out is exact, for it sees nothing or a sink alone, has nothing to add to
    return np.where(bounds.out_worst > 0, scatter_rows(x, out), 0.0), scatter_rows(x, lse[:, None])[:, 0]


def oracle_gradient_error(
    block: AttentionBlock,
    do: Array,  # (rows, head_dim_vo)
    dlse: Array | None = None,  # (rows,)
    do_error: Array | None = None,  # (rows, head_dim_vo), of the declared arithmetic
    num_rows: int | None = None,
) -> dict[str, Array]:
    """Of dq, dk, dv and dsink: the oracle is an honest kernel of the class float64, never past its worst case.

    Shapes as those of backward_bounds; 0 where nothing is seen. [BOUND-GRAD]
    """
    x = compute_softmax(in_float64(block))
    if not x.visible.any():
        return {"dsink": np.zeros(block.num_heads)} | {
            f"d{name}": np.zeros_like(getattr(block, name)) for name in "qkv"
        }
    gradients = compute_gradients(x, do, dlse, FLOAT64, finer(do_error))
    worst = WorstBackward(WorstForward(x, compute_operands(x, FLOAT64), FLOAT64), gradients)
    dsink = np.zeros(x.num_heads)
    if x.num_sinks:
        dsink = WorstParameters(worst, sink_coefficients(x), num_rows or x.num_rows).bound.sum(0)
    return {"dsink": dsink} | {name: list_gradient(block, x, name, getattr(worst, name)) for name in GRADIENTS}


def in_float64(block: AttentionBlock) -> AttentionBlock:
    """The same block with operands that were made in float64."""
    return replace(block, q_error=finer(block.q_error), k_error=finer(block.k_error), v_error=finer(block.v_error))


def finer(error: Array | None) -> Array | None:
    """An error of float32 arithmetic in float64."""
    return None if error is None else error * FINER
