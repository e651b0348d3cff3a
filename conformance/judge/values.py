"""Step 4: out and lse, element by element, against bounds made from the declared arithmetic."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attnconform.conformance.bounds.forward import forward_bounds
from attnconform.conformance.bounds.numerics import FORMATS
from attnconform.conformance.bounds.oracle import oracle_error
from attnconform.conformance.cases.values import Values
from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.blocks import placed_blocks
from attnconform.conformance.judge.epilogue import through_epilogue
from attnconform.conformance.judge.ratio import ratio_text
from attnconform.conformance.judge.trial import Observed, Trial, declared_numerics
from attnconform.conformance.judge.verdict import Finding, State
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.steps import AttentionResult

# unit roundoffs: P may be stored in e4m3, and enters every output but lse
COARSEST_OF_P, COARSEST = FORMATS["float8_e4m3"].u, {"lse": FORMATS["bfloat16"].u}
SEEDS, SEEDS_TO_FAIL = 5, 3  # the probabilistic bound fails a kernel that exceeds it on 3 of 5 seeds


@dataclass(frozen=True)
class Comparison:
    """One output held against the oracle."""

    name: str
    got: FloatArray
    want: FloatArray
    worst: FloatArray  # no honest kernel is farther away
    probable: FloatArray  # an honest kernel is rarely farther away

    def ratio(self, bound: FloatArray) -> FloatArray:
        """error / bound; 0 where they agree exactly or the element is VOID, inf where only one side is finite."""
        same = (self.got == self.want) | (np.isnan(self.got) & np.isnan(self.want)) | np.isinf(self.worst)
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.abs(self.got - self.want) / bound
        return np.where(same, 0.0, np.where(np.isnan(ratio), np.inf, ratio))

    @property
    def worst_ratio(self) -> float:
        return float(self.ratio(self.worst).max(initial=0.0))

    @property
    def num_void(self) -> int:
        """Elements without a bound: not judged, and never a pass. [BOUND-VOID]"""
        return int(np.isinf(self.worst).sum())

    @property
    def probable_ratio(self) -> float:
        return float(self.ratio(self.probable).max(initial=0.0))

    @property
    def is_right_to_a_low_precision(self) -> bool:
        """Whether each error is one that rounding to the coarsest of formats explains, beside the largest element."""
        error = self.ratio(np.ones_like(self.worst)).max(initial=0.0)
        sizes = np.abs(self.want[np.isfinite(self.want)])
        return bool(error <= COARSEST.get(self.name, COARSEST_OF_P) * sizes.max(initial=0.0))

    def message(self, bound: FloatArray) -> str:
        """The worst element: where, got, want, bound."""
        ratio = self.ratio(bound)
        at = np.unravel_index(int(ratio.argmax()), ratio.shape)
        place = ", ".join(str(int(i)) for i in at)
        over, error = int((ratio > 1).sum()), abs(self.got[at] - self.want[at])
        return (
            f"{self.name}[{place}] is {self.got[at]:.9g}, want {self.want[at]:.9g}, error {error:.3g} is "
            f"{ratio_text(float(ratio[at]))} x the bound {bound[at]:.3g} ({over} of {ratio.size} elements over)"
        )


def compare_forward(trial: Trial, values: Values, observed: Observed, oracle: AttentionResult) -> list[Comparison]:
    """out and lse with their bounds."""
    numerics = declared_numerics(trial)
    out_worst, out_probable = np.zeros_like(oracle.out), np.zeros_like(oracle.out)
    lse_worst, lse_probable = np.zeros_like(oracle.lse), np.zeros_like(oracle.lse)
    for placed in placed_blocks(trial, values):
        bounds = forward_bounds(placed.block, numerics)
        at = (placed.rows, placed.heads)
        own_out, own_lse = oracle_error(bounds)
        out_worst[at], out_probable[at] = bounds.out_worst + own_out, bounds.out_prob + own_out
        lse_worst[at], lse_probable[at] = bounds.lse_worst + own_lse, bounds.lse_prob + own_lse
    if trial.problem.epilogue:
        dtype = trial.case.structure.dtype
        out_worst, out_probable = (
            through_epilogue(trial.problem, oracle.before_epilogue, bound, dtype) for bound in (out_worst, out_probable)
        )
    compared = [Comparison("out", observed.out, oracle.out, out_worst, out_probable)]
    if observed.lse is not None:
        compared.append(Comparison("lse", observed.lse, oracle.lse, lse_worst, lse_probable))
    return compared


@checks(
    "SCORE-SCALE", "SCORE-ORDER", "SCORE-ALIBI", "SCORE-SOFTCAP", "SCORE-HEAD", "EMPTY-OUT", "EMPTY-LSE",
    "EMPTY-NEIGHBOUR", "EMPTY-POLICY", "LSE-NATURAL", "LSE-SINK", "MERGE-STATE", "MERGE-DISJOINT", "MERGE-EMPTY",
    "MERGE-SPLIT", "MERGE-OUTPUTS", "MASK-BEFORE-MAX", "MASK-NO-BIAS", "MASK-INTERFERE", "MASK-TAIL", "GQA-MAP",
    "COORD-LOGICAL", "COORD-RENUMBER", "COORD-STRIDE", "COORD-ROW", "BOUND-OUT", "BOUND-LSE", "BOUND-PROBABILISTIC",
    "BOUND-VOID", "QUANT-VALUE", "QUANT-GRANULARITY", "QUANT-APART", "DROPOUT-NUMERATOR", "DROPOUT-COUNTER",
    "ROPE-POSITION", "ROPE-PAIRS", "SET-SEQUENCE", "SCORE-RELATIVE", "RULE-CUSTOM", "MERGE-EPILOGUE", "COORD-HEAD-PAGE",
    "MASK-HEAD-WINDOW",
)  # fmt: skip
def check_values(trial: Trial) -> list[Finding]:
    """Each element of out and lse within its bound; a row that sees no key exactly 0 and -inf."""
    compared = compare_forward(trial, trial.values, trial.base, trial.oracle)
    return judge_comparisons(trial, compared, exceeds_under_other_seeds, "FAIL_value")


def judge_comparisons(
    trial: Trial, compared: list[Comparison], exceeds: Callable[[Trial, str], int], state: State
) -> list[Finding]:
    """Findings for a set of comparisons: FAIL past the worst case, FAIL or QUALITY past the probable one."""
    findings = []
    rounded = all(comparison.is_right_to_a_low_precision for comparison in compared)
    for comparison in compared:
        name = comparison.name
        # JSON has no infinity
        for usage, ratio in (
            (trial.usage, comparison.worst_ratio),
            (trial.usage_probable, comparison.probable_ratio),
        ):
            usage[name] = max(usage.get(name, 0.0), min(ratio, sys.float_info.max))
        trial.void += comparison.num_void
        clauses = value_clauses(trial, name, rounded=rounded)
        if worst_row_is_empty(trial, comparison):
            clauses = tuple(sorted(clauses, key=lambda clause: not clause.startswith("EMPTY")))
        if comparison.num_void == comparison.want.size > 0:
            message = f"{name}: the declared arithmetic bounds none of its {comparison.want.size} elements"
            findings.append(Finding(state="UNRESOLVED", clauses=("BOUND-VOID",), message=message))
        if comparison.worst_ratio > 1:
            nonfinite = not np.isfinite(comparison.got[np.isfinite(comparison.want)]).all()
            kind: State = "FAIL_nonfinite" if nonfinite else state
            findings.append(Finding(state=kind, clauses=clauses, message=comparison.message(comparison.worst)))
        elif comparison.probable_ratio > 1:
            times = 1 + exceeds(trial, name)
            kind = state if times >= SEEDS_TO_FAIL else "QUALITY"
            text = (
                f"{comparison.message(comparison.probable)}; probabilistic bound, exceeded on {times} of {SEEDS} seeds"
            )
            findings.append(Finding(state=kind, clauses=("BOUND-PROBABILISTIC", *clauses), message=text))
    return findings


def worst_row_is_empty(trial: Trial, comparison: Comparison) -> bool:
    """Whether the worst element is of a row and head that see no key; dk and dv have slots instead."""
    counts = trial.edges.counts()
    if comparison.name not in ("out", "lse", "dq") or not comparison.want.size:
        return False
    row, head = np.unravel_index(int(comparison.ratio(comparison.worst).argmax()), comparison.want.shape)[:2]
    return bool(counts[row, head] == 0)


def exceeds_under_other_seeds(trial: Trial, name: str) -> int:
    """On how many of the other seeds the probabilistic bound is exceeded as well."""
    times = 0
    for i in range(1, SEEDS):
        values = trial.with_seed(trial.case.seed + (i << 40))
        compared = compare_forward(trial, values, trial.run(values), trial.oracle_of(values))
        times += any(c.name == name and c.probable_ratio > 1 for c in compared)
    return times


# what a case has beside plain attention explains a wrong number first
FEATURES = ("QUANT", "DROPOUT", "ROPE", "SET-SEQUENCE", "COORD-HEAD-PAGE", "MERGE-EPILOGUE", "RULE", "SCORE-RELATIVE")
VALUE_AREAS = {
    "out": (*FEATURES, "EMPTY", "SCORE", "MERGE", "LSE-SINK", "GQA", "COORD", "MASK"),
    "lse": (*FEATURES, "LSE", "EMPTY", "SCORE", "MERGE", "MASK", "SET"),
}


def value_clauses(trial: Trial, name: str, *, rounded: bool) -> tuple[str, ...]:
    """Clauses of the case that a wrong number of this output would break, likeliest area first.

    Where all outputs are right to a low precision, the output's own bound comes first: the arithmetic is not what is
    declared. The codes of a quantized cache come before it, for a wrong scale looks the same.
    """
    gradients = (*FEATURES, "GRAD", "EMPTY-GRAD", "SCORE", "GQA", "COORD-STRIDE", "BLOCK-TRANSPOSE")
    areas = ("GRAD-RULE",) if name.startswith("dscore") else VALUE_AREAS.get(name, gradients)
    of_areas = (c for area in areas for c in trial.case.clauses if c == area or c.startswith(f"{area}-"))
    clauses = tuple(dict.fromkeys(of_areas))  # a feature's clause is of its area too
    if not rounded:
        return clauses
    of_codes = tuple(clause for clause in clauses if clause.startswith("QUANT"))
    return (*of_codes, bound_clause(name), *(clause for clause in clauses if clause not in of_codes))


def bound_clause(name: str) -> str:
    """The clause that bounds an output."""
    if name.startswith("dscore"):
        return "BOUND-RULE"
    return {"out": "BOUND-OUT", "lse": "BOUND-LSE"}.get(name, "BOUND-GRAD")
