"""The backward kernels against float64 formulas over edges enumerated one by one, interpreted or on a GPU."""

import math
import os
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

from attnconform.kernels.sparse_attention import (
    BackwardHints,
    CandidateLists,
    Dropout,
    Gradients,
    KVQuantization,
    Plan,
    PlanError,
    backward,
    plan,
    plan_backward,
    run,
    sparse_attention,
)
from attnconform.kernels.sparse_attention.backward import prepare_rows
from attnconform.kernels.sparse_attention.backward_hints import MODES, KeyShape, QueryShape
from attnconform.kernels.sparse_attention.backward_plan import BackwardPlan, allocate_buffers
from attnconform.kernels.sparse_attention.backward_query import RowInputs
from attnconform.kernels.sparse_attention.backward_scores import compute_score_gradients
from attnconform.kernels.sparse_attention.backward_transpose import ABSENT, list_entries, tile_slots
from attnconform.kernels.sparse_attention.rules import (
    Alibi,
    And,
    Causal,
    Custom,
    Document,
    HeadWindow,
    MaskRule,
    Or,
    RelativeBias,
    ScoreRule,
    SoftCap,
    Window,
)
from attnconform.reference.philox import philox4x32

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Relative to the sum of absolute terms: three roundings to storage (dS or P, out, the result), and float32 chains,
# which the size of the exponent multiplies.
STORAGE = {torch.float32: 0.0, torch.float16: 3.1 * 2.0**-11, torch.bfloat16: 3.1 * 2.0**-8}
CHAIN = 2.0**-19


@triton.jit
def refuse_thirds(q_idx, kv_idx, request, data_ptr):
    return (q_idx + 2 * kv_idx + request) % 3 != 0


@triton.jit
def look_up(q_idx, kv_idx, request, data_ptr):
    return tl.load(data_ptr + kv_idx) != 0


@dataclass(frozen=True)
class Case:
    """Structure of one call; `lists[k]` is what list k names, in plan order, and None means every position."""

    seqlen_q: tuple[int, ...] = (2, 0, 4, 1)
    seqlen_kv: tuple[int, ...] = (13, 9, 35, 0)
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim_qk: int = 24
    head_dim_vo: int = 16
    page_size: int = 4
    layout: str = "NHD"
    dtype: torch.dtype = torch.float32
    lists: tuple[tuple[int, ...], ...] | None = None
    sharing: str = "kv_head"
    q_block_size: int = 1
    block_size: int = 1
    window: int | None = None
    num_sink_tokens: int = 0
    mask_rule: MaskRule | None = None
    score_rules: tuple[ScoreRule, ...] = ()
    sink_logits: tuple[float, ...] | None = None
    num_kv_splits: int | None = None
    page_table: tuple[tuple[int, ...], ...] | None = None
    scale_q: float = 1.0
    dropout: Dropout | None = None
    seed: int = 0

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def qo_indptr(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.seqlen_q)]).astype(np.int64)

    @property
    def num_pages(self) -> int:
        return 2 + sum(-(-length // self.page_size) for length in self.seqlen_kv)

    def pages(self) -> np.ndarray:
        """Random pages, or those given; two pages of the pool belong to nobody."""
        longest = max(self.seqlen_kv, default=0)
        table = np.full((len(self.seqlen_kv), 1 + -(-longest // self.page_size)), -1, dtype=np.int32)
        free = np.random.default_rng(self.seed + 1).permutation(self.num_pages).tolist()
        for n, length in enumerate(self.seqlen_kv):
            used = -(-length // self.page_size)
            table[n, :used] = self.page_table[n] if self.page_table else [free.pop() for _ in range(used)]
        return table

    def edges(self) -> list[tuple[int, int, int, int, np.ndarray]]:
        """(request, global row, query position, query head, E), by the contract's words."""
        first_block = np.concatenate([[0], np.cumsum([-(-n // self.q_block_size) for n in self.seqlen_q])])
        found = []
        for n, (rows, length) in enumerate(zip(self.seqlen_q, self.seqlen_kv, strict=True)):
            for r in range(rows):
                i = length - rows + r
                for h in range(self.num_qo_heads):
                    block = int(first_block[n]) + r // self.q_block_size
                    chosen = self._chosen(block, h, i, length)
                    kept = [j for j in sorted(chosen) if allows(self.mask_rule, n, i, j, h)]
                    found.append((n, int(self.qo_indptr[n]) + r, i, h, np.array(kept, dtype=np.int64)))
        return found

    def _chosen(self, block: int, h: int, i: int, length: int) -> set[int]:
        if self.lists is None:
            return set(range(length))
        per_block, head = {
            "query_head": (self.num_qo_heads, h),
            "kv_head": (self.num_kv_heads, h // self.group_size),
            "shared": (1, 0),
        }[self.sharing]
        named = self.lists[block * per_block + head]
        listed = {t * self.block_size + b for t in named if t != -1 for b in range(self.block_size)}
        window = {j for j in range(length) if 0 <= i - j < (self.window or 0)}
        return {j for j in listed if j < length} | window | set(range(min(length, self.num_sink_tokens)))


def draw_lists(case: Case) -> Case:
    """Random lists with holes and duplicates in any order; about one in five is empty."""
    rng = np.random.default_rng(case.seed + 2)
    per_block = {"query_head": case.num_qo_heads, "kv_head": case.num_kv_heads, "shared": 1}[case.sharing]
    lists = []
    for rows, length in zip(case.seqlen_q, case.seqlen_kv, strict=True):
        num_ids = -(-length // case.block_size)
        for _ in range(-(-rows // case.q_block_size) * per_block):
            count = 0 if num_ids == 0 or rng.random() < 0.2 else int(rng.integers(1, 2 + num_ids // 2))
            drawn = rng.integers(0, max(1, num_ids), count)
            lists.append(tuple(rng.permutation(np.concatenate([drawn, drawn[:2], np.full(count // 2, -1)])).tolist()))
    return replace(case, lists=tuple(tuple(int(t) for t in row) for row in lists))


def allows(rule: MaskRule | None, n: int, i: int, j: int, h: int) -> bool:
    match rule:
        case HeadWindow(left, right):
            return allows(Window(left[h], right[h]), n, i, j, h)
        case None:
            return True
        case Causal():
            return j <= i
        case Window(left, right):
            return (left is None or i - j <= left) and (right is None or j - i <= right)
        case Document(starts):
            return sum(s <= i for s in starts[n]) == sum(s <= j for s in starts[n])
        case And(rules):
            return all(allows(part, n, i, j, h) for part in rules)
        case Or(rules):
            return any(allows(part, n, i, j, h) for part in rules)
        case Custom(data=None):
            return (i + 2 * j + n) % 3 != 0
        case Custom(data=data):
            return bool(data[j])
    raise AssertionError(rule)


class Numbers(NamedTuple):
    """Float64; k and v are (slots, num_kv_heads, head_dim) whatever the layout."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray


class Expected(NamedTuple):
    """Gradients, and how far from each element a kernel may be: a share of the absolute values of its terms."""

    out: np.ndarray
    lse: np.ndarray
    gradients: dict[str, np.ndarray]
    bounds: dict[str, np.ndarray]


def draw_numbers(case: Case) -> Numbers:
    """Numbers that the storage dtype holds exactly."""
    rng = np.random.default_rng(case.seed)
    total_q, slots = int(case.qo_indptr[-1]), case.num_pages * case.page_size

    def draw(*shape: int) -> np.ndarray:
        return torch.from_numpy(rng.standard_normal(shape)).to(case.dtype).double().numpy()

    return Numbers(
        draw(total_q, case.num_qo_heads, case.head_dim_qk) * case.scale_q,
        draw(slots, case.num_kv_heads, case.head_dim_qk),
        draw(slots, case.num_kv_heads, case.head_dim_vo),
        draw(total_q, case.num_qo_heads, case.head_dim_vo),
        rng.standard_normal((total_q, case.num_qo_heads)).astype(np.float32).astype(np.float64),
    )


def expected(case: Case, numbers: Numbers) -> Expected:
    """out, lse and every gradient, one row and head at a time."""
    q, k, v, dout, dlse = numbers
    pages, scale = case.pages(), case.head_dim_qk**-0.5
    out, lse = np.zeros(dout.shape), np.full(dlse.shape, -np.inf)
    grads = {"dq": np.zeros(q.shape), "dk": np.zeros(k.shape), "dv": np.zeros(v.shape), "dsink": np.zeros(q.shape[1])}
    grads |= {f"dscore{r}": np.zeros(shape) for r, shape in enumerate(map(parameter_shape, case.score_rules))}
    bounds = {name: np.zeros(grad.shape) for name, grad in grads.items()}
    for n, row, i, h, keys in case.edges():
        slots = pages[n, keys // case.page_size].astype(np.int64) * case.page_size + keys % case.page_size
        g = h // case.group_size
        s0 = scale * (k[slots, g] @ q[row, h])
        s, slope = apply_rules(case, s0, h, i, keys)
        kept = keep_weights(case, n, h, i, keys)
        terms = np.append(np.exp(s), [] if case.sink_logits is None else np.exp(case.sink_logits[h]))
        if terms.size == 0:
            continue
        lse[row, h] = np.log(terms.sum())
        p = np.exp(s - lse[row, h])
        out[row, h] = (p * kept) @ v[slots, g]
        delta = dout[row, h] @ out[row, h] - dlse[row, h]
        out_size = np.abs(dout[row, h]) @ np.abs(out[row, h])
        delta_size = out_size + abs(dlse[row, h])
        # tanh is accurate to about 2^-23 of the cap, whatever the score.
        caps = sum(rule.cap for rule in case.score_rules if isinstance(rule, SoftCap))
        share = STORAGE[case.dtype] + CHAIN * (1 + np.abs(s) + abs(lse[row, h])) + 2.0**-21 * caps
        ds_last = p * (kept * (v[slots, g] @ dout[row, h]) - delta)
        last_bound = share * p * (kept * (np.abs(v[slots, g]) @ np.abs(dout[row, h])) + delta_size)
        ds, ds_bound = ds_last * slope, last_bound * slope
        add_parameter_gradients(case, grads, s0, h, i, keys, ds_last, np.asarray)
        add_parameter_gradients(case, bounds, s0, h, i, keys, last_bound, np.abs)
        for into, weight, size in ((grads, ds, np.asarray), (bounds, ds_bound, np.abs)):
            into["dq"][row, h] += scale * weight @ size(k[slots, g])
            np.add.at(into["dk"], (slots, g), scale * weight[:, None] * size(q[row, h]))
        np.add.at(grads["dv"], (slots, g), (kept * p)[:, None] * dout[row, h])
        np.add.at(bounds["dv"], (slots, g), (share * kept * p)[:, None] * np.abs(dout[row, h]))
        if case.sink_logits is not None:
            p_sink = np.exp(case.sink_logits[h] - lse[row, h])
            grads["dsink"][h] -= p_sink * delta
            rounded_out = STORAGE[case.dtype] / 3 * out_size
            bounds["dsink"][h] += p_sink * (rounded_out + CHAIN * (1 + abs(lse[row, h])) * delta_size)
    return Expected(out, lse, grads, bounds)


def keep_weights(case: Case, n: int, h: int, i: int, keys: np.ndarray) -> np.ndarray:
    """What every edge of a row weighs under dropout."""
    if case.dropout is None:
        return np.ones(keys.size)
    counter = np.array([[n, h, i & 0xFFFFFFFF, j] for j in keys], dtype=np.uint32).reshape(-1, 4)
    word = philox4x32(counter, (case.dropout.seed & 0xFFFFFFFF, case.dropout.seed >> 32))[:, 0]
    return (word >= math.floor(case.dropout.rate * 2**32)) / (1 - case.dropout.rate)


def apply_rules(case: Case, s: np.ndarray, h: int, i: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores after all rules, and their derivative by the scores before."""
    slope = np.ones_like(s)
    for rule in case.score_rules:
        s, rule_slope = apply_rule(rule, s, h, i, keys)
        slope = slope * rule_slope
    return s, slope


def apply_rule(rule: ScoreRule, s: np.ndarray, h: int, i: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    match rule:
        case Alibi(slopes):
            return s + np.float64(np.float32(slopes[h])) * (keys - i), np.ones_like(s)
        case RelativeBias(tables):
            return s + np.float32(tables[h]).astype(np.float64)[entries_of(rule, i, keys)], np.ones_like(s)
        case SoftCap(cap):
            cap = np.float64(np.float32(cap))
            return cap * np.tanh(s / cap), 1 - np.tanh(s / cap) ** 2
    raise AssertionError(rule)


def entries_of(rule: RelativeBias, i: int, keys: np.ndarray) -> np.ndarray:
    """Which entry of a table every key's distance names."""
    reach = len(rule.tables[0]) // 2
    return np.clip(keys - i, -reach, reach) + reach


def parameter_shape(rule: ScoreRule) -> tuple[int, ...]:
    match rule:
        case Alibi(slopes):
            return (len(slopes),)
        case RelativeBias(tables):
            return (len(tables), len(tables[0]))
    return ()


def add_parameter_gradients(
    case: Case, into: dict[str, np.ndarray], s: np.ndarray, h: int, i: int, keys: np.ndarray, ds: np.ndarray, size
) -> None:
    """Adds one row's part of every rule's gradient, or of its bound, where ds is the last scores'."""
    before = []
    for rule in case.score_rules:
        before.append(s)
        s, _ = apply_rule(rule, s, h, i, keys)
    for r in reversed(range(len(case.score_rules))):
        rule, name = case.score_rules[r], f"dscore{r}"
        match rule:
            case Alibi():
                into[name][h] += ds @ size(keys - i)
            case RelativeBias():
                np.add.at(into[name][h], entries_of(rule, i, keys), ds)
            case SoftCap(cap):
                u = before[r] / np.float64(np.float32(cap))
                terms = (np.tanh(u), -u * (1 - np.tanh(u) ** 2))
                into[name] += ds @ (size(terms[0]) + size(terms[1]))
        ds = ds * apply_rule(rule, before[r], h, i, keys)[1]


def make_plan(case: Case) -> Plan:
    candidates = None
    if case.lists is not None:
        candidates = CandidateLists(
            granularity="token" if case.block_size == 1 else "block",
            sharing=case.sharing,
            indptr=torch.tensor(np.cumsum([0, *map(len, case.lists)]), device=DEVICE),
            indices=torch.tensor([t for row in case.lists for t in row], dtype=torch.int64, device=DEVICE),
            block_size=case.block_size,
            q_block_size=case.q_block_size,
        )
    sinks = None if case.sink_logits is None else torch.tensor(case.sink_logits, device=DEVICE)
    return plan(
        qo_indptr=case.qo_indptr.tolist(),
        seqlen_kv=list(case.seqlen_kv),
        page_table=torch.from_numpy(case.pages()).to(DEVICE),
        page_size=case.page_size,
        num_pages=case.num_pages,
        num_qo_heads=case.num_qo_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim_qk=case.head_dim_qk,
        head_dim_vo=case.head_dim_vo,
        sm_scale=case.head_dim_qk**-0.5,
        dtype=case.dtype,
        device=DEVICE,
        candidates=candidates,
        window=case.window,
        num_sink_tokens=case.num_sink_tokens,
        mask_rule=case.mask_rule,
        score_rules=case.score_rules,
        sink_logits=sinks,
        num_kv_splits=case.num_kv_splits,
        tile_kv=16,
        layout=case.layout,
        dropout=case.dropout,
    )


class Tensors(NamedTuple):
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor


def to_cache(case: Case, by_slot: np.ndarray) -> torch.Tensor:
    cache = torch.from_numpy(by_slot).reshape(case.num_pages, case.page_size, case.num_kv_heads, -1)
    cache = cache if case.layout == "NHD" else cache.transpose(1, 2)
    return cache.to(DEVICE, case.dtype).contiguous()


def to_slots(case: Case, cache: torch.Tensor) -> np.ndarray:
    cache = cache if case.layout == "NHD" else cache.transpose(1, 2)
    return cache.reshape(case.num_pages * case.page_size, case.num_kv_heads, -1).double().cpu().numpy()


def to_tensors(case: Case, numbers: Numbers) -> Tensors:
    return Tensors(
        torch.from_numpy(numbers.q).to(DEVICE, case.dtype),
        to_cache(case, numbers.k),
        to_cache(case, numbers.v),
        torch.from_numpy(numbers.dout).to(DEVICE, case.dtype),
        torch.from_numpy(numbers.dlse).to(DEVICE, torch.float32),
    )


def work_of(the_plan: Plan, mode: str) -> BackwardPlan:
    """With a threshold that some pages of these small cases reach."""
    return plan_backward(the_plan, BackwardHints(mode=mode, reuse_threshold=3))


def differentiate(
    case: Case, tensors: Tensors, *, the_plan: Plan | None = None, mode: str = "kv_centric", **options: object
) -> Gradients:
    """Forward, then backward."""
    the_plan = the_plan or make_plan(case)
    options = {"work": work_of(the_plan, mode), **options}
    q, k, v, dout, dlse = tensors
    out, lse = run(the_plan, q, k, v)
    return backward(the_plan, q, k, v, out, lse, dout, **{"dlse": dlse, **options})


def check_gradients(case: Case, numbers: Numbers, got: Gradients) -> None:
    """Each gradient alone, each element against its own scale; where there is no term, exactly 0."""
    want = expected(case, numbers)
    found = {"dq": got.dq.double().cpu().numpy(), "dk": to_slots(case, got.dk), "dv": to_slots(case, got.dv)}
    if got.dsink is not None:
        found["dsink"] = got.dsink.double().cpu().numpy()
    for r, gradient in enumerate(got.dscore or ()):
        assert gradient.dtype == torch.float32
        found[f"dscore{r}"] = gradient.double().cpu().numpy()
        assert found[f"dscore{r}"].shape == want.gradients[f"dscore{r}"].shape
    for name, value in found.items():
        excess = np.abs(value - want.gradients[name]) - want.bounds[name]
        assert np.all(excess <= 0), f"{name}: {np.argwhere(~(excess <= 0))[:5].tolist()} off by {np.nanmax(excess)}"


def check_case(case: Case, *hints: BackwardHints) -> None:
    """All gathered, and some of both, from one forward; everything added is some of both with nothing gathered."""
    numbers, the_plan = draw_numbers(case), make_plan(case)
    q, k, v, dout, dlse = to_tensors(case, numbers)
    out, lse = run(the_plan, q, k, v)
    for hint in hints or (BackwardHints(), BackwardHints(mode="hybrid", reuse_threshold=3)):
        work = plan_backward(the_plan, hint)
        got = backward(the_plan, q, k, v, out, lse, dout, dlse=dlse, work=work, score_gradients=True)
        assert len(got.dscore) == len(case.score_rules)
        check_gradients(case, numbers, got)


def relative_bias(reach: int) -> RelativeBias:
    tables = np.random.default_rng(reach).standard_normal((4, 2 * reach + 1))
    return RelativeBias(tuple(tuple(row) for row in tables.tolist()))


DROPOUT = Dropout(rate=0.3, seed=0x0123_4567_89AB_CDEF)
SPARSE = Case(q_block_size=4, window=3, num_sink_tokens=2, mask_rule=Causal(), sink_logits=(0.3, -1.0, 1.5, 0.0))


def test_the_oracle_agrees_with_central_differences() -> None:
    rules = (Alibi((0.1, 0.2, 0.3, 0.4)), SoftCap(2.0), relative_bias(2))
    case = draw_lists(replace(SPARSE, score_rules=rules, dropout=DROPOUT))
    numbers = draw_numbers(case)
    rng, step = np.random.default_rng(7), 1e-5

    def loss(numbers: Numbers, sinks: tuple[float, ...]) -> float:
        got = expected(replace(case, sink_logits=sinks), numbers)
        return float((got.out * numbers.dout).sum() + (got.lse * numbers.dlse).sum())

    want = expected(case, numbers).gradients
    for name, field in (("dq", "q"), ("dk", "k"), ("dv", "v")):
        direction = rng.standard_normal(want[name].shape)
        ends = [numbers._replace(**{field: getattr(numbers, field) + sign * step * direction}) for sign in (1, -1)]
        slope = (loss(ends[0], case.sink_logits) - loss(ends[1], case.sink_logits)) / (2 * step)
        assert slope == pytest.approx((want[name] * direction).sum(), rel=1e-7)
    for h in range(4):
        moved = [tuple(s + sign * step * (g == h) for g, s in enumerate(case.sink_logits)) for sign in (1, -1)]
        slope = (loss(numbers, moved[0]) - loss(numbers, moved[1])) / (2 * step)
        assert slope == pytest.approx(want["dsink"][h], rel=1e-6)


def test_the_oracle_of_rule_parameters_agrees_with_central_differences() -> None:
    """Steps of a power of two, which parameters near 1 hold in float32."""
    step = 2.0**-12
    rules = (Alibi((0.5, 0.25, 0.75, 1.0)), SoftCap(2.0), RelativeBias(((0.5, -1.0, 0.25),) * 4))
    case = draw_lists(replace(SPARSE, score_rules=rules, dropout=DROPOUT))
    numbers = draw_numbers(case)

    def loss(*changed: ScoreRule) -> float:
        got = expected(replace(case, score_rules=changed), numbers)
        return float((got.out * numbers.dout).sum() + (got.lse * numbers.dlse).sum())

    def tables(change: float) -> RelativeBias:
        return RelativeBias(((0.5, -1.0, 0.25), (0.5 + change, -1.0, 0.25), *rules[2].tables[2:]))

    want = expected(case, numbers).gradients
    alibi, cap, bias = rules
    for got, ends in (
        (want["dscore0"][2], [loss(Alibi((0.5, 0.25, 0.75 + e, 1.0)), cap, bias) for e in (step, -step)]),
        (want["dscore1"], [loss(alibi, SoftCap(2.0 + e), bias) for e in (step, -step)]),
        (want["dscore2"][1, 0], [loss(alibi, cap, tables(e)) for e in (step, -step)]),
    ):
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float(got), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tolerance_notices_one_missing_edge_in_every_gradient(dtype: torch.dtype) -> None:
    case = replace(SPARSE, dtype=dtype, q_block_size=1, sharing="query_head", lists=((3, 5, 7),) * 28)
    numbers = draw_numbers(case)
    short = replace(case, lists=((3, 5), *case.lists[1:]))
    want, without = expected(case, numbers), expected(short, numbers)
    for name, gradient in want.gradients.items():
        assert np.any(np.abs(gradient - without.gradients[name]) > 2 * want.bounds[name]), name


@pytest.mark.parametrize("q_block_size", [1, 4])
@pytest.mark.parametrize("sharing", ["query_head", "kv_head", "shared"])
def test_every_sharing_with_window_sinks_holes_and_duplicates(sharing: str, q_block_size: int) -> None:
    layout = "HND" if q_block_size == 4 else "NHD"
    check_case(draw_lists(replace(SPARSE, sharing=sharing, q_block_size=q_block_size, layout=layout)))


def test_listed_blocks_give_gradients_to_their_committed_tokens() -> None:
    check_case(draw_lists(Case(block_size=8, q_block_size=2, page_size=8, sharing="query_head", seed=3)))


RULES: dict[str, tuple[MaskRule | None, tuple[ScoreRule, ...]]] = {
    "causal_window": (And((Causal(), Window(left=5))), ()),
    "window_without_bound": (Window(left=4, right=2), ()),
    "document": (And((Causal(), Document(((0, 8, 12), (0,), (0, 30, 33), (0,))))), ()),
    "two_intervals": (And((Causal(), Or((Window(left=3, right=0), Document(((0, 2), (0,), (0, 6), (0,))))))), ()),
    "custom": (And((Causal(), Custom(refuse_thirds))), ()),
    "custom_data": (Custom(look_up, (torch.arange(35, device=DEVICE) % 4).int()), ()),
    "alibi": (Causal(), (Alibi((0.5, 0.25, 0.125, -0.3)),)),
    "softcap": (None, (SoftCap(1.5),)),
    "alibi_then_softcap": (Causal(), (Alibi((0.5, 0.25, 0.125, -0.3)), SoftCap(2.0))),
    "softcap_then_alibi": (Causal(), (SoftCap(2.0), Alibi((0.5, 0.25, 0.125, -0.3)))),
    "softcap_twice": (None, (SoftCap(3.0), SoftCap(1.0))),
    "wide_softcap": (None, (SoftCap(200.0),)),
    "relative": (None, (relative_bias(4),)),
    "relative_of_one_entry": (Causal(), (relative_bias(0),)),
    "relative_past_all_positions": (Causal(), (relative_bias(60),)),
    "every_rule": (Causal(), (relative_bias(3), SoftCap(2.0), Alibi((0.5, 0.25, 0.125, -0.3)), relative_bias(1))),
    "head_window": (HeadWindow(left=(2, None, 0, 9), right=(0, 1, None, 3)), (Alibi((0.5, 0.25, 0.125, -0.3)),)),
    "head_window_composed": (
        And(
            (
                Causal(),
                Or((HeadWindow(left=(2, 5, 0, 9), right=(0,) * 4), Document(((0, 8, 12), (0,), (0, 30, 33), (0,))))),
            )
        ),
        (),
    ),
    "head_window_custom": (And((HeadWindow(left=(2, 5, 0, 9), right=(0, 1, 2, 3)), Custom(refuse_thirds))), ()),
}


@pytest.mark.parametrize("rules", RULES)
def test_every_rule_over_all_positions(rules: str) -> None:
    mask_rule, score_rules = RULES[rules]
    check_case(Case(mask_rule=mask_rule, score_rules=score_rules, scale_q=3.0))


@pytest.mark.parametrize("sharing", ["query_head", "kv_head", "shared"])
@pytest.mark.parametrize(
    "rules", ["document", "custom", "alibi_then_softcap", "every_rule", "head_window", "head_window_custom"]
)
def test_rules_over_lists(rules: str, sharing: str) -> None:
    mask_rule, score_rules = RULES[rules]
    case = Case(mask_rule=mask_rule, score_rules=score_rules, sharing=sharing, q_block_size=2, window=2, seed=5)
    check_case(draw_lists(case))


@pytest.mark.parametrize("sharing", [None, "query_head", "kv_head", "shared"])
@pytest.mark.parametrize("rules", ["document", "every_rule", "head_window"])
def test_backward_drops_the_edges_that_the_forward_dropped(rules: str, sharing: str | None) -> None:
    mask_rule, score_rules = RULES[rules]
    case = Case(mask_rule=mask_rule, score_rules=score_rules, dropout=DROPOUT, num_kv_splits=2, seed=35)
    check_case(case if sharing is None else draw_lists(replace(case, sharing=sharing, q_block_size=3)))


def test_dropout_in_tiles_that_need_no_mask() -> None:
    """One request on neighbouring pages: slot tiles are runs of positions, and most pairs are full."""
    case = Case(seqlen_q=(20,), seqlen_kv=(48,), page_table=(tuple(range(12)),), dropout=DROPOUT, seed=36)
    check_case(replace(case, mask_rule=Causal(), dtype=torch.bfloat16))
    check_case(replace(case, sink_logits=(0.3, -1.0, 1.5, 0.0)))


@pytest.mark.parametrize("splits", [1, 3])
def test_score_gradients_do_not_depend_on_slabs_or_splits(splits: int) -> None:
    """A workspace for one row at a time gives the bits of a workspace for all."""
    case = draw_lists(replace(SPARSE, score_rules=RULES["every_rule"][1], seed=37))
    numbers, the_plan = draw_numbers(case), make_plan(case)
    q, k, v, dout, dlse = to_tensors(case, numbers)
    out, lse = run(the_plan, q, k, v)
    work = plan_backward(the_plan, BackwardHints(query_shape=QueryShape(16, 16, 4, 2), steps_per_task=4 // splits))
    assert (sum(launch.num_partials for launch in work.launches) > 0) == (splits > 1)
    buffers = allocate_buffers(the_plan, work)
    prepare_rows(buffers, out, lse, dout, dlse)
    inputs = RowInputs(q, k, v, dout, buffers.lse_log2, buffers.delta)
    whole, again, narrow = (
        compute_score_gradients(the_plan, work.launches, inputs, table_bytes=size) for size in (1 << 20, 1 << 20, 1)
    )
    for gradient, repeated, slabbed in zip(whole, again, narrow, strict=True):
        assert torch.equal(gradient, repeated)
        torch.testing.assert_close(gradient, slabbed, rtol=1e-7, atol=0)


def test_score_gradients_come_only_when_asked_for_and_change_no_other() -> None:
    case = replace(SPARSE, score_rules=(SoftCap(2.0), relative_bias(2)), seed=38)
    tensors = to_tensors(case, draw_numbers(case))
    plain, scored = differentiate(case, tensors), differentiate(case, tensors, score_gradients=True)
    assert plain.dscore is None
    assert [tuple(g.shape) for g in scored.dscore] == [(), (4, 5)]
    for gradient, want in zip(scored[:4], plain[:4], strict=True):
        assert torch.equal(gradient, want)
    without = replace(case, score_rules=())
    assert differentiate(without, tensors, score_gradients=True).dscore == ()


def test_the_rows_of_a_wide_task_give_score_gradients_in_several_programs() -> None:
    rules = (relative_bias(9), SoftCap(3.0))
    case = Case(seqlen_q=(67,), seqlen_kv=(70,), dtype=torch.bfloat16, mask_rule=Causal(), score_rules=rules, seed=39)
    check_case(case)


def test_an_empty_batch_gives_score_gradients_of_zero() -> None:
    case = Case(seqlen_q=(0, 0), seqlen_kv=(5, 0), score_rules=RULES["every_rule"][1])
    got = differentiate(case, to_tensors(case, draw_numbers(case)), score_gradients=True)
    assert [tuple(g.shape) for g in got.dscore] == [(4, 7), (), (4,), (4, 3)]
    assert all(torch.count_nonzero(gradient) == 0 for gradient in got.dscore)


@pytest.mark.parametrize("name", ["k_quant", "v_quant"])
def test_a_quantized_cache_has_no_gradient(name: str) -> None:
    case = Case(seqlen_q=(1,), seqlen_kv=(8,))
    quantized = replace(make_plan(case), **{name: KVQuantization("int8", "token")})
    tensors = to_tensors(case, draw_numbers(case))
    q, k, v, dout, _ = tensors
    limit = rf"^{name} is int8 per token, but [^\n]* \[QUANT-GRAD\]$"
    with pytest.raises(PlanError, match=limit):
        backward(quantized, q, k, v, dout, dout[..., 0], dout)
    with pytest.raises(PlanError, match=limit):
        sparse_attention(quantized, q, k, v)


@pytest.mark.parametrize("num_kv_splits", [2, 3, 8])
def test_forward_splits_do_not_change_gradients(num_kv_splits: int) -> None:
    case = Case(num_kv_splits=num_kv_splits, mask_rule=Causal(), sink_logits=(0.0, 1.0, -2.0, 0.5), seed=9)
    check_case(case)
    check_case(draw_lists(replace(SPARSE, num_kv_splits=num_kv_splits)))


@pytest.mark.parametrize("query_shape", [QueryShape(16, 64, 4, 2), QueryShape(64, 16, 2, 1)])
def test_tiles_of_the_backward_are_its_own(query_shape: QueryShape) -> None:
    """Whatever tiles the forward has; and its chunks, which here end inside the causal diagonal."""
    case = Case(seqlen_q=(37,), seqlen_kv=(40,), dtype=torch.bfloat16, mask_rule=Causal(), seed=10)
    for steps in (None, 1):
        check_case(case, BackwardHints(mode="atomic", query_shape=query_shape, steps_per_task=steps))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_storage(dtype: torch.dtype) -> None:
    check_case(draw_lists(replace(SPARSE, dtype=dtype, seed=11)))
    check_case(Case(dtype=dtype, mask_rule=Causal(), score_rules=(SoftCap(4.0),), seed=12))


@pytest.mark.parametrize(("num_qo_heads", "num_kv_heads"), [(6, 2), (3, 1), (2, 2)])
def test_head_groups(num_qo_heads: int, num_kv_heads: int) -> None:
    heads = Case(num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, mask_rule=Causal(), seed=13)
    check_case(draw_lists(replace(heads, sharing="kv_head", q_block_size=3)))
    check_case(heads)


@pytest.mark.parametrize(("head_dim_qk", "head_dim_vo"), [(16, 40), (80, 16), (1, 3)])
def test_unequal_head_dims(head_dim_qk: int, head_dim_vo: int) -> None:
    case = Case(seqlen_q=(4,), seqlen_kv=(19,), head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo, seed=14)
    check_case(draw_lists(case))


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_page_sizes(page_size: int) -> None:
    check_case(draw_lists(replace(SPARSE, page_size=page_size, seed=15)))


def hot_case() -> Case:
    """Ten rows, all on the same block of four positions, some on one more."""
    lists = tuple((0, 0, 3) if k % 5 == 0 else (0,) for k in range(10))
    return Case(seqlen_q=(10,), seqlen_kv=(20,), lists=lists, sharing="shared", block_size=4, head_dim_qk=16)


def test_a_block_that_all_rows_select_receives_every_contribution() -> None:
    check_case(hot_case())


def test_a_hot_tile_cut_into_items_gives_the_same_gradients() -> None:
    case = hot_case()
    numbers, the_plan = draw_numbers(case), make_plan(case)
    work = plan_backward(the_plan, BackwardHints(rows_per_item=8))
    assert work.keys.items.num_partials > 2
    got = differentiate(case, to_tensors(case, numbers), the_plan=the_plan, work=work)
    check_gradients(case, numbers, got)


@pytest.mark.parametrize("kind", ["dense", "listed", "windowed", "scored"])
def test_pairs_that_need_no_mask_are_found_and_give_the_same_gradients(kind: str) -> None:
    """One request on neighbouring pages, so that slot tiles are runs of positions."""
    case = Case(seqlen_q=(20,), seqlen_kv=(48,), page_table=(tuple(range(12)),), mask_rule=Causal(), seed=16)
    if kind == "listed":
        lists = tuple((block % 3, 1, 2) for block in range(20))
        case = replace(case, lists=lists, sharing="shared", block_size=16, num_qo_heads=2, num_kv_heads=1)
    elif kind == "windowed":
        # Tile [16, 32) is whole in the lists of rows 28 to 31, but each row has its own part of it.
        case = replace(
            case, lists=((0,),) * 5, q_block_size=4, sharing="shared", block_size=16, window=18, mask_rule=None
        )
    elif kind == "scored":
        case = replace(case, score_rules=(Alibi((0.5, 0.25, 0.125, -0.3)),))
    numbers, the_plan = draw_numbers(case), make_plan(case)
    work = plan_backward(the_plan, BackwardHints(key_shape=KeyShape(16, 16, 4, 1)))
    assert work.keys.pair_shape.is_packed == (kind in ("listed", "windowed"))
    items = work.keys.items
    assert torch.any(items.item_full_begin < items.item_end)
    assert torch.any(items.item_full_begin > items.item_begin)
    got = differentiate(case, to_tensors(case, numbers), the_plan=the_plan, work=work)
    check_gradients(case, numbers, got)


@pytest.mark.parametrize(("tile_kv", "tile_m"), [(16, 64), (64, 16), (32, 32)])
def test_tiles_of_the_transpose_do_not_change_gradients(tile_kv: int, tile_m: int) -> None:
    for case in (
        draw_lists(replace(SPARSE, q_block_size=2)),
        Case(mask_rule=Causal()),
        Case(mask_rule=RULES["custom"][0]),
    ):
        numbers, the_plan = draw_numbers(case), make_plan(case)
        work = plan_backward(the_plan, BackwardHints(key_shape=KeyShape(tile_kv, tile_m, 4, 2)))
        got = differentiate(case, to_tensors(case, numbers), the_plan=the_plan, work=work)
        check_gradients(case, numbers, got)


def test_shared_and_repeated_pages_receive_the_sum() -> None:
    """Requests 0 and 1 share a prefix page; request 1 has one page at two logical places."""
    pages = ((2, 0, 5), (2, 4, 4))
    case = Case(seqlen_q=(2, 3), seqlen_kv=(11, 12), page_table=pages, mask_rule=Causal(), seed=17)
    check_case(case)
    check_case(draw_lists(replace(case, sharing="shared", window=6, q_block_size=3)))


def test_transposed_lists_hold_every_entry_exactly_once() -> None:
    for case in (
        draw_lists(replace(SPARSE, seed=18)),
        draw_lists(replace(SPARSE, sharing="shared", q_block_size=4, page_size=1)),
        Case(seqlen_q=(2, 3), seqlen_kv=(11, 12), page_table=((2, 0, 5), (2, 4, 4))),
    ):
        entries = list_entries(make_plan(case))
        tiles = tile_slots(entries, tile_kv=16)
        found = []
        for tile in range(tiles.tile_slot.numel()):
            for pair in range(int(tiles.tile_indptr[tile]), int(tiles.tile_indptr[tile + 1])):
                codes = tiles.codes[tiles.pair_cells[pair]].tolist()
                where = (int(tiles.tile_kv_head[tile]), int(tiles.pair_list[pair]))
                first = int(tiles.tile_slot[tile])
                found += [(*where, first + lane, code) for lane, code in enumerate(codes) if code != ABSENT]
                assert all(bool(tiles.is_touched[tile, lane]) for lane, code in enumerate(codes) if code != ABSENT)
        owners = entries.list_kv_head[entries.entry_list]
        columns = (owners, entries.entry_list, entries.entry_slot, entries.entry_code)
        assert sorted(found) == sorted(zip(*(column.tolist() for column in columns), strict=True))
        assert int(tiles.is_touched.sum()) == len({(head, slot) for head, _, slot, _ in found})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["transposed", "expanded", "zero"])
def test_dout_of_any_strides(form: str, mode: str) -> None:
    case = draw_lists(replace(SPARSE, seed=19))
    numbers = draw_numbers(case)
    dout = to_tensors(case, numbers).dout
    if form == "transposed":
        dout = dout.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    else:
        value = 0.0 if form == "zero" else 0.75
        dout = torch.full((1, 1, 1), value, dtype=case.dtype, device=DEVICE).expand(dout.shape)
    numbers = numbers._replace(dout=dout.double().cpu().numpy())
    check_gradients(case, numbers, differentiate(case, to_tensors(case, numbers)._replace(dout=dout), mode=mode))


@pytest.mark.parametrize("mode", MODES)
def test_a_dout_and_dlse_of_zero_give_zero_everywhere(mode: str) -> None:
    case = draw_lists(replace(SPARSE, seed=20))
    numbers = draw_numbers(case)
    tensors = to_tensors(case, numbers._replace(dout=0 * numbers.dout))
    for gradient in differentiate(case, tensors, mode=mode, dlse=None)[:4]:
        assert torch.count_nonzero(gradient) == 0


@pytest.mark.parametrize("mode", MODES)
def test_strided_inputs_and_outputs(mode: str) -> None:
    case = draw_lists(replace(SPARSE, layout="HND", seed=21))
    numbers = draw_numbers(case)
    tensors = to_tensors(case, numbers)
    doubled = [torch.stack([t, torch.full_like(t, torch.nan)], dim=-1)[..., 0] for t in tensors]
    buffers = {
        "dq": torch.full_like(tensors.q, torch.nan).transpose(0, 1).contiguous().transpose(0, 1),
        "dk": torch.stack([tensors.k_cache * torch.nan] * 2, dim=1)[:, 0],
        "dv": torch.stack([tensors.v_cache * torch.nan] * 2, dim=-1)[..., 0],
    }
    got = differentiate(case, Tensors(*doubled), mode=mode, **buffers)
    assert all(getattr(got, name) is buffer for name, buffer in buffers.items())
    check_gradients(case, numbers, got)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_but_the_gradients_is_written(mode: str) -> None:
    """The pool is no multiple of a slot tile, and what follows it in memory stays as it was."""
    case = draw_lists(replace(SPARSE, page_size=3, seed=21))
    assert case.num_pages * case.page_size % 16
    numbers = draw_numbers(case)
    tensors = to_tensors(case, numbers)
    names = {"dq": tensors.q, "dk": tensors.k_cache, "dv": tensors.v_cache}
    guarded = {name: like.new_full((len(like) + 16, *like.shape[1:]), 7.0) for name, like in names.items()}
    got = differentiate(case, tensors, mode=mode, **{name: buffer[8:-8] for name, buffer in guarded.items()})
    check_gradients(case, numbers, got)
    for buffer in guarded.values():
        assert torch.all(buffer[:8] == 7)
        assert torch.all(buffer[-8:] == 7)


@pytest.mark.parametrize("mode", MODES)
def test_float32_buffers_receive_unrounded_sums(mode: str) -> None:
    case = draw_lists(replace(SPARSE, dtype=torch.bfloat16, seed=22))
    numbers = draw_numbers(case)
    tensors = to_tensors(case, numbers)
    buffers = {
        name: torch.full(like.shape, torch.nan, device=DEVICE)
        for name, like in (("dq", tensors.q), ("dk", tensors.k_cache), ("dv", tensors.v_cache))
    }
    wide = differentiate(case, tensors, mode=mode, **buffers)
    check_gradients(case, numbers, wide)
    narrow = differentiate(case, tensors, mode=mode)
    for name in buffers:
        kept = getattr(wide, name)
        assert torch.any(kept != kept.bfloat16())
        assert torch.equal(kept.bfloat16(), getattr(narrow, name))


def poison(case: Case, by_slot: np.ndarray, is_owned: np.ndarray) -> np.ndarray:
    return np.where(is_owned[:, None, None], by_slot, np.nan)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_dense", [True, False])
def test_nan_in_slots_that_nobody_owns_changes_no_bit(is_dense: bool, mode: str) -> None:
    case = replace(SPARSE, seed=23) if is_dense else draw_lists(replace(SPARSE, seed=23))
    numbers, pages = draw_numbers(case), case.pages()
    is_owned = np.zeros(case.num_pages * case.page_size, dtype=bool)
    for n, length in enumerate(case.seqlen_kv):
        positions = np.arange(length)
        is_owned[pages[n, positions // case.page_size] * case.page_size + positions % case.page_size] = True
    assert not is_owned.all()
    poisoned = numbers._replace(k=poison(case, numbers.k, is_owned), v=poison(case, numbers.v, is_owned))
    clean = differentiate(case, to_tensors(case, numbers), mode=mode)
    for gradient, want in zip(differentiate(case, to_tensors(case, poisoned), mode=mode)[:4], clean, strict=False):
        assert torch.equal(gradient, want)
    assert not np.any(to_slots(case, clean.dk)[~is_owned])
    assert not np.any(to_slots(case, clean.dv)[~is_owned])


@pytest.mark.parametrize("mode", MODES)
def test_owned_slots_that_no_row_selects_get_exactly_zero(mode: str) -> None:
    case = Case(seqlen_q=(3,), seqlen_kv=(24,), lists=((1, 9),) * 6, mask_rule=Causal(), seed=24)
    numbers = draw_numbers(case)
    got = differentiate(case, to_tensors(case, numbers), mode=mode)
    pages = case.pages()[0]
    selected = {int(pages[j // 4]) * 4 + j % 4 for j in (1, 9)}
    for gradient in (to_slots(case, got.dk), to_slots(case, got.dv)):
        assert {int(slot) for slot in np.nonzero(np.any(gradient != 0, axis=(1, 2)))[0]} == selected
        assert np.all(np.any(gradient[sorted(selected)] != 0, axis=2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_masked", [True, False])
def test_empty_rows_give_zero_and_leave_no_trace(is_masked: bool, mode: str) -> None:
    """The list is empty, or the mask leaves none of it; what the rows' dout holds, NaN included, reaches nobody."""
    if is_masked:  # rows at 7 and 8 share a list with later ones, and it has key 9 only
        empty, shared = [0, 1], {"sharing": "shared", "q_block_size": 5, "mask_rule": Causal()}
        case = Case(seqlen_q=(5,), seqlen_kv=(12,), lists=((9,),), seed=25, **shared)
    else:
        empty = [0, 2, 4]
        lists = tuple((() if r in empty else (1, 5 + r)) for r in range(5) for _ in range(2))
        case = Case(seqlen_q=(5,), seqlen_kv=(20,), lists=lists, seed=25)
    numbers = draw_numbers(case)
    got = differentiate(case, to_tensors(case, numbers), mode=mode, dlse=None)
    check_gradients(case, numbers._replace(dlse=0 * numbers.dlse), got)
    assert torch.count_nonzero(got.dq[empty]) == 0
    poisoned = numbers.dout.copy()
    poisoned[empty] = np.nan
    again = differentiate(case, to_tensors(case, numbers._replace(dout=poisoned)), mode=mode, dlse=None)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(again, name), getattr(got, name))


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_row_with_a_sink_passes_only_dlse_to_the_sink(mode: str) -> None:
    case = Case(seqlen_q=(1,), seqlen_kv=(8,), lists=((), ()), sink_logits=(0.5, -1.0, 2.0, 0.0), seed=26)
    numbers = draw_numbers(case)
    got = differentiate(case, to_tensors(case, numbers), mode=mode)
    np.testing.assert_allclose(got.dsink.cpu().numpy(), numbers.dlse[0], rtol=1e-6)
    assert all(torch.count_nonzero(gradient) == 0 for gradient in got[:3])


@pytest.mark.parametrize("mode", MODES)
def test_no_rows_and_no_requests_give_zero_gradients(mode: str) -> None:
    for seqlen_kv in ((5, 0), ()):
        case = Case(seqlen_q=(0,) * len(seqlen_kv), seqlen_kv=seqlen_kv, sink_logits=(0.0,) * 4)
        got = differentiate(case, to_tensors(case, draw_numbers(case)), mode=mode)
        assert got.dq.shape == (0, 4, 24)
        assert all(torch.count_nonzero(gradient) == 0 for gradient in got[:4])


def test_kv_centric_gradients_repeat_bit_for_bit() -> None:
    for case in (hot_case(), draw_lists(replace(SPARSE, seed=27))):
        (q, k, v, dout, dlse), the_plan = to_tensors(case, draw_numbers(case)), make_plan(case)
        out, lse = run(the_plan, q, k, v)
        hints = BackwardHints(rows_per_item=8)
        works = [plan_backward(the_plan, hints)] * (1 if DEVICE.type == "cpu" else 20)
        works.append(plan_backward(make_plan(case), hints))
        runs = [backward(the_plan, q, k, v, out, lse, dout, dlse=dlse, work=work) for work in works]
        for again in runs[1:]:
            for gradient, want in zip(again[:3], runs[0][:3], strict=True):
                assert torch.equal(gradient, want)


def test_listing_order_and_repetition_change_no_bit() -> None:
    case = draw_lists(replace(SPARSE, seed=28))
    shuffled = replace(case, lists=tuple((*row[::-1], *row) for row in case.lists))
    tensors = to_tensors(case, draw_numbers(case))
    for gradient, want in zip(differentiate(shuffled, tensors)[:4], differentiate(case, tensors)[:4], strict=True):
        assert torch.equal(gradient, want)


@pytest.mark.parametrize("mode", MODES)
def test_one_hot_dout_names_the_edges_of_every_row(mode: str) -> None:
    """With q = 0 every probability is 1 / |E|; row r puts |E| into dimension r, so dV lists the slots of every row."""
    case = draw_lists(replace(SPARSE, num_qo_heads=2, num_kv_heads=2, sink_logits=None, seed=29))
    numbers, pages = draw_numbers(case), case.pages()
    dout = np.zeros_like(numbers.dout)
    want = np.zeros_like(numbers.v)
    for n, row, _, h, keys in case.edges():
        dout[row, h, row] = max(1, keys.size)
        np.add.at(want, (pages[n, keys // case.page_size] * case.page_size + keys % case.page_size, h, row), 1)
    tensors = to_tensors(case, numbers._replace(q=0 * numbers.q, dout=dout))
    got = differentiate(case, tensors, mode=mode, dlse=None)
    np.testing.assert_allclose(to_slots(case, got.dv), want, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_dv_sums_to_dout_of_non_empty_rows(mode: str) -> None:
    case = draw_lists(Case(sharing="query_head", seed=30))
    numbers = draw_numbers(case)
    is_empty = np.isneginf(expected(case, numbers).lse)
    assert is_empty.any()
    assert not is_empty.all()
    got = differentiate(case, to_tensors(case, numbers), mode=mode)
    want = np.where(is_empty[:, :, None], 0, numbers.dout).reshape(-1, 2, 2, case.head_dim_vo).sum((0, 2))
    np.testing.assert_allclose(to_slots(case, got.dv).sum(0), want, atol=2e-5)


@pytest.mark.parametrize("mode", MODES)
def test_score_gradients_of_a_row_sum_to_zero(mode: str) -> None:
    """Seen through keys that are all one vector: softmax is blind to a common shift."""
    case = draw_lists(Case(seed=31))
    numbers = draw_numbers(case)
    got = differentiate(case, to_tensors(case, numbers._replace(k=0 * numbers.k + 1.0)), mode=mode, dlse=None)
    np.testing.assert_allclose(got.dq.cpu().numpy(), 0, atol=3e-6)


def test_autograd_gives_the_gradients_of_backward() -> None:
    case = draw_lists(replace(SPARSE, seed=32))
    numbers = draw_numbers(case)
    q, k, v, dout, dlse = to_tensors(case, numbers)
    leaves = [t.requires_grad_() for t in (q, k, v, torch.tensor(case.sink_logits, device=DEVICE, dtype=torch.float64))]
    out, lse = sparse_attention(make_plan(case), q, k, v, sink_logits=leaves[3])
    ((out * dout).sum() + (lse * dlse).sum()).backward()
    check_gradients(case, numbers, Gradients(*(leaf.grad for leaf in leaves)))
    assert leaves[3].grad.dtype == torch.float64


@pytest.mark.parametrize("mode", MODES)
def test_a_selector_that_moves_after_the_forward_does_not_change_the_edges(mode: str) -> None:
    case = draw_lists(replace(SPARSE, sink_logits=None, seed=33))
    numbers = draw_numbers(case)
    q, k, v, dout, _ = to_tensors(case, numbers)
    indices = torch.tensor([t for row in case.lists for t in row], device=DEVICE)
    table = torch.from_numpy(case.pages()).to(DEVICE)
    candidates = CandidateLists(
        granularity="token",
        sharing=case.sharing,
        indptr=torch.tensor(np.cumsum([0, *map(len, case.lists)]), device=DEVICE),
        indices=indices,
        q_block_size=case.q_block_size,
    )
    the_plan = plan(
        qo_indptr=case.qo_indptr.tolist(), seqlen_kv=list(case.seqlen_kv), page_table=table, page_size=case.page_size,
        num_pages=case.num_pages, num_qo_heads=4, num_kv_heads=2, head_dim_qk=24, head_dim_vo=16, sm_scale=24**-0.5,
        dtype=case.dtype, device=DEVICE, candidates=candidates, window=3, num_sink_tokens=2, mask_rule=Causal(),
    )  # fmt: skip
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, _ = sparse_attention(the_plan, *leaves, mode=mode)
    indices.zero_()
    table.zero_()
    out.backward(dout)
    check_gradients(case, numbers._replace(dlse=0 * numbers.dlse), Gradients(*(leaf.grad for leaf in leaves), None))


def test_lse_alone_can_be_differentiated() -> None:
    case = Case(seqlen_q=(3,), seqlen_kv=(9,), mask_rule=Causal(), seed=34)
    numbers = draw_numbers(case)
    q, k, v, _, dlse = to_tensors(case, numbers)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    _, lse = sparse_attention(make_plan(case), *leaves)
    lse.backward(dlse)
    check_gradients(case, numbers._replace(dout=0 * numbers.dout), Gradients(*(leaf.grad for leaf in leaves), None))


def test_what_does_not_fit_the_plan_is_refused_in_one_line() -> None:
    case = Case(seqlen_q=(3,), seqlen_kv=(9,), sink_logits=(0.0,) * 4)
    the_plan, tensors = make_plan(case), to_tensors(case, draw_numbers(case))
    q, k, v, dout, dlse = tensors
    out, lse = run(the_plan, q, k, v)
    good = {"q": q, "k_cache": k, "v_cache": v, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
    for name, tensor in (*good.items(), ("dq", q), ("dk", k), ("dv", v)):
        for wrong, part in ((tensor[:-1], "shape"), (tensor.double(), "dtype"), (tensor.to("meta"), "device")):
            with pytest.raises(PlanError, match=rf"^{name}\.{part} is [^\n]*$"):
                backward(the_plan, **{**good, name: wrong})
    with pytest.raises(PlanError, match=r"^mode is fast, but must be atomic, hybrid or kv_centric"):
        backward(the_plan, **good, mode="fast")
    with pytest.raises(PlanError, match=r"^mode is atomic, but the work was planned for hybrid"):
        backward(the_plan, **good, mode="atomic", work=work_of(the_plan, "hybrid"))
    with pytest.raises(PlanError, match=r"^sink_logits is "):
        sparse_attention(the_plan, q, k, v, sink_logits=torch.ones(4, device=DEVICE))
    with pytest.raises(PlanError, match=r"^key_shape.tile_kv is 24, but must be a power of two from 16 up"):
        BackwardHints(key_shape=KeyShape(24, 16, 4, 2))
    with pytest.raises(PlanError, match=r"^reuse_threshold is 0, but must be at least 1"):
        BackwardHints(mode="hybrid", reuse_threshold=0)
