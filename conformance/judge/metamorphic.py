"""Step 5: the same question asked otherwise, whose answer follows from the first one's.

No oracle is asked: two right answers lie within the sum of their bounds of each other, and where a clause promises
bits, bits are compared. Each relation is tried on some of the cases that exercise its clause, by the case's seed.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from attnconform.conformance.cases.generate import BLOCK_SIZE
from attnconform.conformance.cases.values import Values
from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.storage import TORCH_DTYPES
from attnconform.conformance.judge.trial import Observed, Trial, same_bits, with_values
from attnconform.conformance.judge.values import Comparison, compare_forward
from attnconform.conformance.judge.variations import (
    edges_as_lists,
    has_custom_mask,
    knows_requests,
    variation,
    whole_requests_as_lists,
    with_candidates,
    with_hints,
    with_lists_relisted,
    with_pages_renumbered,
    with_request_appended,
    with_requests,
    with_requests_reversed,
)
from attnconform.conformance.judge.verdict import Finding
from attnconform.conformance.views import Hints
from attnconform.reference.coordinates import FloatArray, IntArray

PERIOD = 8  # of eight cases in a row, each relation below takes those of its own remainder
RENUMBERED, REVERSED, RELISTED, RESPLIT = range(4)
LISTINGS = ("holes_and_duplicates", "holes", "duplicates", "shuffled")
CLAUSE_OF_LISTING = {
    "holes_and_duplicates": ("SET-ORDER", "SET-HOLE", "SET-DUPLICATE"),
    "holes": ("SET-HOLE", "SET-ORDER"),
    "duplicates": ("SET-DUPLICATE", "SET-ORDER"),
    "shuffled": ("SET-ORDER",),
}
SPLITS = ("1", "2", "3", "8")
TILES = (16, 64)
GRID, LARGEST, SHIFT = 16, 2.0, 4.0  # v in sixteenths up to 2, and 4 more: every storage dtype holds both


@dataclass(frozen=True)
class Answer:
    """out and lse of a problem's rows, with how far a right answer may be off."""

    out: FloatArray
    lse: FloatArray | None
    out_bound: FloatArray
    lse_bound: FloatArray


def answer_of(trial: Trial, values: Values, observed: Observed) -> Answer:
    """What was observed, with the worst-case bounds of these numbers."""
    bounds = {c.name: c.worst for c in compare_forward(trial, values, observed, trial.oracle)}
    lse_bound = bounds.get("lse", np.zeros(observed.out.shape[:2]))
    return Answer(observed.out, observed.lse, bounds["out"], lse_bound)


def observe(trial: Trial, other: Trial) -> Observed:
    """One call on another problem, counted as one of the case's."""
    try:
        return other.run(other.values)
    finally:
        trial.calls += other.calls


def taken(trial: Trial, clause: str, remainder: int) -> bool:
    """Whether a case is one of those that a relation of its clause is tried on."""
    return clause in trial.case.clauses and trial.case.seed % PERIOD == remainder


def differences(trial: Trial, observed: Observed, rows: IntArray | None = None) -> list[str]:
    """Where another run's rows differ from the first run's by more than both bounds, which equal numbers share."""
    return differences_from(trial, observed if rows is None else at_rows(observed, rows), trial.base.out)


def at_rows(observed: Observed, rows: IntArray) -> Observed:
    """What was observed, with the rows in another order."""
    at = torch.from_numpy(rows).to(observed.out_bits.device)
    return replace(
        observed,
        out=observed.out[rows],
        lse=None if observed.lse is None else observed.lse[rows],
        out_bits=observed.out_bits[at],
        lse_bits=None if observed.lse_bits is None else observed.lse_bits[at],
    )


def differences_from(trial: Trial, observed: Observed, want_out: FloatArray) -> list[str]:
    """Likewise, where out should be another one and lse the same."""
    pairs = [("out", observed.out, want_out)]
    if observed.lse is not None and trial.base.lse is not None:
        pairs.append(("lse", observed.lse, trial.base.lse))
    if all(np.array_equal(got, want, equal_nan=True) for _, got, want in pairs):
        return []
    first = answer_of(trial, trial.values, trial.base)
    bounds = {"out": first.out_bound, "lse": first.lse_bound}
    return over(*((name, got, want, 2 * bounds[name]) for name, got, want in pairs))


def over(*compared: tuple[str, FloatArray, FloatArray, FloatArray]) -> list[str]:
    """A line for every (name, got, want, allowed) with an element farther away than allowed."""
    comparisons = [Comparison(name, got, want, allowed, allowed) for name, got, want, allowed in compared]
    return [c.message(c.worst) for c in comparisons if c.worst_ratio > 1]


def findings(lines: list[str], what: str, *clauses: str) -> list[Finding]:
    """A finding for each line; what was done comes first."""
    return [Finding(state="FAIL_value", clauses=clauses, message=f"{what}: {line}") for line in lines]


@checks("COORD-RENUMBER")
def check_renumbered_pages(trial: Trial) -> list[Finding]:
    """The pool's pages in another order give the same result."""
    if not taken(trial, "COORD-RENUMBER", RENUMBERED):
        return []
    lines = differences(trial, observe(trial, with_pages_renumbered(trial)))
    return findings(lines, "with the pool's pages renumbered", "COORD-RENUMBER")


@checks("COORD-ROW")
def check_reversed_requests(trial: Trial) -> list[Finding]:
    """The batch in the other order gives every row the same result."""
    structure = trial.case.structure
    if not taken(trial, "COORD-ROW", REVERSED) or len(structure.seqlens_q) < 2 or knows_requests(structure):
        return []
    other, rows = with_requests_reversed(trial)
    return findings(differences(trial, observe(trial, other), rows), "with the batch in reverse", "COORD-ROW")


@checks("DETERMINISM-BATCH", "COORD-ROW", "PLAN-REPLAN")
def check_appended_request(trial: Trial) -> list[Finding]:
    """A request that shares nothing with the others changes none of their results; no bit, where that is declared.

    It is longer than any of them, and its own result is right as well: nothing was measured out by the calls before.
    """
    structure = trial.case.structure
    if "DETERMINISM-BATCH" not in trial.case.clauses:
        return []
    # one page more of so wide a pool is a gibibyte; and a registered rule need not know another request
    if structure.page_stride is not None or has_custom_mask(structure.mask_rule):
        return []
    other = with_request_appended(trial)
    seen = observe(trial, other)
    observed = at_rows(seen, np.arange(trial.problem.total_q))
    clauses = ("DETERMINISM-BATCH", "COORD-ROW")
    found = findings(differences(trial, observed), "with one more request in the batch", *clauses)
    found += of_the_appended(trial, other, seen)
    if found or trial.backend.capabilities.determinism != "batch_invariant" or has_same_bits(trial.base, observed):
        return found
    message = "one more request in the batch changes bits of others, and batch invariance is declared"
    return [Finding(state="FAIL_determinism", clauses=("DETERMINISM-BATCH",), message=message)]


def of_the_appended(trial: Trial, other: Trial, seen: Observed) -> list[Finding]:
    """A finding where the request that was added is not answered as it would be alone."""
    if trial.problem.dropout is not None:  # what it drops depends on its number in the batch
        return []
    alone = with_requests(other, [other.problem.batch_size - 1])
    own = at_rows(seen, np.arange(trial.problem.total_q, other.problem.total_q))
    compared = compare_forward(alone, alone.values, own, alone.oracle)
    lines = [c.message(c.worst) for c in compared if c.worst_ratio > 1]
    return findings(lines[:1], "one more request than before, longer than any of them", "PLAN-REPLAN", "COORD-ROW")


def has_same_bits(a: Observed, b: Observed) -> bool:
    """Bitwise the same out and lse."""
    if a.lse_bits is not None and b.lse_bits is not None and not same_bits(a.lse_bits, b.lse_bits):
        return False
    return same_bits(a.out_bits, b.out_bits)


@checks("SET-ORDER", "SET-HOLE", "SET-DUPLICATE")
def check_relisted(trial: Trial) -> list[Finding]:
    """Shuffled lists, lists with holes and with duplicates give the same result, where the backend takes them."""
    candidates = trial.case.structure.candidates
    takes = [listing for listing in LISTINGS if trial.backend.capabilities.declares("listing", listing)]
    is_set = candidates is not None and candidates.form == "set"
    if not is_set or not takes or trial.case.seed % PERIOD != RELISTED or "SET-IDENTITY" not in trial.case.clauses:
        return []
    listing = takes[trial.case.seed // PERIOD % len(takes)]
    lines = differences(trial, observe(trial, with_lists_relisted(trial, listing)))
    return findings(lines, f"with lists written with {listing}", *CLAUSE_OF_LISTING[listing])


@checks("MERGE-SPLIT")
def check_other_splits(trial: Trial) -> list[Finding]:
    """Another number of splits and another tile give the same result."""
    if not taken(trial, "MERGE-SPLIT", RESPLIT):
        return []
    hints = trial.case.structure.hints
    others = [n for n in SPLITS if n != str(hints.num_kv_splits) and trial.backend.capabilities.declares("splits", n)]
    if not others:
        return []
    splits, tile = others[trial.case.seed // PERIOD % len(others)], TILES[trial.case.seed // PERIOD % len(TILES)]
    lines = differences(trial, observe(trial, with_hints(trial, Hints(num_kv_splits=int(splits), tile_kv=tile))))
    return findings(lines, f"in {splits} splits with tiles of {tile}", "MERGE-SPLIT")


@checks("SET-REPRESENTATION", "BLOCK-BIND")
def check_representations(trial: Trial) -> list[Finding]:
    """The same edges as a mask rule, as lists under that rule and as lists alone give the same result.

    Which of the three differs tells where the fault is: in the lists, in what joins lists and mask, or in the mask.
    """
    if "SET-REPRESENTATION" not in trial.case.clauses:
        return []
    lines = {name: differences(trial, observe(trial, other)) for name, other in representations(trial).items()}
    wrong = [name for name, found in lines.items() if found]
    if not wrong:
        return []
    agree = [name for name in lines if name not in wrong]
    what = f"{' and '.join(wrong)} differ from the problem as it stands" + (f", {agree[0]} does not" if agree else "")
    return findings(lines[wrong[0]][:1], what, "SET-REPRESENTATION")


def representations(trial: Trial) -> dict[str, Trial]:
    """Other ways to say the problem that the backend takes."""
    structure, declares = trial.case.structure, trial.backend.capabilities.declares
    plain = (("q_block", "1"), ("local", "none"), ("listing", "sorted"))
    if not all(declares(axis, value) for axis, value in plain):
        return {}
    found = {}
    is_dense = structure.candidates is None
    if is_dense and declares("sharing", "shared"):
        is_block = bool(trial.case.seed % 2) and declares("granularity", "block")
        if is_block or declares("granularity", "token"):
            lists = whole_requests_as_lists(trial, BLOCK_SIZE if is_block else 1)
            found["lists under the mask rule"] = with_candidates(trial, lists)
    has_empty_row = not trial.edges.counts().all()
    takes_lists = declares("granularity", "token") and declares("sharing", "query_head") and declares("mask", "none")
    if takes_lists and (not has_empty_row or declares("empty", "first")):
        found["lists alone"] = with_candidates(trial, edges_as_lists(trial), mask_rule=None)
    return found


@checks("SCORE-WEIGHTS")
def check_weights(trial: Trial) -> list[Finding]:
    """Twice the values give twice the output, to the bit; values that are all larger by 4 an output larger by 4."""
    if "SCORE-WEIGHTS" not in trial.case.clauses or trial.problem.epilogue:
        return []
    return check_doubled(trial) or check_shifted(trial)


def check_doubled(trial: Trial) -> list[Finding]:
    """A power of two passes through every rounding, but for numbers below the smallest normal one."""
    problem, values = trial.problem, trial.values
    if problem.v_quant is None:
        other = variation(trial, values=with_values(values, v=2 * values.v))
    else:
        scaled = replace(problem.v_quant, scale=2 * problem.v_quant.scale)
        other = variation(trial, problem=replace(problem, v_quant=scaled))
    observed, want = observe(trial, other), 2 * trial.base.out
    if trial.backend.capabilities.determinism == "none":
        bounds = [answer_of(t, t.values, seen).out_bound for t, seen in ((trial, trial.base), (other, observed))]
        allowed = 2 * bounds[0] + bounds[1]
    else:
        kind = torch.finfo(TORCH_DTYPES[trial.case.structure.dtype])
        allowed = np.where(np.abs(want) >= 4 * kind.smallest_normal, 0.0, 4 * kind.smallest_normal * kind.eps)
    return findings(over(("out", observed.out, want, allowed)), "with v twice as large", "SCORE-WEIGHTS")


def check_shifted(trial: Trial) -> list[Finding]:
    """Weights that sum to 1 carry a constant through; a sink's or a dropped edge's weight would be missing."""
    problem, values = trial.problem, trial.values
    if problem.v_quant is not None or problem.sink_logits is not None or problem.dropout is not None:
        return []
    low = with_values(values, v=np.clip(np.rint(values.v * GRID) / GRID, -LARGEST, LARGEST))
    high = with_values(low, v=low.v + SHIFT)
    first, second = (answer_of(trial, v, trial.run(v)) for v in (low, high))
    is_empty = trial.edges.counts() == 0
    want = first.out + np.where(is_empty, 0.0, SHIFT)[..., None]
    allowed = first.out_bound + second.out_bound
    return findings(over(("out", second.out, want, allowed)), "with 4 added to every v", "SCORE-WEIGHTS")


METAMORPHIC_CHECKS = (
    check_renumbered_pages,
    check_reversed_requests,
    check_appended_request,
    check_relisted,
    check_other_splits,
    check_representations,
    check_weights,
)
