"""Step 3: bytes outside a row's effective set may hold anything."""

import numpy as np

from attnconform.conformance.cases.values import round_to
from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.hygiene import first_difference, same_outputs
from attnconform.conformance.judge.trial import HUGE, Observed, Trial, overwrite, same_bits, with_values
from attnconform.conformance.judge.verdict import Finding


@checks("MASK-INTERFERE", "BLOCK-MEMBER", "BLOCK-BIND", "MASK-BEFORE-MAX", "MASK-NO-BIAS")
def check_unselected(trial: Trial) -> list[Finding]:
    """Owned slots that no row attends may hold NaN where the backend tolerates it, and any finite number elsewhere.

    The second call had them so; only where it differs is it told apart from what else that call was given.
    """
    if trial.backend.capabilities.determinism == "none" or trial.selected.all():
        return []
    if same_outputs(trial.base, trial.second):
        return []
    rewritten = trial.run(overwrite(trial.values, ~trial.selected, trial.unselected))
    if same_outputs(trial.base, rewritten):
        return []
    where = first_difference(trial.base, rewritten)
    message = f"{trial.unselected:g} in slots that no row attends changes a row: {where}"
    return [Finding(state="FAIL_interference", clauses=("MASK-INTERFERE", "BLOCK-MEMBER"), message=message)]


@checks("MASK-INTERFERE", "EMPTY-NEIGHBOUR", "COORD-ROW", "MASK-NO-BIAS")
def check_other_rows(trial: Trial) -> list[Finding]:
    """What other rows ask and what only they attend has no influence on a row: all but one row's is rewritten."""
    if trial.backend.capabilities.determinism == "none" or not trial.problem.total_q:
        return []
    row = trial.case.seed % trial.problem.total_q
    head = (trial.case.seed >> 8) % trial.problem.num_qo_heads
    keep = np.zeros_like(trial.selected)
    keep[trial.edges.of(row, head)[1], head // trial.problem.group_size] = True
    huge = float(round_to(np.array(HUGE), trial.case.structure.dtype))
    q = np.full_like(trial.values.q, trial.unselected)
    q[row, head] = trial.values.q[row, head]
    rewritten = trial.run(with_values(overwrite(trial.values, ~keep, huge), q=q))
    if same_row(trial.base, rewritten, row, head):
        return []
    message = f"row {row} head {head} changes with queries of other rows and with keys that only those attend"
    return [Finding(state="FAIL_interference", clauses=("MASK-INTERFERE", "COORD-ROW"), message=message)]


def same_row(a: Observed, b: Observed, row: int, head: int) -> bool:
    """Bitwise the same out and lse of one row and head."""
    same_lse = a.lse_bits is None or b.lse_bits is None or same_bits(a.lse_bits[row, head], b.lse_bits[row, head])
    return same_lse and same_bits(a.out_bits[row, head], b.out_bits[row, head])
