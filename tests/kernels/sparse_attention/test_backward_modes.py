"""Adding, gathering, and some of both: which pages go where, what order may change, and what memory it takes."""

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import pytest
import torch

from attnconform.kernels.sparse_attention import (
    BackwardHints,
    BackwardPlan,
    CandidateLists,
    Gradients,
    Plan,
    PlanError,
    backward,
    plan,
    plan_backward,
    plan_tier,
    run,
)
from attnconform.kernels.sparse_attention.backward_hints import MODES, REPEATABLE_MODES, QueryShape
from attnconform.kernels.sparse_attention.backward_keys import launch_part_sums
from attnconform.kernels.sparse_attention.backward_plan import allocate_buffers, score_workspace_bytes, workspace_bound
from attnconform.kernels.sparse_attention.backward_reuse import count_page_adds
from attnconform.kernels.sparse_attention.backward_tasks import QUERY_FIELDS
from attnconform.kernels.sparse_attention.backward_transpose import list_entries
from attnconform.kernels.sparse_attention.rules import Causal, RelativeBias, SoftCap, Window

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE, DIM = 4, 16


@dataclass(frozen=True, eq=False)
class Call:
    """A plan with its inputs and its forward."""

    plan: Plan
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor

    def backward(self, work: BackwardPlan | None = None, **options: object) -> Gradients:
        saved = (self.q, self.k, self.v, self.out, self.lse, self.dout)
        return backward(self.plan, *saved, work=work, **options)


def make_call(
    lists: list[list[int]] | None,
    *,
    seqlen_q: tuple[int, ...] = (8,),
    seqlen_kv: tuple[int, ...] = (32,),
    sharing: str = "kv_head",
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.float32,
    block_size: int = PAGE,
    q_block_size: int = 1,
    **options: object,
) -> Call:
    """Rows of requests on shuffled pages; two pages of the pool belong to nobody."""
    pages = [-(-n // PAGE) for n in seqlen_kv]
    free = iter(torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(1)).tolist())
    table = torch.tensor([[next(free) if j < n else -1 for j in range(max(pages))] for n in pages]).int()
    candidates = None
    if lists is not None:
        candidates = CandidateLists(
            granularity="token" if block_size == 1 else "block",
            sharing=sharing,
            indptr=torch.tensor([0, *map(len, lists)]).cumsum(0).to(DEVICE),
            indices=torch.tensor([t for row in lists for t in row]).to(DEVICE),
            block_size=block_size,
            q_block_size=q_block_size,
        )
    the_plan = plan(
        qo_indptr=torch.tensor([0, *seqlen_q]).cumsum(0).to(DEVICE), seqlen_kv=list(seqlen_kv),
        page_table=table.to(DEVICE), page_size=PAGE, num_pages=sum(pages) + 2, num_qo_heads=heads[0],
        num_kv_heads=heads[1], head_dim_qk=DIM, head_dim_vo=DIM, sm_scale=DIM**-0.5, dtype=dtype, device=DEVICE,
        candidates=candidates, **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    rows, cache = (sum(seqlen_q), heads[0], DIM), (sum(pages) + 2, PAGE, heads[1], DIM)
    q, k, v, dout = (torch.randn(x, generator=generator).to(DEVICE, dtype) for x in (rows, cache, cache, rows))
    return Call(the_plan, q, k, v, *run(the_plan, q, k, v), dout)


def hot_call(rows: int = 24, **options: object) -> Call:
    """Every row selects block 0, and one of seven others."""
    return make_call([[0, 1 + r % 7] for r in range(rows)], seqlen_q=(rows,), sharing="shared", **options)


def hybrid(threshold: int, **options: object) -> BackwardHints:
    return BackwardHints(mode="hybrid", reuse_threshold=threshold, **options)


def absolute_terms(call: Call, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For every element of dk and dv, the sum of its terms' absolute values; chosen is (rows, seqlen_kv), no mask."""
    pages, group = call.plan.page_table[0].long(), call.plan.group_size
    k, v = (x[pages].flatten(0, 1).double().repeat_interleave(group, 1) for x in (call.k, call.v))
    q, dout = call.q.double(), call.dout.double()
    scores = torch.einsum("qhd,khd->qhk", q, k) * DIM**-0.5
    p = torch.exp(scores - call.lse.double()[..., None]) * chosen[:, None]
    delta = (dout * call.out.double()).sum(-1, keepdim=True)
    ds = p * (torch.einsum("qhd,khd->qhk", dout, v) - delta) * DIM**-0.5
    sums = []
    for weights, vectors in ((ds, q), (p, dout)):
        by_head = torch.einsum("qhk,qhd->khd", weights.abs(), vectors.abs())
        total = torch.zeros(call.k.shape, dtype=torch.float64, device=DEVICE)
        total[pages] = by_head.unflatten(1, (-1, group)).sum(2).unflatten(0, (-1, PAGE))
        sums.append(total)
    return sums[0], sums[1]


@pytest.mark.parametrize("sharing", ["query_head", "kv_head", "shared"])
def test_adds_are_counted_for_every_page_and_kv_head(sharing: str) -> None:
    """Against lists read one after another: a page's adds are those of its most read token."""
    per_row = {"query_head": 4, "kv_head": 2, "shared": 1}[sharing]
    generator = torch.Generator().manual_seed(3)
    lists = [torch.randint(32, (5,), generator=generator).tolist() for _ in range(8 * per_row)]
    call = make_call(lists, sharing=sharing, block_size=1)
    want = torch.zeros(2, call.plan.num_pages * PAGE, dtype=torch.int64)
    for n, row in enumerate(lists):
        head = n % per_row
        readers = {"query_head": [head // 2], "kv_head": [head], "shared": [0, 1]}[sharing]
        for token in set(row):
            slot = int(call.plan.page_table[0, token // PAGE]) * PAGE + token % PAGE
            want[readers, slot] += 1
    want = want.view(2, -1, PAGE).amax(2)
    threshold = int(want.max())
    is_cold = (want > 0) & (want < threshold)
    work = plan_backward(call.plan, hybrid(threshold))
    assert torch.equal(count_page_adds(call.plan, work.launches, list_entries(call.plan)).cpu(), want)
    assert torch.equal(work.cold.rows.cpu() >= 0, is_cold)
    assert work.cold.most_adds == int(want[is_cold].max())


def test_adds_of_rows_without_lists_follow_the_mask() -> None:
    """A window of two pages: 16 rows in tiles of 8, and two requests that share no page."""
    call = make_call(None, seqlen_q=(16, 4), seqlen_kv=(16, 8), mask_rule=Window(left=3, right=0))
    work = plan_backward(call.plan, BackwardHints(mode="atomic"))
    want = torch.zeros(call.plan.num_pages, dtype=torch.int64)
    column = {name: n for n, name in enumerate(QUERY_FIELDS)}
    for launch in work.launches:
        for task in launch.tasks.tolist():
            if task[column["kv_head"]] == 0:
                first, past = task[column["kv_start"]] // PAGE, -(-task[column["kv_end"]] // PAGE)
                want[call.plan.page_table[task[column["request"]], first:past].long().cpu()] += 1
    got = count_page_adds(call.plan, work.launches, list_entries(call.plan)).cpu()
    assert torch.equal(got, want.expand(2, -1))
    assert torch.count_nonzero(want) == 6
    assert int(want.max()) > 1


def test_a_hot_page_is_gathered_and_the_others_are_added() -> None:
    call = hot_call()
    work = plan_backward(call.plan, hybrid(5))
    hot = int(call.plan.page_table[0, 0])
    assert bool((work.cold.rows[:, hot] == -1).all())
    assert work.cold.num_rows == 2 * 7
    assert work.cold.most_adds == 4
    assert work.keys.tiles.is_touched.sum() == PAGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hot_page_loses_no_contribution_though_its_readers_are_cut_into_parts(dtype: torch.dtype) -> None:
    """40 rows in 20 parts, more than one tree of them; dV sums to dO whatever the values."""
    call = hot_call(40, dtype=dtype, layout="NHD")
    work = plan_backward(call.plan, hybrid(7, rows_per_item=4))
    assert work.keys.items.num_partials == 20
    buffers = {name: torch.full(call.k.shape, torch.nan, device=DEVICE) for name in ("dk", "dv")}
    got, want = call.backward(work, **buffers), call.backward()
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for ours, theirs in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), **close)
    upstream = call.dout.float().view(40, 2, 2, DIM).sum((0, 2))
    torch.testing.assert_close(got.dv.sum((0, 1)), upstream, rtol=close["rtol"], atol=4 * close["atol"])


@pytest.mark.parametrize("num_parts", [1, 2, 7, 8, 9, 16, 17, 40])
def test_parts_are_added_by_one_tree_whatever_their_number(num_parts: int) -> None:
    """Eight at a time, halves onto halves: rounded as such, which a chain of additions is not."""
    call = hot_call(8)
    work = plan_backward(call.plan, hybrid(4, rows_per_item=4))
    assert work.keys.partial_rows[0] == 4
    keys = replace(
        work.keys,
        items=replace(
            work.keys.items,
            partial_indptr=torch.tensor([0, num_parts], device=DEVICE),
            num_partials=num_parts,
        ),
    )
    generator = torch.Generator().manual_seed(num_parts)
    shape = (*keys.partial_rows, DIM)
    parts = tuple(torch.randn(shape, generator=generator).to(DEVICE) for _ in range(2))
    dk, dv = torch.zeros_like(call.k), torch.zeros_like(call.v)
    launch_part_sums(call.plan, keys, dk, dv, parts)
    page = int(call.plan.page_table[0, 0])
    first = int(keys.tiles.tile_slot[keys.items.summed_tile[0]])
    lanes = slice(page * PAGE - first, page * PAGE - first + PAGE)
    chain_differs = False
    for got, part in zip((dk, dv), parts, strict=True):
        padded = torch.cat([part, part.new_zeros((-num_parts % 8, *part.shape[1:]))])
        total = torch.zeros_like(part[0])
        for eight in padded.split(8):
            for half in (4, 2, 1):
                eight = eight[:half] + eight[half:]
            total = total + eight[0]
        chain = torch.zeros_like(total)
        for one in part:
            chain = chain + one
        assert torch.equal(got[page], total[:, lanes].transpose(0, 1))
        chain_differs |= not torch.equal(chain, total)
    assert chain_differs == (num_parts > 2)


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_threshold_of_one_gathers_all_and_one_that_nothing_reaches_adds_all(is_listed: bool) -> None:
    call = hot_call() if is_listed else make_call(None, mask_rule=Causal())
    for threshold, mode in ((1, "kv_centric"), (1 << 40, "atomic")):
        got, want = (call.backward(plan_backward(call.plan, h)) for h in (hybrid(threshold), BackwardHints(mode=mode)))
        for ours, theirs in zip(got[:3], want[:3], strict=True):
            if mode == "kv_centric" or not ours.is_cuda:
                assert torch.equal(ours, theirs)
            else:  # what is added in no order differs from call to call
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_no_mode_and_no_threshold_changes_the_edges() -> None:
    """With q = 0 and one-hot dout every edge shows alone: the same elements of dV are non-zero, by the same values."""
    lists = [[0, 1 + r % 3, -1, 0] for r in range(8) for _ in range(2)]
    call = make_call(lists, window=3, mask_rule=Causal())
    dout = torch.zeros_like(call.dout)
    for row in range(8):
        dout[row, :, row] = 1.0
    flat = replace(call, q=torch.zeros_like(call.q), dout=dout)
    flat = replace(flat, **dict(zip(("out", "lse"), run(flat.plan, flat.q, flat.k, flat.v), strict=True)))
    want = flat.backward().dv
    for hints in (BackwardHints(mode="atomic"), *(hybrid(n) for n in (1, 2, 3, 5, 9))):
        got = flat.backward(plan_backward(flat.plan, hints)).dv
        assert torch.equal(got != 0, want != 0)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def reordered(work: BackwardPlan, seed: int) -> BackwardPlan:
    """The same programs, started in another order."""
    generator = torch.Generator().manual_seed(seed)

    def shuffle(n: int) -> torch.Tensor:
        return torch.randperm(n, generator=generator).to(DEVICE)

    launches = tuple(replace(n, tasks=n.tasks[shuffle(n.tasks.shape[0])]) for n in work.launches)
    keys = work.keys
    if keys is not None:
        order = shuffle(keys.items.item_tile.numel())
        columns = ("item_tile", "item_begin", "item_full_begin", "item_end", "item_partial")
        items = replace(keys.items, **{name: getattr(keys.items, name)[order] for name in columns})
        keys = replace(keys, items=items)
    return replace(work, launches=launches, keys=keys)


@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_programs_moves_sums_no_more_than_declared(mode: str) -> None:
    """Bit for bit where a mode is declared repeatable; elsewhere within the declared share, and not for nothing."""
    call = hot_call(24)
    work = plan_backward(call.plan, BackwardHints(mode=mode, reuse_threshold=5, rows_per_item=8, steps_per_task=1))
    first = call.backward(work)
    others = [call.backward(reordered(work, seed)) for seed in range(2)]
    block = torch.arange(32, device=DEVICE) // PAGE
    chosen = (block == 0) | (block == 1 + torch.arange(24, device=DEVICE)[:, None] % 7)
    assert (work.order_spread == 0) == (mode in REPEATABLE_MODES)
    for again in others:
        assert torch.equal(again.dq, first.dq)
        if mode in REPEATABLE_MODES:
            assert torch.equal(again.dk, first.dk)
            assert torch.equal(again.dv, first.dv)
    if mode not in REPEATABLE_MODES:
        assert any(not torch.equal(again.dv, first.dv) for again in others)
        for again in others:
            for ours, theirs, size in zip(again[1:3], first[1:3], absolute_terms(call, chosen), strict=True):
                assert bool(((ours.double() - theirs.double()).abs() <= work.order_spread * size).all())


def test_a_hybrid_declares_less_spread_than_adding_all() -> None:
    call = hot_call()
    spreads = {mode: plan_backward(call.plan, replace(hybrid(5), mode=mode)).order_spread for mode in MODES}
    assert spreads["kv_centric"] == 0 < spreads["hybrid"] < spreads["atomic"]
    assert spreads["atomic"] == 2 * 23 * 2.0**-24
    assert spreads["hybrid"] == 2 * 3 * 2.0**-24


def test_what_the_forward_cut_does_not_reach_the_backward() -> None:
    """Tiles and splits of the forward are hints of its own."""
    calls = [make_call([[*range(8)]] * 8, sharing="shared", tile_kv=16, num_kv_splits=splits) for splits in (1, 2)]
    shape = QueryShape(16, 16, 4, 2)
    works = [plan_backward(call.plan, hybrid(3, query_shape=shape)) for call in calls]
    for mine, other in zip(works[0].launches, works[1].launches, strict=True):
        assert mine.shape == other.shape == shape
        assert torch.equal(mine.tasks, other.tasks)
        assert mine.num_partials == 0
    cut = plan_backward(calls[0].plan, hybrid(3, query_shape=shape, steps_per_task=1))
    # Two chunks of every row and KV head.
    assert sum(launch.num_partials for launch in cut.launches) == 2 * 8 * 2
    for ours, theirs in zip(calls[0].backward(cut)[:3], calls[0].backward(works[0])[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_the_workspace_is_what_was_reported_and_within_its_bound(mode: str) -> None:
    call = hot_call(24)
    work = plan_backward(call.plan, BackwardHints(mode=mode, reuse_threshold=5))
    buffers = allocate_buffers(call.plan, work)
    held = [buffers.lse_log2, buffers.delta, *buffers.dq_parts, *(buffers.parts or ()), *(buffers.sums or ())]
    assert sum(t.nbytes for t in held) == sum(work.workspace_bytes.values())
    assert sum(work.workspace_bytes.values()) <= workspace_bound(call.plan, work.hints)
    # Only cold pages have sums: seven of the pool's ten, and all eight that are read where nothing is gathered.
    rows = {"kv_centric": 0, "hybrid": 2 * 7, "atomic": 2 * 8}[mode]
    assert work.workspace_bytes["sums of cold pages"] == 4 * rows * PAGE * 2 * DIM


def test_parts_stay_within_the_bytes_they_are_given() -> None:
    """Halving the bytes makes items longer, never more; with too few for any part no tile is cut."""
    call = make_call([[0, 1]] * 96, seqlen_q=(96,), sharing="shared")
    free = plan_backward(call.plan, BackwardHints(rows_per_item=8))
    assert free.keys.items.num_partials > 16
    needed = free.workspace_bytes["parts of dk and dv"]
    for part_bytes in (needed, needed // 2, needed // 8, 1):
        work = plan_backward(call.plan, BackwardHints(rows_per_item=8, part_bytes=part_bytes))
        assert work.workspace_bytes["parts of dk and dv"] <= part_bytes
        for ours, theirs in zip(call.backward(work)[:3], call.backward(free)[:3], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradients_of_score_rules_report_their_own_workspace() -> None:
    tables = ((0.0, 0.5, 1.0),) * 4
    call = make_call(None, mask_rule=Causal(), score_rules=[SoftCap(2.0), RelativeBias(tables)])
    work = plan_backward(call.plan, BackwardHints(steps_per_task=1))
    lanes = 8 * 4 + sum(prod(launch.partial_rows) for launch in work.launches)
    # A cap's column and a table's two ends for every lane, and three entries for every row and head.
    assert score_workspace_bytes(call.plan, work) == 4 * lanes * 3 + 4 * 8 * 4 * 3
    assert score_workspace_bytes(hot_call().plan, work) == 0


@pytest.mark.parametrize(("capacity", "sharing"), [(16, "kv_head"), (1, "shared")])  # entries: many, and one
def test_a_tier_has_no_backward(capacity: int, sharing: Literal["kv_head", "shared"]) -> None:
    tier = plan_tier(
        batch_size=1, capacity=capacity, max_seqlen_kv=32, granularity="token", block_size=1, sharing=sharing,
        page_size=PAGE, num_pages=8, num_qo_heads=4, num_kv_heads=2, head_dim_qk=DIM, head_dim_vo=DIM, sm_scale=1.0,
        dtype=torch.float32, device=DEVICE,
    )  # fmt: skip
    with pytest.raises(PlanError, match=r"^plan is of a tier, but a backward needs lists that stay"):
        plan_backward(tier.plan)
