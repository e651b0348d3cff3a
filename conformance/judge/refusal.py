"""Step 7: what must be refused is refused before anything is written, and says why in one line."""

from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.storage import store_inputs
from attnconform.conformance.judge.trial import SECOND_POISON, BackendCrash, Trial, as_float64, first_line
from attnconform.conformance.judge.verdict import Finding
from attnconform.reference.coordinates import FloatArray


@checks(
    "SAFE-REFUSE", "SAFE-SHAPE", "SAFE-FINITE", "SAFE-OWNER", "SET-RANGE", "SET-FORM", "COORD-PAGE-RANGE", "GQA-MAP",
    "EMPTY-POLICY", "MASK-WINDOW", "SET-SEQUENCE", "COORD-HEAD-PAGE", "SCORE-RELATIVE", "RULE-NAME", "RULE-PURE",
    "QUANT-SCALE", "QUANT-GRANULARITY", "DROPOUT-RATE", "ROPE-ENCODED", "ROPE-PAIRS", "MERGE-EPILOGUE",
)  # fmt: skip
def check_refusal(trial: Trial) -> list[Finding]:
    """The typed error comes, the outputs are untouched, and the message is one line that names the clause's matter."""
    clause = trial.case.refuses
    assert clause is not None
    q, k, v = corrupted_tensors(trial)
    structure = trial.case.structure
    device = trial.backend.device
    tensors, _ = store_inputs(structure, trial.problem, q, k, v, device=device, poison=SECOND_POISON)
    trial.calls += 1
    try:
        trial.backend.forward(trial.view, tensors)
    except trial.backend.refusals as error:
        if (as_float64(tensors.out) != SECOND_POISON).any() or (as_float64(tensors.lse) != SECOND_POISON).any():
            message = f"refused with {error!s:.120}, after writing outputs"
            return [Finding(state="REFUSED_LATE", clauses=(clause, "SAFE-REFUSE"), message=message)]
        if not str(error).strip() or "\n" in str(error).strip():
            message = f"the refusal is not one line: {str(error)[:80]!r}"
            return [Finding(state="REFUSED_LATE", clauses=("SAFE-REFUSE",), message=message)]
        return []
    except Exception as error:
        raise BackendCrash(f"raised {type(error).__name__} where it should refuse: {first_line(error)}") from error
    message = f"the input breaks {clause} and was accepted"
    return [Finding(state="NOT_REFUSED", clauses=(clause, "SAFE-REFUSE"), message=message)]


def corrupted_tensors(trial: Trial) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The case's tensors, of another shape where its corruption says so."""
    values = trial.values
    match trial.case.structure.corruption:
        case "q_head_dim":
            return values.q[..., :-1], values.k, values.v
        case "kv_heads":
            return values.q, values.k[:, :1], values.v[:, :1]
        case _:
            return values.q, values.k, values.v
