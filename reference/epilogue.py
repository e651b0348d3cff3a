"""What is done to an output after its row is complete: an activation, a gate, a cast. [MERGE-EPILOGUE]"""

import ml_dtypes
import msgspec
import numpy as np

from attnconform.reference.coordinates import FloatArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.rounding import nearest

CAST_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# bits behind the leading one, and the exponent below which numbers are subnormal
FRACTIONS = {"float32": (23, -126), "bfloat16": (7, -126), "float16": (10, -14)}
ACTIVATIONS = ("relu", "silu")


class Activation(msgspec.Struct, frozen=True, tag=True):
    """Replaces each component x by max(x, 0), or by x / (1 + exp(-x))."""

    kind: str  # relu or silu


class Gate(msgspec.Struct, frozen=True, tag=True):
    """Multiplies a query head's output by 1 / (1 + exp(-logit))."""

    logits: tuple[float, ...]  # (num_qo_heads,)


class Cast(msgspec.Struct, frozen=True, tag=True):
    """Rounds to the nearest number of a dtype; the output keeps its storage."""

    dtype: str


EpilogueStep = Activation | Gate | Cast


def apply_epilogue(steps: tuple[EpilogueStep, ...], out: FloatArray, qo_head: int) -> FloatArray:
    """One row's merged and normalized output, after every step in order. [MERGE-EPILOGUE]

    >>> apply_epilogue((Activation("relu"), Gate((0.0,))), np.array([-1.0, 4.0]), 0)
    array([0., 2.])
    """
    for step in steps:
        out = epilogue_step(step, out, qo_head)
    return out


def epilogue_step(step: EpilogueStep, out: FloatArray, qo_head: int) -> FloatArray:
    """The output after one step."""
    match step:
        case Activation("relu"):
            return np.maximum(out, 0.0)
        case Activation():
            return np.asarray(out / (1 + np.exp(-out)))
        case Gate(logits):
            return np.asarray(out / (1 + np.exp(-logits[qo_head])))
        case Cast(dtype):
            fraction_bits, least_exponent = FRACTIONS[dtype]
            rounded = nearest(out, fraction_bits=fraction_bits, least_exponent=least_exponent)
            return np.asarray(rounded.astype(CAST_DTYPES[dtype]).astype(np.float64))  # too large is infinite


def epilogue_slope(steps: tuple[EpilogueStep, ...], out: FloatArray, qo_head: int) -> FloatArray:
    """d what the epilogue gives / d out, component by component; a cast counts as the identity. [GRAD-EPILOGUE]"""
    slope = np.ones_like(out)
    for step in steps:
        match step:
            case Activation("relu"):
                slope = slope * (out > 0)
            case Activation():
                gate = 1 / (1 + np.exp(-out))
                slope = slope * (gate + out * gate * (1 - gate))
            case Gate(logits):
                slope = slope / (1 + np.exp(-logits[qo_head]))
            case Cast():
                pass
        out = epilogue_step(step, out, qo_head)
    return slope


def check_epilogue(steps: tuple[EpilogueStep, ...], num_qo_heads: int) -> None:
    """Refuses an unknown activation or dtype, and gates of another head count. [MERGE-EPILOGUE]"""
    for i, step in enumerate(steps):
        match step:
            case Activation(kind) if kind not in ACTIVATIONS:
                raise RefusedInput(
                    "MERGE-EPILOGUE", "activation", kind, f"must be one of {', '.join(ACTIVATIONS)}", (i,)
                )
            case Cast(dtype) if dtype not in CAST_DTYPES:
                raise RefusedInput("MERGE-EPILOGUE", "cast", dtype, f"must be one of {', '.join(CAST_DTYPES)}", (i,))
            case Gate(logits):
                if len(logits) != num_qo_heads:
                    raise RefusedInput("SAFE-SHAPE", "len(gate.logits)", len(logits), f"must be {num_qo_heads}", (i,))
                for h, logit in enumerate(logits):
                    if not np.isfinite(logit):
                        raise RefusedInput("SAFE-FINITE", "gate.logits", logit, "must be finite", (h,))
