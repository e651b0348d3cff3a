"""The judge: every check a case calls for, in order, and the verdict."""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.isolation import settled
from attnconform.conformance.judge.after_error import check_after_a_call_that_raised
from attnconform.conformance.judge.edited_rules import check_edited_rule
from attnconform.conformance.judge.epilogue import check_cast
from attnconform.conformance.judge.first_call import check_first_call_again
from attnconform.conformance.judge.gradient_calls import check_gradient_of_lse, check_gradients_of_other_problems
from attnconform.conformance.judge.gradients import check_gradient_edges, check_gradients
from attnconform.conformance.judge.hygiene import check_bounds, check_inputs, check_path, check_repeat, check_written
from attnconform.conformance.judge.interference import check_other_rows, check_unselected
from attnconform.conformance.judge.lifecycle import LIFECYCLE_CHECKS
from attnconform.conformance.judge.membership import check_membership
from attnconform.conformance.judge.memory import check_memory
from attnconform.conformance.judge.metamorphic import METAMORPHIC_CHECKS
from attnconform.conformance.judge.refusal import check_refusal
from attnconform.conformance.judge.structures import STRUCTURE_CHECKS
from attnconform.conformance.judge.trial import BackendCrash, Trial
from attnconform.conformance.judge.values import check_values
from attnconform.conformance.judge.verdict import CONFORMING, CaseResult, Finding, worst_state
from attnconform.conformance.structures import offers_any

Check = Callable[[Trial], list[Finding]]
FORWARD_CHECKS: tuple[Check, ...] = (
    check_after_a_call_that_raised,
    check_written,
    check_bounds,
    check_inputs,
    check_path,
    check_repeat,
    check_membership,
    check_unselected,
    check_other_rows,
    check_values,
    check_cast,
    check_edited_rule,
    check_memory,
    *METAMORPHIC_CHECKS,
    *LIFECYCLE_CHECKS,
    check_first_call_again,
)
# a backward case trusts the forward cases for what they cover, and checks only that its own forward is sound
BACKWARD_CHECKS: tuple[Check, ...] = (
    check_path,
    check_values,
    check_gradients,
    check_gradient_edges,
    check_gradient_of_lse,
    check_gradients_of_other_problems,
    check_first_call_again,
)
CHECKS_OF: dict[str, tuple[Check, ...]] = {
    "forward": FORWARD_CHECKS,
    "backward": BACKWARD_CHECKS,
    "refusal": (check_refusal,),
    "structure": STRUCTURE_CHECKS,
}


@dataclass(frozen=True)
class Undeclared:
    """Why a case lies outside a backend's declaration."""

    reason: str


def undeclared(case: Case, backend: Backend) -> Undeclared | None:
    """The first axis of a case that the backend does not declare."""
    declared = backend.capabilities
    if case.operation == "structure" and not offers_any(backend):
        return Undeclared("builds no structures of its own")
    if case.operation == "backward" and not declared.has_backward:
        return Undeclared("no backward")
    quantized = case.structure.k_quant is not None or case.structure.v_quant is not None
    if case.operation == "backward" and quantized and not declared.quantized_backward:
        return Undeclared("no backward over quantized caches")
    if case.structure.page_owner is not None and not declared.checks_owner:
        return Undeclared("does not check page owners")
    for axis, value in case.axes.items():
        if not declared.declares(axis, value):
            return Undeclared(f"{axis} = {value} is not declared")
    return None


def judge_case(case: Case, backend: Backend, checks: Sequence[Check] | None = None) -> CaseResult:
    """The verdict on one case. Never raises for what a backend does; a fault of our own is HARNESS_ERROR."""
    started = time.perf_counter()
    outside = undeclared(case, backend)
    if outside is not None:
        return CaseResult(case_id=case.id, state="UNSUPPORTED", clauses=case.clauses, reason=outside.reason)
    trial = Trial(case, backend)
    findings = run_checks(trial, checks or CHECKS_OF[case.operation])
    state = worst_state(findings)
    if state == "PASS" and case.operation == "refusal":
        state = "REFUSED_OK"
    return settled(
        CaseResult(
            case_id=case.id,
            state=state,
            clauses=case.clauses,
            findings=tuple(findings),
            path=trial.__dict__["base"].path if "base" in trial.__dict__ else "",
            usage=trial.usage,
            usage_probable=trial.usage_probable,
            unresolved=trial.unresolved,
            void=trial.void,
            seconds=time.perf_counter() - started,
            calls=trial.calls,
        )
    )


def run_checks(trial: Trial, checks: Sequence[Check]) -> list[Finding]:
    """Findings of each check in order. A crash of the backend ends the case."""
    findings: list[Finding] = []
    for check in checks:
        try:
            found = check(trial)
        except BackendCrash as crash:
            found = [Finding(state="CRASH", clauses=(crash.clause,), message=str(crash))]
        except Exception as error:  # a fault of the suite must be told apart from one of the backend
            place = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})"
            found = [Finding(state="HARNESS_ERROR", clauses=(), message=message)]
        findings += [msgspec.structs.replace(f, check=check.__name__) for f in found]
        trial.has_failed |= any(f.state not in CONFORMING for f in found)
        if found and found[0].state in ("CRASH", "HARNESS_ERROR"):
            break
    return findings
