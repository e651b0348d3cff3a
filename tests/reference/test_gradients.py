"""Gradients against central differences in mpmath, and against torch.autograd of a dense masked formula."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
import torch
from feature_structures import ALL, featured_cases, features_of, with_features
from hypothesis import given, settings
from plain_attention import dequantized, ranked, slot_of, weight_of

from attnconform.conformance.cases import profiles
from attnconform.conformance.cases.sample_rules import REACH
from attnconform.conformance.cases.strategies import pages_of, structures
from attnconform.conformance.cases.structure import (
    CandidateStructure,
    Case,
    Structure,
    ValueKind,
    build_problem,
)
from attnconform.conformance.cases.values import Values, build_values
from attnconform.reference.attention import attention, attention_gradients, effective_sets
from attnconform.reference.coordinates import BoolArray, FloatArray
from attnconform.reference.epilogue import Activation, Cast, Gate, epilogue_step
from attnconform.reference.exact import exact_turn
from attnconform.reference.formats import dense_masks
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rope import Rope
from attnconform.reference.rules import Alibi, Causal, CustomScore, RelativeBias, ScoreRule, SoftCap

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
SMALL = structures(max_tokens=36, max_requests=3, head_dims=((16, 8), (8, 16)), page_sizes=(1, 8, 16))


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
    rules = {leaf_name(i, rule): found.dscore[i] for i, rule in enumerate(problem.score_rules) if has_numbers(rule)}
    return {"q": found.dq, "k": dk, "v": dv} | rules | ({} if found.dsink is None else {"sink": found.dsink})


def leaves_of(problem: AttentionProblem, values: Values) -> Tensors:
    """Everything that has a gradient; of a quantized cache, the dequantized numbers."""
    size = problem.cache.page_size
    found = {
        "q": values.q,
        "k": dequantized(values.k, problem.k_quant, size),
        "v": dequantized(values.v, problem.v_quant, size),
    }
    for i, rule in enumerate(problem.score_rules):
        if has_numbers(rule):
            found[leaf_name(i, rule)] = np.array(parameters(rule), dtype=np.float64)
    return found | ({} if problem.sink_logits is None else {"sink": problem.sink_logits})


def has_numbers(rule: ScoreRule) -> bool:
    """Whether a rule has a gradient of its own."""
    return not isinstance(rule, CustomScore)


def leaf_name(i: int, rule: ScoreRule) -> str:
    """The name of a rule's numbers among everything that has a gradient."""
    return f"{type(rule).__name__} {i}"


def parameters(rule: ScoreRule) -> object:
    """A rule's numbers, in the shape of their gradient."""
    assert not isinstance(rule, CustomScore)
    return rule.slopes if isinstance(rule, Alibi) else rule.cap if isinstance(rule, SoftCap) else rule.tables


def before_steps(problem: AttentionProblem, values: Values) -> list[FloatArray]:
    """What enters each step of the epilogue: it decides on which side of a kink a gradient is taken."""
    out = attention(problem, values.q, values.k, values.v).before_epilogue
    found = []
    for step in problem.epilogue:
        found.append(out)
        out = np.stack([epilogue_step(step, out[:, h], h) for h in range(problem.num_qo_heads)], axis=1)
    return found


def assert_close(got: Tensors, want: Tensors, worst: dict[str, float], against: str) -> None:
    assert got.keys() == want.keys()
    for name in got:
        error = np.abs(got[name] - want[name]).max(initial=0.0) / max(1.0, np.abs(want[name]).max(initial=0.0))
        seen = f"d{name.split()[0]} against {against}"
        worst[seen] = max(float(error), worst.get(seen, 0.0))
        assert error < BOUND, name


def weight(case: Case, where: QueryRow, h: int, j: int) -> float:
    return weight_of(case.structure.dropout, where.request, h, where.q_idx, j)


@dataclass(frozen=True)
class ExactLoss:
    """Σ dout · out + Σ dlse · lse of one case in mpmath, as a function of everything that has a gradient."""

    case: Case
    problem: AttentionProblem
    values: Values

    def __post_init__(self) -> None:
        edges = effective_sets(self.problem)
        rows = [(w, h, *edges.of(w.row, h)) for w in self.problem.rows() for h in range(self.problem.num_qo_heads)]
        object.__setattr__(self, "rows", [r for r in rows if len(r[2]) or self.problem.sink_logits is not None])
        object.__setattr__(self, "before", before_steps(self.problem, self.values))

    def __call__(self, tensors: dict[str, Exact]) -> mpmath.mpf:
        loss = mpmath.mpf(0)
        for where, h, positions, slots in self.rows:  # type: ignore[attr-defined]
            kv_head = h * self.problem.num_kv_heads // self.problem.num_qo_heads
            v, keys = tensors["v"][slots, kv_head], tensors["k"][slots, kv_head]
            terms = self.terms(tensors, where, h, positions.tolist(), keys)
            total = mpmath.fsum(terms) + (mpmath.exp(tensors["sink"][h]) if "sink" in tensors else 0)
            loss += mpmath.log(total) * float(self.values.dlse[where.row, h])
            kept = [t * weight(self.case, where, h, int(j)) for t, j in zip(terms, positions, strict=True)]
            for c, dout in enumerate(self.values.dout[where.row, h].tolist()):
                loss += dout * self.epilogue(mpmath.fdot(kept, v[:, c]) / total, where.row, h, c)
        return loss

    def terms(
        self, tensors: dict[str, Exact], where: QueryRow, h: int, positions: list[int], keys: Exact
    ) -> list[mpmath.mpf]:
        query = exact_turn(list(tensors["q"][where.row, h]), where.q_idx, self.problem.rope)
        found = []
        for j, key in zip(positions, keys, strict=True):
            dot = mpmath.fdot(query, exact_turn(list(key), j, self.problem.rope))
            rank = ranked(self.case.structure, where.request, where.local, h, j)
            found.append(mpmath.exp(self.score(tensors, h, j - where.q_idx, dot) + rank))
        return found

    def score(self, tensors: dict[str, Exact], h: int, distance: int, dot: mpmath.mpf) -> mpmath.mpf:
        score = mpmath.mpf(self.problem.sm_scale) * dot
        for i, rule in enumerate(self.problem.score_rules):
            numbers = tensors.get(leaf_name(i, rule), np.empty(0, dtype=object))
            match rule:
                case Alibi():
                    score = score + numbers[h] * distance
                case RelativeBias(tables):
                    reach = len(tables[h]) // 2
                    score = score + numbers[h, reach + min(max(distance, -reach), reach)]
                case SoftCap():
                    score = numbers[()] * mpmath.tanh(score / numbers[()])
                case CustomScore():
                    score = score * REACH / (REACH + abs(distance))
        return score

    def epilogue(self, x: mpmath.mpf, row: int, h: int, c: int) -> mpmath.mpf:
        for step, before in zip(self.problem.epilogue, self.before, strict=True):  # type: ignore[attr-defined]
            at = before[row, h, c]
            match step:
                case Activation("relu"):
                    x = x if at > 0 else mpmath.mpf(0)
                case Activation():
                    x = x / (1 + mpmath.exp(-x))
                case Gate(logits):
                    x = x / (1 + mpmath.exp(-mpmath.mpf(logits[h])))
                case Cast():
                    x = x + float(epilogue_step(step, at, h) - at)  # a cast moves a number and no gradient
        return x


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


MET = ALL | {"aliased", "shared_prefix", "token", "block", "Alibi before SoftCap", "SoftCap before Alibi"}


def features(case: Case) -> set[str]:
    """What of MET a drawn case has: a run that never meets one would prove nothing about it."""
    found, lists = features_of(case.structure), case.structure.candidates
    found |= {pages_of(case.structure.page_table)} | ({lists.granularity} if lists is not None else set())
    names = [type(rule).__name__ for rule in case.structure.score_rules]
    if {"Alibi", "SoftCap"} <= set(names):
        slope, cap = names.index("Alibi"), names.index("SoftCap")
        found.add("Alibi before SoftCap" if slope < cap else "SoftCap before Alibi")
    return found & MET


def test_gradients_are_central_differences_of_the_exact_loss(worst: dict[str, float]) -> None:
    met: set[str] = set()

    @settings(max_examples=profiles.examples(150))
    @given(case=featured_cases(with_features(TINY), values=KINDS))
    def check(case: Case) -> None:
        problem = build_problem(case.structure)
        values = build_values(case, problem)
        with mpmath.workdps(DIGITS):
            tensors = {name: exact(x) for name, x in leaves_of(problem, values).items()}
            loss = ExactLoss(case, problem, values)
            want = central_differences(loss, tensors, set(effective_sets(problem).slots.tolist()))
        assert_close(gradients_of(problem, values), want, worst, "central differences")
        met.update(features(case))

    check()
    assert met == MET


def torch_turn(x: torch.Tensor, positions: torch.Tensor, rope: Rope | None) -> torch.Tensor:
    """Vectors (..., n, head_dim) turned as complex numbers, one angle for each of n positions."""
    if rope is None or rope.k_position == "encoded":
        return x
    half = rope.rotary_dim // 2
    pair = torch.arange(half)
    a, b = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + half)
    angle = positions.to(torch.float64)[:, None] * rope.theta ** (-2.0 * pair.to(torch.float64) / rope.rotary_dim)
    z = torch.complex(x[..., a], x[..., b]) * torch.polar(torch.ones_like(angle), angle)
    turned = x.clone()
    turned[..., a], turned[..., b] = z.real, z.imag
    return turned


def torch_score(
    rules: tuple[ScoreRule, ...], scores: torch.Tensor, distance: torch.Tensor, leaves: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Scores (num_qo_heads, seqlen_q, seqlen_kv) after the rules."""
    for i, rule in enumerate(rules):
        name = leaf_name(i, rule)
        match rule:
            case Alibi():
                scores = scores + leaves[name][:, None, None] * distance
            case RelativeBias(tables):
                reach = len(tables[0]) // 2
                scores = scores + leaves[name][:, distance.clamp(-reach, reach) + reach]
            case SoftCap():
                scores = leaves[name] * torch.tanh(scores / leaves[name])
            case CustomScore():
                scores = scores * REACH / (REACH + distance.abs())
    return scores


def torch_epilogue(problem: AttentionProblem, before: list[FloatArray], out: torch.Tensor, rows: slice) -> torch.Tensor:
    """Outputs (rows, num_qo_heads, head_dim_vo) after every step."""
    for step, entering in zip(problem.epilogue, before, strict=True):
        at = torch.from_numpy(entering[rows])
        match step:
            case Activation("relu"):
                out = out * (at > 0)
            case Activation():
                out = torch.nn.functional.silu(out)
            case Gate(logits):
                out = out * torch.sigmoid(torch.tensor(logits, dtype=torch.float64))[:, None]
            case Cast():
                out = out + (torch.from_numpy(epilogue_step(step, entering[rows], 0)) - at)
    return out


def edge_numbers(case: Case, problem: AttentionProblem, n: int, mask: BoolArray) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout's weight and the rank's bias of every edge of one request, (num_qo_heads, seqlen_q, seqlen_kv)."""
    weights, bias = np.ones(mask.shape), np.zeros(mask.shape)
    for h, r, j in np.argwhere(mask).tolist():
        weights[h, r, j] = weight_of(problem.dropout, n, h, int(problem.q_offset[n]) + r, j)
        bias[h, r, j] = ranked(case.structure, n, r, h, j)
    return torch.from_numpy(weights), torch.from_numpy(bias)


def torch_request(
    case: Case, problem: AttentionProblem, n: int, mask: BoolArray, leaves: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out and lse of the rows of one request that see something, and which of (seqlen_q, num_qo_heads) those are."""
    rows, t = slice(int(problem.qo_indptr[n]), int(problem.qo_indptr[n + 1])), torch.arange(int(problem.seqlen_kv[n]))
    heads = range(problem.num_qo_heads)
    kv_heads = [h * problem.num_kv_heads // problem.num_qo_heads for h in heads]
    slots = [
        torch.tensor([slot_of(case.structure, n, j, g) for j in range(len(t))], dtype=torch.int64) for g in kv_heads
    ]
    k, v = (torch.stack([leaves[x][slots[h], kv_heads[h]] for h in heads]) for x in ("k", "v"))
    q_idx = int(problem.q_offset[n]) + torch.arange(mask.shape[1])
    queries = torch_turn(leaves["q"][rows].transpose(0, 1), q_idx, problem.rope)
    scores = problem.sm_scale * torch.einsum("hrd,htd->hrt", queries, torch_turn(k, t, problem.rope))
    weights, bias = edge_numbers(case, problem, n, mask)
    scores = torch_score(problem.score_rules, scores, t[None, :] - q_idx[:, None], leaves) + bias
    scores = scores.masked_fill(~torch.from_numpy(mask), -torch.inf)
    if "sink" in leaves:
        scores = torch.cat([scores, leaves["sink"][:, None, None].expand(-1, mask.shape[1], 1)], dim=2)
    seen = (scores > -torch.inf).any(dim=2)
    lse = torch.logsumexp(scores[seen], dim=1)
    p = torch.exp(scores[seen] - lse[:, None])[:, : len(t)] * weights[seen]
    v_of_row = v[:, None].expand(-1, mask.shape[1], -1, -1)[seen]
    return torch.einsum("nt,ntd->nd", p, v_of_row), lse, seen


def autograd(case: Case, problem: AttentionProblem, values: Values) -> tuple[Tensors, Tensors]:
    """Forward results and gradients by torch in float64."""
    leaves = {name: torch.from_numpy(x.copy()).requires_grad_() for name, x in leaves_of(problem, values).items()}
    before = before_steps(problem, values)
    out = np.zeros(values.dout.shape)
    lse = np.full(values.dlse.shape, -np.inf)
    loss = sum((leaf.sum() * 0.0 for leaf in leaves.values()), torch.zeros((), dtype=torch.float64))
    for n, mask in enumerate(dense_masks(problem)):
        rows = slice(int(problem.qo_indptr[n]), int(problem.qo_indptr[n + 1]))
        got_out, got_lse, seen = torch_request(case, problem, n, mask, leaves)
        by_head = torch.zeros((*seen.shape, problem.head_dim_vo), dtype=torch.float64)
        ended = torch_epilogue(problem, before, by_head.index_put((seen,), got_out).transpose(0, 1), rows)
        loss = loss + (torch.from_numpy(values.dout[rows]) * ended).sum()
        loss = loss + (torch.from_numpy(values.dlse[rows]).transpose(0, 1)[seen] * got_lse).sum()
        out[rows] = ended.detach().numpy()
        lse[rows].swapaxes(0, 1)[seen.numpy()] = got_lse.detach().numpy()
    loss.backward()
    return {"out": out, "lse": lse}, {name: leaf.grad.numpy() for name, leaf in leaves.items() if leaf.grad is not None}


def test_gradients_are_those_of_autograd_on_a_dense_masked_formula(worst: dict[str, float]) -> None:
    met: set[str] = set()

    @settings(max_examples=profiles.examples(120))
    @given(case=featured_cases(with_features(SMALL), values=KINDS))
    def check(case: Case) -> None:
        problem = build_problem(case.structure)
        values = build_values(case, problem)
        result, want = autograd(case, problem, values)
        got = attention(problem, values.q, values.k, values.v)
        np.testing.assert_allclose(got.out, result["out"], rtol=0, atol=1e-13)
        np.testing.assert_allclose(got.lse, result["lse"], rtol=0, atol=1e-13)
        assert_close(gradients_of(problem, values), want, worst, "autograd")
        met.update(features(case))

    check()
    assert met == MET


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
