"""Which clause a wrong number is blamed on: arithmetic of a low precision, or what attention means."""

from dataclasses import replace

import numpy as np
import pytest

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.judge.gradients import check_gradients
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.values import Comparison, bound_clause, check_values
from attnconform.conformance.judge.verdict import Finding

PLAIN = ("k_quant", "v_quant")


def cases(operation, dtype="float32"):
    found = [case for case in matrix("L1") if case.operation == operation and case.structure.dtype == dtype]
    plain = [case for case in found if not any(getattr(case.structure, name) for name in PLAIN)]
    return sorted(plain, key=lambda case: case.structure.num_qo_heads * sum(case.structure.seqlens_kv))


def findings_of(deviation, *, operation="forward", check=check_values) -> list[Finding]:
    """Those of the first small case that fails, past a worst-case bound."""
    for case in cases(operation):
        found = [f for f in check(Trial(case, DEVIATIONS[deviation].build())) if "BOUND-PROBABILISTIC" not in f.clauses]
        if found:
            return found
    raise AssertionError(f"{deviation} fails no case")


@pytest.mark.parametrize(
    ("deviation", "clause"),
    [
        ("stores-lse-in-bf16", "BOUND-LSE"),
        ("stores-lse-of-parts-in-bf16", "BOUND-LSE"),
        ("stores-out-of-parts-in-bf16", "BOUND-OUT"),
        ("stores-weights-in-bf16", "BOUND-OUT"),
        ("stores-weights-in-fp8", "BOUND-OUT"),
        ("multiplies-in-tf32", "BOUND-OUT"),
        ("accumulates-in-bf16", "BOUND-OUT"),
    ],
)
def test_values_right_to_a_low_precision_are_blamed_on_their_bound(deviation, clause):
    firsts = [finding.clauses[0] for finding in findings_of(deviation)]
    assert clause in firsts
    assert set(firsts) <= {"BOUND-OUT", "BOUND-LSE"}


@pytest.mark.parametrize(
    ("deviation", "clause"),
    [("accumulates-gradients-in-bf16", "BOUND-GRAD"), ("stores-rule-gradients-in-bfloat16", "BOUND-RULE")],
)
def test_gradients_right_to_a_low_precision_are_blamed_on_their_bound(deviation, clause):
    found = findings_of(deviation, operation="backward", check=check_gradients)
    assert {finding.clauses[0] for finding in found} == {clause}


@pytest.mark.parametrize("deviation", ["scales-twice", "returns-lse-in-base-two", "alibi-takes-the-absolute-distance"])
def test_a_mistake_about_attention_is_not_blamed_on_arithmetic(deviation):
    for finding in findings_of(deviation):
        assert not any(clause.startswith("BOUND") for clause in finding.clauses)


def test_one_output_that_is_plainly_wrong_takes_the_blame_from_the_arithmetic_of_the_others():
    class HalvesLse(StepsBackend):
        def store(self, tensors, result):
            out = result.out * (1 + 1e-3)
            super().store(tensors, replace(result, out=out, lse=result.lse / 2))

    found = check_values(Trial(cases("forward")[0], HalvesLse()))
    assert found
    assert not any(clause.startswith("BOUND") for finding in found for clause in finding.clauses)


def test_the_codes_of_a_cache_explain_a_small_error_before_the_arithmetic_does():
    class Rounds(StepsBackend):
        def store(self, tensors, result):
            super().store(tensors, replace(result, out=result.out * (1 + 2.0**-5)))

    case = next(c for c in matrix("L1") if c.operation == "forward" and c.structure.v_quant and c.structure.k_quant)
    clauses = check_values(Trial(case, Rounds()))[0].clauses
    of_codes = [clause.startswith("QUANT") for clause in clauses]
    assert of_codes[: sum(of_codes)] == [True] * sum(of_codes)
    assert clauses[sum(of_codes)] == "BOUND-OUT"


def test_an_output_without_a_finite_twin_is_not_right_to_any_precision():
    one = np.ones((1, 1))
    assert Comparison("out", one * 1.01, one, one, one).is_right_to_a_low_precision
    for got in (np.nan, np.inf, 1.1):
        assert not Comparison("out", one * got, one, one, one).is_right_to_a_low_precision
    assert not Comparison("lse", one * 1.01, one, one, one).is_right_to_a_low_precision
    assert Comparison("lse", -np.inf * one, -np.inf * one, 0 * one, 0 * one).is_right_to_a_low_precision


def test_every_output_has_a_bound_of_its_own():
    names = ("out", "lse", "dq", "dk", "dv", "dsink", "dscore0")
    assert [bound_clause(name) for name in names] == ["BOUND-OUT", "BOUND-LSE", *["BOUND-GRAD"] * 4, "BOUND-RULE"]


def test_a_clause_that_is_of_two_areas_is_named_once():
    case = next(c for c in cases("forward") if "SCORE-RELATIVE" in c.clauses)
    found = check_values(Trial(case, DEVIATIONS["forgets-the-scale"].build()))
    assert found
    for finding in found:
        assert len(finding.clauses) == len(set(finding.clauses))
        assert {"SCORE-RELATIVE", "SCORE-SCALE"} <= set(finding.clauses)
