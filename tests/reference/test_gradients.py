"""Gradients against central differences in mpmath, and against torch.autograd of a dense masked formula."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings

from attnconform.conformance.cases import profiles
from attnconform.conformance.cases.strategies import cases, structures
from attnconform.conformance.cases.structure import (
    CandidateStructure,
    Case,
    Structure,
    ValueKind,
    build_problem,
)
from attnconform.conformance.cases.values import Values, build_values
from attnconform.reference.attention import attention, attention_gradients, effective_sets
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.formats import dense_masks
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.rules import Alibi, Causal, ScoreRule, SoftCap

profiles.load_profile()

Exact = npt.NDArray[np.object_]  # of mpmath numbers
Tensors = dict[str, FloatArray]

# errors are relative to the largest gradient of a tensor, or to 1: a gradient may cancel to nothing
BOUND = 2.0**-44
STEP_DIGITS, DIGITS = 25, 80  # a central difference of step 10^-25 is off by about 10^-50
KINDS: tuple[ValueKind, ...] = ("normal", "half_mass", "equal_keys", "v_mean", "integers")

TINY = structures(
    max_tokens=5,
    max_requests=2,
    max_rows=2,
    heads=((1, 1), (2, 1), (2, 2)),
    head_dims=((2, 2), (3, 2)),
    page_sizes=(1, 2),
)
SMALL = structures(max_tokens=36, head_dims=((16, 8), (8, 16)), page_sizes=(1, 8, 16))


@pytest.fixture(scope="module")
def worst(request: pytest.FixtureRequest) -> Iterator[dict[str, float]]:
    """Collects the worst relative error of every gradient and prints it, past pytest's capture."""
    found: dict[str, float] = {}
    yield found
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        for name, error in found.items():
            print(f"\n{name}: {f'2^{np.log2(error):.1f}' if error else 'exact'}", end="")


def gradients_of(problem: AttentionProblem, values: Values) -> Tensors:
    """The reference's gradients over the whole pool."""
    found = attention_gradients(problem, values.q, values.k, values.v, values.dout, values.dlse)
    dk, dv = found.in_pool(problem.cache.num_slots)
    return {"q": found.dq, "k": dk, "v": dv} | ({} if found.dsink is None else {"sink": found.dsink})


def assert_close(got: Tensors, want: Tensors, worst: dict[str, float], against: str) -> None:
    assert got.keys() == want.keys()
    for name in got:
        error = np.abs(got[name] - want[name]).max(initial=0.0) / max(1.0, np.abs(want[name]).max(initial=0.0))
        worst[f"d{name} against {against}"] = max(float(error), worst.get(f"d{name} against {against}", 0.0))
        assert error < BOUND, name


@dataclass(frozen=True)
class ExactLoss:
    """Σ dout · out + Σ dlse · lse of one problem in mpmath, as a function of q, k, v and the sink logits."""

    problem: AttentionProblem
    dout: FloatArray
    dlse: FloatArray

    def __post_init__(self) -> None:
        edges = effective_sets(self.problem)
        rows = [(w, h, *edges.of(w.row, h)) for w in self.problem.rows() for h in range(self.problem.num_qo_heads)]
        object.__setattr__(self, "rows", [r for r in rows if len(r[2]) or self.problem.sink_logits is not None])

    def __call__(self, tensors: dict[str, Exact]) -> mpmath.mpf:
        loss = mpmath.mpf(0)
        for where, h, positions, slots in self.rows:  # type: ignore[attr-defined]
            kv_head = h * self.problem.num_kv_heads // self.problem.num_qo_heads
            q, k, v = tensors["q"][where.row, h], tensors["k"][slots, kv_head], tensors["v"][slots, kv_head]
            terms = [
                mpmath.exp(self.score(h, int(j) - where.q_idx, mpmath.fdot(q, key)))
                for j, key in zip(positions, k, strict=True)
            ]
            total = mpmath.fsum(terms) + (mpmath.exp(tensors["sink"][h]) if "sink" in tensors else 0)
            loss += mpmath.log(total) * float(self.dlse[where.row, h])
            for c, weight in enumerate(self.dout[where.row, h].tolist()):
                loss += weight * mpmath.fdot(terms, v[:, c]) / total
        return loss

    def score(self, h: int, distance: int, dot: mpmath.mpf) -> mpmath.mpf:
        score = mpmath.mpf(self.problem.sm_scale) * dot
        for rule in self.problem.score_rules:
            if isinstance(rule, Alibi):
                score = score + mpmath.mpf(rule.slopes[h]) * distance
            else:
                score = rule.cap * mpmath.tanh(score / rule.cap)
        return score


def central_differences(loss: ExactLoss, tensors: dict[str, Exact], touched: set[int]) -> Tensors:
    """The derivative of a loss with respect to every number that can move it; slots nobody attends are left at 0."""
    step = mpmath.mpf(10) ** -STEP_DIGITS
    found = {name: np.zeros(x.shape) for name, x in tensors.items()}
    for name, tensor in tensors.items():
        for at in np.ndindex(*tensor.shape):
            if name in ("k", "v") and at[0] not in touched:
                continue
            middle, ends = tensor[at], []
            for moved in (middle + step, middle - step):
                tensor[at] = moved
                ends.append(loss(tensors))
            tensor[at] = middle
            found[name][at] = float((ends[0] - ends[1]) / (2 * step))
    return found


def exact(array: FloatArray) -> Exact:
    return np.asarray(np.vectorize(lambda x: mpmath.mpf(float(x)), otypes=[object])(array), dtype=object)


FEATURES = {
    "aliased",
    "shared_prefix",
    "Alibi",
    "SoftCap",
    "Alibi_SoftCap",
    "SoftCap_Alibi",
    "logits",
    "token",
    "block",
}


def features(case: Case) -> set[str]:
    """What of FEATURES a drawn case has: a run that never meets one would prove nothing about it."""
    return FEATURES & set(case.axes.values())


def test_gradients_are_central_differences_of_the_exact_loss(worst: dict[str, float]) -> None:
    met: set[str] = set()

    @settings(max_examples=profiles.examples(240))
    @given(case=cases(TINY, operations=("backward",), values=KINDS))
    def check(case: Case) -> None:
        problem = build_problem(case.structure)
        values = build_values(case, problem)
        with mpmath.workdps(DIGITS):
            tensors = {"q": exact(values.q), "k": exact(values.k), "v": exact(values.v)}
            if problem.sink_logits is not None:
                tensors["sink"] = exact(problem.sink_logits)
            loss = ExactLoss(problem, values.dout, values.dlse)
            want = central_differences(loss, tensors, set(effective_sets(problem).slots.tolist()))
        assert_close(gradients_of(problem, values), want, worst, "central differences")
        met.update(features(case))

    check()
    assert met == FEATURES


def torch_score(rules: tuple[ScoreRule, ...], scores: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Scores (num_qo_heads, seqlen_q, seqlen_kv) after the rules."""
    for rule in rules:
        if isinstance(rule, Alibi):
            scores = scores + torch.tensor(rule.slopes, dtype=torch.float64)[:, None, None] * distance
        else:
            assert isinstance(rule, SoftCap)
            scores = rule.cap * torch.tanh(scores / rule.cap)
    return scores


def torch_request(
    problem: AttentionProblem, n: int, mask: torch.Tensor, leaves: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out and lse of the rows of one request that see something, and which of (seqlen_q, num_qo_heads) those are."""
    rows, t = slice(int(problem.qo_indptr[n]), int(problem.qo_indptr[n + 1])), torch.arange(int(problem.seqlen_kv[n]))
    size, table = problem.cache.page_size, torch.from_numpy(problem.cache.page_table[n])
    slots = table[t // size] * size + t % size if len(t) else t
    group = problem.num_qo_heads // problem.num_kv_heads
    k, v = (leaves[name][slots].repeat_interleave(group, dim=1) for name in ("k", "v"))
    q_idx = int(problem.q_offset[n]) + torch.arange(mask.shape[1])
    scores = problem.sm_scale * torch.einsum("rhd,thd->hrt", leaves["q"][rows], k)
    scores = torch_score(problem.score_rules, scores, t[None, :] - q_idx[:, None])
    scores = scores.masked_fill(~mask, -torch.inf)
    if "sink" in leaves:
        scores = torch.cat([scores, leaves["sink"][:, None, None].expand(-1, mask.shape[1], 1)], dim=2)
    seen = (scores > -torch.inf).any(dim=2)
    lse = torch.logsumexp(scores[seen], dim=1)
    p = torch.exp(scores[seen] - lse[:, None])[:, : len(t)]
    v_of_row = v.transpose(0, 1)[:, None].expand(-1, mask.shape[1], -1, -1)[seen]
    return torch.einsum("nt,ntd->nd", p, v_of_row), lse, seen


def autograd(problem: AttentionProblem, values: Values) -> tuple[Tensors, Tensors]:
    """Forward results and gradients by torch in float64."""
    leaves = {name: torch.from_numpy(getattr(values, name).copy()).requires_grad_() for name in ("q", "k", "v")}
    if problem.sink_logits is not None:
        leaves["sink"] = torch.from_numpy(problem.sink_logits.copy()).requires_grad_()
    out = np.zeros(values.dout.shape)
    lse = np.full(values.dlse.shape, -np.inf)
    loss = sum((leaf.sum() * 0.0 for leaf in leaves.values()), torch.zeros((), dtype=torch.float64))
    for n, mask in enumerate(dense_masks(problem)):
        rows = slice(int(problem.qo_indptr[n]), int(problem.qo_indptr[n + 1]))
        got_out, got_lse, seen = torch_request(problem, n, torch.from_numpy(mask), leaves)
        by_head = [torch.from_numpy(x[rows]).transpose(0, 1)[seen] for x in (values.dout, values.dlse)]
        loss = loss + (by_head[0] * got_out).sum() + (by_head[1] * got_lse).sum()
        out[rows].swapaxes(0, 1)[seen.numpy()] = got_out.detach().numpy()
        lse[rows].swapaxes(0, 1)[seen.numpy()] = got_lse.detach().numpy()
    loss.backward()  # type: ignore[no-untyped-call]
    return {"out": out, "lse": lse}, {name: leaf.grad.numpy() for name, leaf in leaves.items() if leaf.grad is not None}


def test_gradients_are_those_of_autograd_on_a_dense_masked_formula(worst: dict[str, float]) -> None:
    met: set[str] = set()

    @settings(max_examples=profiles.examples(120))
    @given(case=cases(SMALL, operations=("backward",), values=KINDS))
    def check(case: Case) -> None:
        problem = build_problem(case.structure)
        values = build_values(case, problem)
        result, want = autograd(problem, values)
        got = attention(problem, values.q, values.k, values.v)
        np.testing.assert_allclose(got.out, result["out"], rtol=0, atol=1e-13)
        np.testing.assert_allclose(got.lse, result["lse"], rtol=0, atol=1e-13)
        assert_close(gradients_of(problem, values), want, worst, "autograd")
        met.update(features(case))

    check()
    assert met == FEATURES


SHARED = Structure(
    seqlens_q=(2, 2),
    seqlens_kv=(8, 7),
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim_qk=4,
    head_dim_vo=3,
    page_size=4,
    num_pages=5,
    page_table=((3, 1), (3, 0)),
    mask_rule=Causal(),
    score_rules=(Alibi((0.5, 0.25, 0.125, 0.0625)), SoftCap(1.5)),
    sm_scale=0.5,
    sink_logits=(0.0, 0.5, -0.5, 1.0),
)


def values_of(problem: AttentionProblem, seed: int) -> Values:
    rng = np.random.default_rng(seed)
    heads, rows, slots = problem.num_qo_heads, problem.total_q, problem.cache.num_slots
    return Values(
        q=rng.normal(size=(rows, heads, problem.head_dim_qk)),
        k=rng.normal(size=(slots, problem.num_kv_heads, problem.head_dim_qk)),
        v=rng.normal(size=(slots, problem.num_kv_heads, problem.head_dim_vo)),
        dout=rng.normal(size=(rows, heads, problem.head_dim_vo)),
        dlse=rng.normal(size=(rows, heads)),
    )


def with_table(problem: AttentionProblem, table: list[list[int]]) -> AttentionProblem:
    return replace(problem, cache=replace(problem.cache, page_table=np.array(table)))


@pytest.mark.parametrize(
    ("together", "apart"),
    [
        pytest.param([[3, 1], [3, 0]], [[3, 1], [2, 0]], id="one page of two requests"),
        pytest.param([[3, 3], [1, 0]], [[3, 2], [1, 0]], id="one page at two places of a request"),
    ],
)
def test_a_page_named_twice_takes_the_gradients_of_both_names(
    together: list[list[int]], apart: list[list[int]]
) -> None:
    problem = build_problem(SHARED)
    values = values_of(problem, 1)
    page = {name: getattr(values, name).reshape(5, 4, 2, -1) for name in ("k", "v")}
    for tensor in page.values():
        tensor[2] = tensor[3]  # page 2 holds a copy, so that both tables mean the same numbers
    both = gradients_of(with_table(problem, together), values)
    each = gradients_of(with_table(problem, apart), values)
    for name in ("k", "v"):
        parts = each[name].reshape(5, 4, 2, -1)
        np.testing.assert_allclose(both[name].reshape(5, 4, 2, -1)[3], parts[3] + parts[2], rtol=0, atol=1e-14)
        assert not both[name].reshape(5, 4, 2, -1)[2].any()
    for name in ("q", "sink"):
        np.testing.assert_allclose(both[name], each[name], rtol=0, atol=1e-14)


def with_lists(*lists: tuple[int, ...], **changes: object) -> AttentionProblem:
    fields = {"candidates": CandidateStructure(lists=lists, sharing="shared"), "sink_logits": None} | changes
    return build_problem(Structure(**{f: getattr(SHARED, f) for f in SHARED.__struct_fields__} | fields))


def test_an_empty_row_has_zero_gradient_and_leaves_its_neighbours_bit_unchanged() -> None:
    full, emptied = with_lists((7, 2), (1, 3), (0, 4), (5,)), with_lists((7, 2), (-1, -1), (0, 4), (5,))
    values = values_of(full, 2)
    want, got = gradients_of(full, values), gradients_of(emptied, values)
    assert not got["q"][1].any()
    np.testing.assert_array_equal(np.delete(got["q"], 1, axis=0), np.delete(want["q"], 1, axis=0))
    assert all(np.isfinite(x).all() for x in got.values())


def test_an_empty_row_with_a_sink_gives_dlse_to_the_sink_alone() -> None:
    problem = with_lists((-1,), (), (), (-1, -1), sink_logits=SHARED.sink_logits)
    values = values_of(problem, 3)
    found = attention_gradients(problem, values.q, values.k, values.v, values.dout, values.dlse)
    assert found.dsink is not None
    np.testing.assert_allclose(found.dsink, values.dlse.sum(axis=0), rtol=0, atol=1e-15)
    assert found.slots.size == 0
    assert not found.dq.any()


def test_slots_that_no_row_attends_are_not_kept_and_are_exactly_zero_in_the_pool() -> None:
    problem = with_lists((7, 2), (1, 3), (0, 4), (5,))
    values = values_of(problem, 4)
    found = attention_gradients(problem, values.q, values.k, values.v, values.dout)
    attended = sorted(set(effective_sets(problem).slots.tolist()))
    assert found.slots.tolist() == attended
    for pool in found.in_pool(problem.cache.num_slots):
        assert not np.delete(pool, attended, axis=0).any()


def test_numbers_in_unattended_slots_never_reach_a_gradient() -> None:
    problem = with_lists((7, 2), (1, 3), (0, 4), (5,))
    values = values_of(problem, 5)
    want = gradients_of(problem, values)
    unattended = sorted(set(range(problem.cache.num_slots)) - set(effective_sets(problem).slots.tolist()))
    values.k[unattended] = np.nan
    values.v[unattended] = np.inf
    for name, got in gradients_of(problem, values).items():
        np.testing.assert_array_equal(got, want[name])


def test_a_gradient_of_lse_alone_is_the_probabilities_and_sums_to_the_rows_that_see_something() -> None:
    problem = replace(with_lists((7, 2), (1, 3), (0, 4), (5,)), score_rules=())
    values = values_of(problem, 6)
    zero = np.zeros_like(values.dout)
    ones = np.zeros_like(values.q)
    ones[..., 0] = 1.0  # every score's slope in q is k, so dlse in k along q is the sum of probabilities
    values = replace(values, q=ones)
    dk = attention_gradients(problem, values.q, values.k, values.v, zero, np.ones_like(values.dlse)).dk
    total = dk[..., 0].sum() / problem.sm_scale
    counts = effective_sets(problem).counts()
    np.testing.assert_allclose(total, (counts > 0).sum(), rtol=1e-14)
