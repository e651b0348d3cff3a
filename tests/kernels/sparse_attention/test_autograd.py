"""Sparse attention as a differentiable function: rule parameters, checkpointing, and numbers that change meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from torch.utils.checkpoint import checkpoint

from attnconform.kernels.sparse_attention import (
    BackwardHints,
    CandidateLists,
    Dropout,
    Plan,
    PlanError,
    backward,
    plan,
    plan_backward,
    run,
    sparse_attention,
)
from attnconform.kernels.sparse_attention.rules import Alibi, Causal, Custom, CustomScore, RelativeBias, SoftCap

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 4
ROWS, LENGTH = 6, 19
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


@triton.jit
def fade(scores, q_idx, kv_idx, heads, data_ptr):
    """The score times 1 + a / (1 + b |distance|), plus c where the head is odd."""
    far = tl.abs(kv_idx - q_idx).to(tl.float32)
    factor = 1.0 + tl.load(data_ptr) / (1.0 + tl.load(data_ptr + 1) * far)
    return scores * factor + tl.where(heads % 2 == 1, tl.load(data_ptr + 2) * scores * scores, 0.0)


@triton.jit
def fade_slope(scores, q_idx, kv_idx, heads, data_ptr):
    far = tl.abs(kv_idx - q_idx).to(tl.float32)
    factor = 1.0 + tl.load(data_ptr) / (1.0 + tl.load(data_ptr + 1) * far)
    return factor + tl.where(heads % 2 == 1, 2.0 * tl.load(data_ptr + 2) * scores, 0.0)


@triton.jit
def fade_by_data(scores, q_idx, kv_idx, heads, data_ptr, ENTRY: tl.constexpr):
    far = tl.abs(kv_idx - q_idx).to(tl.float32)
    shrink = 1.0 + tl.load(data_ptr + 1) * far
    if ENTRY == 0:
        return scores / shrink
    elif ENTRY == 1:
        return -scores * tl.load(data_ptr) * far / (shrink * shrink)
    else:
        return tl.where(heads % 2 == 1, scores * scores, 0.0)


@triton.jit
def look_up(q_idx, kv_idx, request, data_ptr):
    return tl.load(data_ptr + kv_idx) != 0


FADE = CustomScore(fade, (0.5, 0.25, 0.125), fade_slope, fade_by_data)
ALIBI = Alibi((0.5, 0.25, -0.125, 0.0625))
TABLES = tuple(tuple(0.25 * ((3 * h + e) % 5 - 2) for e in range(7)) for h in range(HEADS))
# A rule, its numbers, and what it does to dense scores.
RULES: dict[str, tuple[object, torch.Tensor, Callable]] = {
    "alibi": (ALIBI, torch.tensor(ALIBI.slopes), lambda p, s, d: s + p[:, None, None] * d),
    "soft_cap": (SoftCap(1.5), torch.tensor(1.5), lambda p, s, d: p * torch.tanh(s / p)),
    "relative": (
        RelativeBias(TABLES),
        torch.tensor(TABLES),
        lambda p, s, d: s + p[torch.arange(HEADS, device=p.device)[:, None, None], d.clamp(-3, 3) + 3],
    ),
    "custom": (
        FADE,
        torch.tensor(FADE.data),
        lambda p, s, d: (
            s * (1 + p[0] / (1 + p[1] * d.abs()))
            + p[2] * s * s * (torch.arange(HEADS, device=s.device) % 2)[:, None, None]
        ),
    ),
}


@dataclass(eq=False)
class Batch:
    """One request on shuffled pages, its lists and its numbers."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor

    @property
    def leaves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return tuple(x.detach().clone().requires_grad_() for x in (self.q, self.k, self.v))

    @property
    def admitted(self) -> torch.Tensor:
        """Every row's list, of both heads of a group, below the diagonal."""
        chosen = torch.zeros(ROWS * KV_HEADS, LENGTH, dtype=torch.bool)
        for row, (begin, end) in enumerate(zip(self.indptr, self.indptr[1:], strict=False)):
            chosen[row, self.indices[begin:end].long()] = True
        causal = torch.arange(LENGTH) <= torch.arange(LENGTH - ROWS, LENGTH)[:, None]
        by_kv_head = chosen.view(ROWS, KV_HEADS, LENGTH).transpose(0, 1) & causal
        return by_kv_head.repeat_interleave(HEADS // KV_HEADS, 0).to(DEVICE)

    def plan(self, **options: object) -> Plan:
        candidates = CandidateLists(
            granularity="token", sharing="kv_head", indptr=self.indptr.to(DEVICE), indices=self.indices.to(DEVICE)
        )
        return plan(
            qo_indptr=[0, ROWS], seqlen_kv=[LENGTH], page_table=self.table, page_size=PAGE, num_pages=len(self.k),
            num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim_qk=DIM, head_dim_vo=DIM, sm_scale=DIM**-0.5,
            dtype=torch.float32, device=DEVICE, **{"candidates": candidates, "mask_rule": Causal(), **options},
        )  # fmt: skip


def draw(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    pages = -(-LENGTH // PAGE)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    # The first key is everyone's, so that no row is empty.
    lists = [torch.randperm(LENGTH - 1, generator=generator)[: 3 + n % 5] + 1 for n in range(ROWS * KV_HEADS)]
    lists = [torch.cat([row, torch.zeros(1, dtype=torch.int64)]) for row in lists]
    indptr = torch.tensor([0, *(len(row) for row in lists)]).cumsum(0)
    table = torch.randperm(pages + 1, generator=generator)[:pages].int()[None].to(DEVICE)
    cache = (pages + 1, PAGE, KV_HEADS, DIM)
    return Batch(normal(ROWS, HEADS, DIM), normal(*cache), normal(*cache), table, indptr, torch.cat(lists))


def upstream(seed: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dout, dlse = (torch.randn(shape, generator=generator).to(DEVICE) for shape in ((ROWS, HEADS, DIM), (ROWS, HEADS)))
    return dout, dlse


def loss_of(results: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return sum((x * up.to(x)).sum() for x, up in zip(results, upstream(), strict=True))


def gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, leaves)


def check(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert torch.count_nonzero(theirs)
        torch.testing.assert_close(ours.double(), theirs.double(), **CLOSE)


@pytest.mark.parametrize("mode", ["kv_centric", "hybrid"])
@pytest.mark.parametrize("name", RULES)
def test_gradients_reach_the_numbers_of_every_rule(name: str, mode: str, dense) -> None:
    batch, (rule, numbers, score) = draw(), RULES[name]
    sinks = torch.tensor([0.3, -1.0, 1.5, 0.0], device=DEVICE)
    the_plan = batch.plan(score_rules=[rule], sink_logits=sinks)
    leaves = (*batch.leaves, numbers.to(DEVICE).requires_grad_(), sinks.clone().requires_grad_())
    results = sparse_attention(
        the_plan, *leaves[:3], score_params=[leaves[3]], sink_logits=leaves[4],
        work=plan_backward(the_plan, BackwardHints(mode=mode, reuse_threshold=3)),
    )  # fmt: skip
    want = dense(
        *leaves[:3], batch.table[0], batch.admitted,
        score=lambda s, d: score(leaves[3].double(), s, d), sink_logits=leaves[4],
    )  # fmt: skip
    torch.testing.assert_close(results[0].double(), want[0], **CLOSE)
    check(gradients(loss_of(results), *leaves), gradients(loss_of(want), *leaves))


def test_rules_in_a_row_give_each_its_own_gradient(dense) -> None:
    """A table between two others' numbers, and a rule without a tensor of its own, which keeps the plan's numbers."""
    batch, names = draw(1), ("relative", "custom", "alibi", "soft_cap")
    the_plan = batch.plan(score_rules=[RULES[name][0] for name in names])
    params = [RULES[name][1].to(DEVICE).double().requires_grad_() for name in names]
    leaves = batch.leaves
    results = sparse_attention(the_plan, *leaves, score_params=[*params[:2], None, params[3]])

    def score(s: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        for name, param in zip(names, params, strict=True):
            s = RULES[name][2](param, s, d)
        return s

    want = dense(*leaves, batch.table[0], batch.admitted, score=score)
    wanted = (*leaves, params[0], params[1], params[3])
    check(gradients(loss_of(results), *wanted), gradients(loss_of(want), *wanted))


def test_a_forward_uses_new_numbers_without_a_new_plan_and_a_backward_those_of_its_forward() -> None:
    """Two forwards with different slopes before either backward."""
    batch = draw(2)
    the_plan = batch.plan(score_rules=[ALIBI])
    fresh = batch.plan(score_rules=[Alibi((0.0, -1.0, 2.0, 0.5))])
    first = torch.tensor(ALIBI.slopes, device=DEVICE, requires_grad=True)
    second = torch.tensor([0.0, -1.0, 2.0, 0.5], device=DEVICE, requires_grad=True)
    results = [sparse_attention(the_plan, batch.q, batch.k, batch.v, score_params=[p]) for p in (first, second)]
    want = sparse_attention(fresh, batch.q, batch.k, batch.v, score_params=[second])
    assert torch.equal(results[1][0], want[0])
    assert not torch.equal(results[0][0], want[0])
    alone = sparse_attention(batch.plan(score_rules=[ALIBI]), batch.q, batch.k, batch.v, score_params=[first])
    assert torch.equal(gradients(loss_of(results[0]), first)[0], gradients(loss_of(alone), first)[0])
    assert torch.equal(gradients(loss_of(results[1]), second)[0], gradients(loss_of(want), second)[0])


def test_a_step_on_the_slopes_between_forward_and_backward_changes_nothing() -> None:
    batch, slopes = draw(2), torch.tensor(ALIBI.slopes, device=DEVICE, requires_grad=True)
    before, after = (
        sparse_attention(batch.plan(score_rules=[ALIBI]), batch.q, batch.k, batch.v, score_params=[slopes])
        for _ in range(2)
    )
    want = gradients(loss_of(before), slopes)[0]
    with torch.no_grad():
        slopes.add_(1.0)
    assert torch.equal(gradients(loss_of(after), slopes)[0], want)


def test_a_new_dropout_seed_between_forward_and_backward_changes_nothing() -> None:
    batch = draw(3)
    grads = []
    for is_reseeded in (False, True):
        the_plan, leaves = batch.plan(dropout=Dropout(rate=0.4, seed=5)), batch.leaves
        results = sparse_attention(the_plan, *leaves)
        if is_reseeded:
            the_plan.dropout_words.copy_(Dropout(rate=0.4, seed=6).words(DEVICE))
        grads.append(gradients(loss_of(results), *leaves))
        out, lse = run(the_plan, batch.q, batch.k, batch.v)
    reseeded = backward(the_plan, batch.q, batch.k, batch.v, out, lse, upstream()[0], dlse=upstream()[1])
    for kept, want, other in zip(grads[1], grads[0], reseeded[:3], strict=True):
        assert torch.equal(kept, want)
        assert not torch.equal(other, want)


def test_mask_data_edited_before_the_backward_is_an_error_of_torch() -> None:
    batch, data = draw(4), torch.ones(LENGTH, dtype=torch.int32, device=DEVICE)
    leaves = batch.leaves
    results = sparse_attention(batch.plan(mask_rule=Custom(look_up, data), candidates=None), *leaves)
    data[3] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(loss_of(results), *leaves)


class Selector(torch.nn.Module):
    """Scores every key with a learned vector and plans attention over the best of them."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.batch, self.kept = batch, None
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, DIM, device=DEVICE))

    @torch.no_grad()
    def choose(self) -> Plan:
        keys = self.batch.k[self.batch.table[0].long()].flatten(0, 1)[:LENGTH]
        best = (keys @ self.weight).topk(5, dim=0).indices.T.sort(-1).values
        best[:, 0] = 0
        lists = best.repeat(ROWS, 1)
        indptr = torch.arange(len(lists) + 1) * lists.shape[1]
        return Batch(self.batch.q, self.batch.k, self.batch.v, self.batch.table, indptr, lists.flatten()).plan()

    def keep(self) -> Plan:
        """The plan of the first run of a region, for its second run too."""
        self.kept = self.kept or self.choose()
        return self.kept


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_uses_the_edges_of_the_forward_though_the_selector_has_moved(use_reentrant: bool) -> None:
    batch = draw(5)
    plain, selector = batch.leaves, Selector(batch)
    want = gradients(loss_of(sparse_attention(selector.choose(), *plain)), *plain)
    leaves = batch.leaves

    def region(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sparse_attention(selector.keep(), 1.0 * q, k, v)

    loss = loss_of(checkpoint(region, *leaves, use_reentrant=use_reentrant))
    with torch.no_grad():
        selector.weight.neg_()
    loss.backward()
    moved = gradients(loss_of(sparse_attention(selector.choose(), *plain)), *plain)
    for leaf, kept, other in zip(leaves, want, moved, strict=True):
        assert torch.equal(leaf.grad, kept)
        assert not torch.equal(leaf.grad, other)


@pytest.mark.parametrize("form", ["transposed", "expanded", "zero", "lse only", "out only"])
def test_any_upstream_gradient(form: str, dense) -> None:
    batch, leaves = draw(6), draw(6).leaves
    dout, dlse = upstream()
    forms = {
        "transposed": (dout.permute(2, 1, 0).contiguous().permute(2, 1, 0), dlse.T.contiguous().T),
        "expanded": (torch.tensor(0.75, device=DEVICE).expand(dout.shape), dlse[:1, :1].expand(dlse.shape)),
        "zero": (torch.zeros_like(dout), torch.zeros_like(dlse)),
        "lse only": (None, dlse),
        "out only": (dout, None),
    }
    got, want = [], []
    for results, into in ((sparse_attention(batch.plan(), *leaves), got),
                          (dense(*leaves, batch.table[0], batch.admitted), want)):  # fmt: skip
        used = [(x, up.to(x.dtype)) for x, up in zip(results, forms[form], strict=True) if up is not None]
        outputs, ups = zip(*used, strict=True)
        into += torch.autograd.grad(outputs, leaves, ups, allow_unused=True)
    for ours, theirs in zip(got, want, strict=True):
        theirs = torch.zeros_like(ours) if theirs is None else theirs
        torch.testing.assert_close(ours.double(), theirs.double(), **CLOSE)
        assert form != "zero" or torch.count_nonzero(ours) == 0


def test_an_empty_row_gives_zero_and_leaves_the_others_as_they_were() -> None:
    batch = draw(7)
    begin, end = int(batch.indptr[2]), int(batch.indptr[3])
    full, holed = batch.plan(), None
    batch.indices[begin:end] = -1
    holed = batch.plan()
    leaves = batch.leaves
    got = gradients(loss_of(tuple(x.nan_to_num(neginf=0.0) for x in sparse_attention(holed, *leaves))), *leaves)
    want = gradients(loss_of(sparse_attention(full, *leaves)), *leaves)
    assert torch.count_nonzero(got[0][1, :2]) == 0
    assert torch.equal(got[0][1, 2:], want[0][1, 2:])
    assert torch.equal(got[0][[0, 2, 3, 4, 5]], want[0][[0, 2, 3, 4, 5]])
    assert all(torch.isfinite(gradient).all() for gradient in got)


def test_no_rows_give_gradients_of_zero() -> None:
    batch = draw(8)
    the_plan = plan(
        qo_indptr=[0, 0, 0], seqlen_kv=[LENGTH, 0], page_table=batch.table.expand(2, -1), page_size=PAGE,
        num_pages=len(batch.k), num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim_qk=DIM, head_dim_vo=DIM,
        sm_scale=1.0, dtype=torch.float32, device=DEVICE, score_rules=[ALIBI],
    )  # fmt: skip
    slopes = torch.tensor(ALIBI.slopes, device=DEVICE, requires_grad=True)
    q, k, v = batch.leaves
    out, _ = sparse_attention(the_plan, q[:0], k, v, score_params=[slopes])
    for gradient in gradients(out.sum(), k, v, slopes):
        assert torch.count_nonzero(gradient) == 0


def test_a_second_derivative_is_refused() -> None:
    batch, leaves = draw(), draw().leaves
    out, _ = sparse_attention(batch.plan(), *leaves)
    (first,) = torch.autograd.grad((out * out).sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_what_does_not_fit_the_rules_is_refused_in_one_line() -> None:
    batch, cap = draw(), torch.tensor(1.5, device=DEVICE)
    the_plan = batch.plan(score_rules=[ALIBI, SoftCap(1.5)])
    inputs = (batch.q, batch.k, batch.v)
    with pytest.raises(PlanError, match=r"^len\(score_params\) is 1, but the plan has 2 rules \[GRAD-RULE\]$"):
        sparse_attention(the_plan, *inputs, score_params=[cap])
    with pytest.raises(PlanError, match=r"^score_params\[0\] is of shape \(\), but Alibi has \(4,\) \[GRAD-RULE\]$"):
        sparse_attention(the_plan, *inputs, score_params=[cap, cap])
    with pytest.raises(PlanError, match=r"^score_params\[1\] is on meta, but the plan is on "):
        sparse_attention(the_plan, *inputs, score_params=[None, cap.to("meta")])


@pytest.mark.parametrize("missing", ["slope_fn", "data_fn"])
def test_a_custom_score_without_a_derivative_has_a_forward_and_no_backward(missing: str) -> None:
    batch = draw()
    rule = CustomScore(fade, FADE.data, None if missing == "slope_fn" else fade_slope)
    the_plan = batch.plan(score_rules=[rule])
    out, lse = run(the_plan, batch.q, batch.k, batch.v)
    assert torch.equal(out, run(batch.plan(score_rules=[FADE]), batch.q, batch.k, batch.v)[0])
    with pytest.raises(PlanError, match=rf"^{missing} is None, but [^\n]* \[GRAD-RULE\]$"):
        backward(the_plan, batch.q, batch.k, batch.v, out, lse, upstream()[0], score_gradients=True)


def test_data_of_more_entries_than_columns_is_refused() -> None:
    batch = draw()
    the_plan = batch.plan(score_rules=[CustomScore(fade, (0.1,) * 33, fade_slope, fade_by_data)])
    out, lse = run(the_plan, batch.q, batch.k, batch.v)
    with pytest.raises(PlanError, match=r"^len\(data\) is 33, but at most 32 entries have a gradient"):
        backward(the_plan, batch.q, batch.k, batch.v, out, lse, upstream()[0], score_gradients=True)
