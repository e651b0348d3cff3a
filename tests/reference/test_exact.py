"""The float64 reference against mpmath: how many bits it has, on ordinary and on extreme scores."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import mpmath
import msgspec
import numpy as np
import pytest
from feature_structures import ALL, FEATURES, all_pairs, case_with, featured_cases, pairs_of, with_features
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_attention import dequantized

from attnconform.conformance.cases import profiles
from attnconform.conformance.cases.strategies import SEEDS, VALUE_KINDS, cases, structures
from attnconform.conformance.cases.structure import CandidateStructure, Case, Structure, ValueKind, build_problem
from attnconform.conformance.cases.values import FAR_SCORE, Values, build_values
from attnconform.reference.attention import attention
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.exact import exact_attention, exact_row, float64_error, float64_errors
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.results import AttentionResult
from attnconform.reference.rope import Rope
from attnconform.reference.rules import Alibi

profiles.load_profile()

replace_structure = msgspec.structs.replace
EXACT_FEATURES = tuple(name for name in FEATURES if name != "custom_score")  # float64 arithmetic of its own
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
    share: dict[str, float] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, found: "Errors") -> None:
        for kept, error in ((self.out, found.out), (self.lse, found.lse), (self.share, found.share)):
            kept[name] = max(kept.get(name, 0.0), error)
        self.seen[name] = self.seen.get(name, 0) + 1
        assert found.share <= 1, name


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
            worst_of = (
                f"out {bits(found.out[name])}, lse {bits(found.lse[name])}, of its estimate {found.share[name]:.2f}"
            )
            print(f"\n{name}: {found.seen[name]} cases, {worst_of}", end="")
        print(f"\n{sum(found.seen.values())} cases in all", end="")


def largest_score(problem: AttentionProblem, values: Values) -> float:
    """An upper bound of every scaled dot product of the problem, whoever attends it."""
    size = problem.cache.page_size
    k = dequantized(values.k, problem.k_quant, size)
    dots = np.abs(np.einsum("rhd,sgd->rhsg", values.q, k))
    return float(problem.sm_scale * dots.max(initial=0.0))


@dataclass(frozen=True)
class Errors:
    """Worst errors of one case, and the largest share of its own estimate that an error takes."""

    out: float  # relative to Σ p|v|
    lse: float  # relative to its size, or to 1 where it is smaller
    share: float


def errors(problem: AttentionProblem, values: Values) -> Errors:
    """Errors of the reference before any epilogue, which is done to the merged row in either arithmetic."""
    got, want = (of(problem, values.q, values.k, values.v) for of in (attention, exact_attention))
    condition = attention(problem, values.q, values.k, np.abs(values.v)).before_epilogue
    out_off = np.abs(got.before_epilogue - want.before_epilogue)
    assert not out_off[condition == 0].any()
    relative = out_off / np.where(condition == 0, 1.0, condition)
    return Errors(float(relative.max(initial=0.0)), *lse_error_and_share(problem, values, got, want))


def aim_at(found: Errors, bound: float) -> None:
    """Within the bound; the hunt goes on from what comes nearest to it."""
    for name in ("out", "lse"):
        profiles.aim(getattr(found, name) / bound, name)
    assert max(found.out, found.lse) < bound


def lse_error_and_share(
    problem: AttentionProblem, values: Values, got: AttentionResult, want: AttentionResult
) -> tuple[float, float]:
    """Error of lse, and the largest share of its estimate that an error of out or lse takes."""
    finite = np.isfinite(want.lse)
    assert np.array_equal(np.isneginf(got.lse), ~finite)
    out_off, lse_off = np.abs(got.before_epilogue - want.before_epilogue), np.abs(got.lse[finite] - want.lse[finite])
    out_estimate, lse_estimate = float64_errors(problem, values.q, values.k, values.v)
    shares = [share(out_off, out_estimate), share(lse_off, lse_estimate[finite])]
    return float((lse_off / np.maximum(1.0, np.abs(want.lse[finite]))).max(initial=0.0)), max(shares)


def share(off: FloatArray, estimate: FloatArray) -> float:
    """The largest error in units of its estimate."""
    assert not off[estimate == 0].any()
    return float((off / np.where(estimate == 0, 1.0, estimate)).max(initial=0.0))


@pytest.mark.parametrize("kind", ORDINARY)
def test_reference_has_44_bits_on_ordinary_scores(kind: ValueKind, worst: Worst) -> None:
    @settings(max_examples=profiles.examples(30))
    @given(cases(SMALL, operations=("forward",), values=(kind,)))
    def check(case: Case) -> None:
        problem = build_problem(case.structure)
        values = build_values(case, problem)
        assert largest_score(problem, values) <= LARGEST_ORDINARY_SCORE
        found = errors(problem, values)
        worst.add(kind, found)
        aim_at(found, ORDINARY_BOUND)

    check()
    assert worst.seen[kind] >= 20


@pytest.mark.parametrize("kind", EXTREME)
def test_reference_has_33_bits_on_extreme_scores(kind: ValueKind, worst: Worst) -> None:
    @settings(max_examples=profiles.examples(40))
    @given(cases(SMALL, operations=("forward",), values=(kind,)))
    def check(case: Case) -> None:
        problem = build_problem(case.structure)
        found = errors(problem, build_values(case, problem))
        worst.add(kind, found)
        aim_at(found, EXTREME_BOUND)

    check()
    assert worst.seen[kind] >= 20


def test_reference_keeps_its_bits_with_wide_heads(worst: Worst) -> None:
    @settings(max_examples=profiles.examples(15))
    @given(cases(WIDE, operations=("forward",)))
    def check(case: Case) -> None:
        problem = build_problem(case.structure)
        found = errors(problem, build_values(case, problem))
        bound = EXTREME_BOUND if case.values in EXTREME else ORDINARY_BOUND
        worst.add(f"wide heads, bound {bits(bound)}", found)
        aim_at(found, bound)

    check()


def test_reference_has_33_bits_where_every_score_lies_near_minus_524288(worst: Worst) -> None:
    @settings(max_examples=profiles.examples(40))
    @given(cases(FAR, operations=("forward",), values=("far_key",)))
    def check(case: Case) -> None:
        problem = build_problem(case.structure)
        values = build_values(case, problem)
        values.k[..., 0] = values.k[..., 0].min()  # the far key's own: nothing is left that outweighs the others
        found = errors(problem, values)
        worst.add("every key far", found)
        aim_at(found, EXTREME_BOUND)

    check()


def test_reference_keeps_its_bits_with_every_feature(worst: Worst) -> None:
    met: set[frozenset[str]] = set()
    drawn = featured_cases(with_features(SMALL, features=EXACT_FEATURES), values=VALUE_KINDS)

    def assert_kept(case: Case) -> None:
        problem = build_problem(case.structure)
        values = build_values(case, problem)
        found = errors(problem, values)
        is_ordinary = case.values not in EXTREME and largest_score(problem, values) <= LARGEST_ORDINARY_SCORE
        bound = ORDINARY_BOUND if is_ordinary else EXTREME_BOUND
        worst.add(f"every feature, bound {bits(bound)}", found)
        aim_at(found, bound)
        met.update(pairs_of(case.structure))

    settings(max_examples=profiles.examples(100))(given(drawn)(assert_kept))()
    # what is drawn depends on which modules are loaded, so a few pairs may be left
    for pair in sorted(all_pairs(ALL - {"CustomScore"}) - met, key=sorted):
        assert_kept(case_with(pair, drawn))


@pytest.mark.parametrize("exponent", [-1060, -1072])
def test_reference_keeps_every_digit_that_subnormal_values_have(exponent: int, worst: Worst) -> None:
    @settings(max_examples=profiles.examples(10))
    @given(cases(SMALL, operations=("forward",), values=("normal", "peaked", "v_mean")))
    def check(case: Case) -> None:
        problem = build_problem(case.structure)
        values = build_values(case, problem)
        values = replace(values, v=np.ldexp(values.v, exponent))
        got, want = (of(problem, values.q, values.k, values.v) for of in (attention, exact_attention))
        # Σ p|v| is subnormal itself: errors are counted in steps of the smallest number
        steps = np.abs(got.out - want.out).max(initial=0.0) / 2.0**-1074
        num_keys = max(problem.seqlen_kv.max(initial=0), 1)
        assert steps <= num_keys + 1
        found = Errors(0.0, *lse_error_and_share(problem, values, got, want))
        worst.add(f"values near 2^{exponent}, out checked in steps of 2^-1074", found)
        assert found.lse < ORDINARY_BOUND

    check()


def test_reference_keeps_its_bits_where_weights_are_subnormal(worst: Worst) -> None:
    @settings(max_examples=profiles.examples(20))
    @given(cases(SMALL, operations=("forward",), values=("far_key",)), st.floats(690, 760))
    def check(case: Case, gap: float) -> None:
        problem = build_problem(replace_structure(case.structure, score_rules=(), sink_logits=None))
        values = build_values(case, problem)
        values.k[..., 0] *= gap / -FAR_SCORE  # the far key's score is -gap, and exp(-gap) is subnormal or 0
        found = errors(problem, values)
        worst.add("subnormal weights", found)
        aim_at(found, ORDINARY_BOUND)

    check()


@pytest.mark.parametrize("num_keys", [1, 100_000 if profiles.is_nightly() else 2_000])
@pytest.mark.parametrize("kind", ["normal", "equal_keys", "zero_q"])
def test_reference_keeps_its_bits_with_one_key_and_with_very_many(kind: ValueKind, num_keys: int, worst: Worst) -> None:
    pages = -(-num_keys // 16)
    structure = Structure(
        seqlens_q=(1,),
        seqlens_kv=(num_keys,),
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim_qk=4,
        head_dim_vo=2,
        page_size=16,
        num_pages=pages,
        page_table=(tuple(range(pages))[::-1],),
        sm_scale=0.5,
        score_rules=(Alibi((0.001,)),),
    )
    case = Case(id="keys", level="L3", operation="forward", structure=structure, values=kind, seed=num_keys, clauses=())
    problem = build_problem(structure)
    found = errors(problem, build_values(case, problem))
    worst.add(f"{num_keys} keys", found)
    assert max(found.out, found.lse) < ORDINARY_BOUND


@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_far_keys_costs_bits_and_no_more_than_the_estimate_says(interleaved: bool, worst: Worst) -> None:
    @settings(max_examples=profiles.examples(15))
    @given(st.lists(st.integers(0, 99_999), min_size=1, max_size=6), st.sampled_from((1e4, 5e5)), SEEDS)
    def check(keys: list[int], theta: float, seed: int) -> None:
        structure = Structure(
            seqlens_q=(1,),
            seqlens_kv=(100_000,),
            num_qo_heads=2,
            num_kv_heads=1,
            head_dim_qk=16,
            head_dim_vo=4,
            page_size=100_000,
            num_pages=1,
            page_table=((0,),),
            sm_scale=0.25,
            candidates=CandidateStructure(lists=(tuple(keys),), sharing="shared"),
            rope=Rope(theta=theta, rotary_dim=16, interleaved=interleaved, k_position="raw"),
        )
        problem, rng = build_problem(structure), np.random.default_rng(seed)
        k, v = np.zeros((100_000, 1, 16)), np.zeros((100_000, 1, 4))
        k[keys], v[keys] = rng.normal(size=(len(keys), 1, 16)), rng.normal(size=(len(keys), 1, 4))
        values = Values(rng.normal(size=(1, 2, 16)), k, v, np.zeros((1, 2, 4)), np.zeros((1, 2)))
        found = errors(problem, values)
        worst.add("turned at 100000", found)
        aim_at(found, EXTREME_BOUND)

    check()


def test_an_estimate_grows_with_the_scores_and_is_no_excuse_for_small_ones() -> None:
    weights, v, lse = np.full((1, 4), 0.25), np.ones((4, 1)), np.zeros(1)
    found = [
        float64_error(weights, np.ones((1, 4)), np.full((1, 4), size), v, lse, num_terms=128)[0][0, 0]
        for size in (1.0, 100.0, 5e4, 524288.0)
    ]
    assert found == sorted(found)
    assert found[0] < 2.0**-44
    assert found[1] < 2.0**-37
    assert 2.0**-34 < found[3] < 2.0**-24


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
