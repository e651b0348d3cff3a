"""The float64 reference against mpmath: how many bits it has, on ordinary and on extreme scores."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.conformance.cases import profiles
from attnconform.conformance.cases.strategies import VALUE_KINDS, cases, structures
from attnconform.conformance.cases.structure import Case, ValueKind, build_problem
from attnconform.conformance.cases.values import Values, build_values
from attnconform.reference.attention import attention
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.exact import exact_attention, exact_row
from attnconform.reference.problem import AttentionProblem

profiles.load_profile()

EXTREME: tuple[ValueKind, ...] = ("extreme", "far_key")
ORDINARY = tuple(kind for kind in VALUE_KINDS if kind not in EXTREME)
ORDINARY_BOUND, EXTREME_BOUND = 2.0**-44, 2.0**-33
LARGEST_ORDINARY_SCORE = 100.0

# small heads: mpmath needs milliseconds a row, and the error does not depend on who sums 128 products
SMALL = structures(max_tokens=24, max_requests=3, max_rows=2, heads=((1, 1), (4, 2)), head_dims=((16, 8), (8, 16)))
# a scale that is no power of two: the score is rounded where it is large
FAR = structures(max_tokens=24, max_requests=2, max_rows=2, heads=((1, 1), (4, 2)), head_dims=((12, 8), (20, 8)))
WIDE = structures(max_tokens=24, max_requests=1, max_rows=1, heads=((2, 1),), head_dims=((128, 32), (80, 80)))


@dataclass
class Worst:
    """The largest errors of a run, so that they can be printed after it."""

    out: dict[str, float] = field(default_factory=dict)
    lse: dict[str, float] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, out: float, lse: float) -> None:
        self.out[name] = max(self.out.get(name, 0.0), out)
        self.lse[name] = max(self.lse.get(name, 0.0), lse)
        self.seen[name] = self.seen.get(name, 0) + 1


def bits(error: float) -> str:
    return f"2^{np.log2(error):.1f}" if error else "0"


@pytest.fixture(scope="module")
def worst(request: pytest.FixtureRequest) -> Iterator[Worst]:
    """Collects errors and prints the worst of each kind, past pytest's capture."""
    found = Worst()
    yield found
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        for name in found.out:
            print(
                f"\n{name}: {found.seen[name]} cases, out {bits(found.out[name])}, lse {bits(found.lse[name])}", end=""
            )


def largest_score(problem: AttentionProblem, values: Values) -> float:
    """An upper bound of every scaled dot product of the problem, whoever attends it."""
    dots = np.abs(np.einsum("rhd,sgd->rhsg", values.q, values.k))
    return float(problem.sm_scale * dots.max(initial=0.0))


def errors(problem: AttentionProblem, values: Values) -> tuple[float, float]:
    """Error of out relative to Σ p|v|, and of lse relative to its size, or to 1 where it is smaller."""
    got, want = attention(problem, values.q, values.k, values.v), exact_attention(problem, values.q, values.k, values.v)
    condition = attention(problem, values.q, values.k, np.abs(values.v)).out
    assert np.array_equal(got.out[condition == 0], want.out[condition == 0])
    assert np.array_equal(np.isneginf(got.lse), np.isneginf(want.lse))
    safe = np.where(condition == 0, 1.0, condition)
    finite = np.isfinite(want.lse)
    lse_error = np.abs(got.lse[finite] - want.lse[finite]) / np.maximum(1.0, np.abs(want.lse[finite]))
    return float((np.abs(got.out - want.out) / safe).max(initial=0.0)), float(lse_error.max(initial=0.0))


@pytest.mark.parametrize("kind", ORDINARY)
def test_reference_has_44_bits_on_ordinary_scores(kind: ValueKind, worst: Worst) -> None:
    @settings(max_examples=profiles.examples(30))
    @given(cases(SMALL, operations=("forward",), values=(kind,)))
    def check(case: Case) -> None:
        problem = build_problem(case.structure)
        values = build_values(case, problem)
        assert largest_score(problem, values) <= LARGEST_ORDINARY_SCORE
        out, lse = errors(problem, values)
        worst.add(kind, out, lse)
        assert out < ORDINARY_BOUND
        assert lse < ORDINARY_BOUND

    check()
    assert worst.seen[kind] >= 20


@pytest.mark.parametrize("kind", EXTREME)
def test_reference_has_33_bits_on_extreme_scores(kind: ValueKind, worst: Worst) -> None:
    @settings(max_examples=profiles.examples(40))
    @given(cases(SMALL, operations=("forward",), values=(kind,)))
    def check(case: Case) -> None:
        problem = build_problem(case.structure)
        out, lse = errors(problem, build_values(case, problem))
        worst.add(kind, out, lse)
        assert out < EXTREME_BOUND
        assert lse < EXTREME_BOUND

    check()
    assert worst.seen[kind] >= 20


def test_reference_keeps_its_bits_with_wide_heads(worst: Worst) -> None:
    @settings(max_examples=profiles.examples(15))
    @given(cases(WIDE, operations=("forward",)))
    def check(case: Case) -> None:
        problem = build_problem(case.structure)
        out, lse = errors(problem, build_values(case, problem))
        bound = EXTREME_BOUND if case.values in EXTREME else ORDINARY_BOUND
        worst.add(f"wide heads, bound {bits(bound)}", out, lse)
        assert max(out, lse) < bound

    check()


def test_reference_has_33_bits_where_every_score_lies_near_minus_524288(worst: Worst) -> None:
    @settings(max_examples=profiles.examples(40))
    @given(cases(FAR, operations=("forward",), values=("far_key",)))
    def check(case: Case) -> None:
        problem = build_problem(case.structure)
        values = build_values(case, problem)
        values.k[..., 0] = values.k[..., 0].min()  # the far key's own: nothing is left that outweighs the others
        out, lse = errors(problem, values)
        worst.add("every key far", out, lse)
        assert max(out, lse) < EXTREME_BOUND

    check()


def plain_exact_row(
    scores: list[float], v: FloatArray, sink_logit: float | None
) -> tuple[list[mpmath.mpf], mpmath.mpf]:
    """Softmax written with ratios of exponentials instead of a common denominator."""
    with mpmath.workdps(80):
        logits = [mpmath.mpf(s) for s in scores] + ([] if sink_logit is None else [mpmath.mpf(sink_logit)])
        weights = [1 / mpmath.fsum(mpmath.exp(other - s) for other in logits) for s in logits[: len(scores)]]
        out = [mpmath.fsum(w * mpmath.mpf(float(x)) for w, x in zip(weights, column, strict=True)) for column in v.T]
        return out, mpmath.log(mpmath.fsum(mpmath.exp(s) for s in logits))


@settings(max_examples=profiles.examples(60))
@given(st.lists(st.floats(-6e5, 6e5), min_size=1, max_size=6), st.none() | st.floats(-100, 100), st.integers(0, 2**32))
def test_exact_row_agrees_with_softmax_as_ratios(scores: list[float], sink: float | None, seed: int) -> None:
    v = np.random.default_rng(seed).normal(size=(len(scores), 2))
    out, lse = plain_exact_row(scores, v, sink)
    with mpmath.workdps(60):
        got = exact_row([mpmath.mpf(s) for s in scores], v, sink)
    assert all(abs(a - b) <= mpmath.mpf(10) ** -50 for a, b in zip(got.out, out, strict=True))
    assert abs(got.lse - lse) <= mpmath.mpf(10) ** -40 * max(1, abs(lse))
