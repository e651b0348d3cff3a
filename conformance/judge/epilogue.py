"""How far an output may be off once something was done to it. [MERGE-EPILOGUE]"""

import numpy as np

from attnconform.conformance.bounds.numerics import FORMATS
from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.blocks import UNIT
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.verdict import Finding
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.epilogue import Activation, Cast, Gate, epilogue_step
from attnconform.reference.problem import AttentionProblem

EXP_ROUNDINGS = 8  # an exponential, a sum, a quotient, a product
STEEPEST_SILU = 1.0999  # the largest slope of x / (1 + exp(-x))


def through_epilogue(problem: AttentionProblem, merged: FloatArray, bound: FloatArray, dtype: str) -> FloatArray:
    """Bound of out from the bound of the merged rows, (total_q, num_qo_heads, head_dim_vo).

    Each step stretches an error by its largest slope and adds its own rounding; the result is stored once more.
    """
    moved = bound.copy()
    for h in range(problem.num_qo_heads):
        x, error = merged[:, h], bound[:, h]
        for step in problem.epilogue:
            after = epilogue_step(step, x, h)
            match step:
                case Activation("relu"):
                    pass
                case Activation():
                    error = STEEPEST_SILU * error + EXP_ROUNDINGS * UNIT * np.abs(x)
                case Gate(logits):
                    error = error / (1 + np.exp(-logits[h])) + EXP_ROUNDINGS * UNIT * np.abs(after)
                case Cast(to):
                    error = error + 2 * (FORMATS[to].u * (np.abs(x) + error) + FORMATS[to].eta)
            x = after
        stored = FORMATS[dtype]
        moved[:, h] = error + stored.u * (np.abs(x) + error) + stored.eta
    return np.where(bound > 0, moved, bound)


@checks("MERGE-EPILOGUE")
def check_cast(trial: Trial) -> list[Finding]:
    """An output whose last step is a cast holds numbers of that dtype: a cast left out is too small for a bound."""
    last = trial.problem.epilogue[-1] if trial.problem.epilogue else None
    if not isinstance(last, Cast):
        return []
    out = trial.base.out
    off = np.argwhere(np.isfinite(out) & (epilogue_step(last, out, 0) != out))
    if not len(off):
        return []
    row, head, component = (int(i) for i in off[0])
    message = f"out[{row}, {head}, {component}] is {out[row, head, component]:.9g}, which is no {last.dtype}"
    return [Finding(state="FAIL_value", clauses=("MERGE-EPILOGUE",), message=f"{message} ({len(off)} elements)")]
