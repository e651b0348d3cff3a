"""A tier gives what a fresh plan gives, at every update, and refuses what does not fit it."""

import pytest
import torch

from attnconform.kernels.sparse_attention import CandidateLists, PlanError, plan, run
from attnconform.kernels.sparse_attention.rules import SoftCap
from attnconform.kernels.sparse_attention.tier import plan_tier

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE_SIZE, NUM_PAGES, HEAD_DIM = 8, 24, 32
COMMON = {
    "page_size": PAGE_SIZE,
    "num_pages": NUM_PAGES,
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim_qk": HEAD_DIM,
    "head_dim_vo": HEAD_DIM,
    "sm_scale": 0.2,
    "dtype": torch.float32,
    "device": DEVICE,
}
LISTS_PER_ROW = {"query_head": 4, "kv_head": 2, "shared": 1}


def draw(granularity, sharing, seqlens, seed):
    """Lengths, pages and lists with holes, duplicates and no order."""
    generator = torch.Generator().manual_seed(seed)
    block_size = 1 if granularity == "token" else 4
    table = torch.randperm(NUM_PAGES, generator=generator)[: len(seqlens) * 8].view(len(seqlens), 8).int()
    lists = []
    for n in seqlens:
        for _ in range(LISTS_PER_ROW[sharing]):
            ids = torch.randperm(-(-n // block_size), generator=generator)[: max(1, n // 3)].tolist()
            lists.append([-1, *ids, *ids[:2], -1])
    lengths = torch.tensor([len(x) for x in lists])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    indices = torch.tensor([i for x in lists for i in x], dtype=torch.int32)
    tensors = (torch.tensor(seqlens, dtype=torch.int32), table, indptr, indices)
    return *(tensor.to(DEVICE) for tensor in tensors), block_size


def make_tier(granularity, sharing, batch_size, block_size, **options):
    return plan_tier(
        **COMMON,
        batch_size=batch_size,
        capacity=64,
        max_seqlen_kv=64,
        granularity=granularity,
        block_size=block_size,
        sharing=sharing,
        with_positions=True,
        **options,
    )


def expected(seqlens, table, indptr, indices, block_size, granularity, sharing, tensors, **local):
    """A fresh plan of the same lists."""
    lists = CandidateLists(
        granularity=granularity, sharing=sharing, indptr=indptr, indices=indices, block_size=block_size
    )
    fresh = plan(
        **COMMON,
        qo_indptr=torch.arange(len(seqlens) + 1, device=DEVICE),
        seqlen_kv=seqlens,
        page_table=torch.where(torch.arange(8, device=DEVICE) < -(-seqlens // PAGE_SIZE)[:, None], table, -1).int(),
        candidates=lists,
        **local,
    )
    return fresh, run(fresh, *tensors)


def tensors_of(batch_size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch_size, 4, HEAD_DIM, generator=generator)
    k, v = (torch.randn(NUM_PAGES, PAGE_SIZE, 2, HEAD_DIM, generator=generator) for _ in range(2))
    return q.to(DEVICE), k.to(DEVICE), v.to(DEVICE)


def assert_same_lists(tier, fresh):
    """Entry by entry, with the slot of each."""
    for i in range(tier.num_lists):
        begin, end = fresh.list_indptr[i : i + 2].tolist()
        ours = slice(i * tier.capacity, i * tier.capacity + int(tier.list_lengths[i]))
        assert torch.equal(tier.plan.list_positions[ours], fresh.list_positions[begin:end])
        assert torch.equal(tier.plan.list_slots[ours], fresh.list_slots[begin:end])


@pytest.mark.parametrize("sharing", ["query_head", "kv_head", "shared"])
@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("num_kv_splits", [1, 3])
def test_a_tier_gives_the_lists_and_outputs_of_a_fresh_plan(granularity, sharing, num_kv_splits):
    tensors = tensors_of(2)
    seqlens, table, indptr, indices, block_size = draw(granularity, sharing, [37, 64], seed=1)
    tier = make_tier(granularity, sharing, 2, block_size, num_kv_splits=num_kv_splits)
    tier.update(seqlen_kv=seqlens, page_table=table, indptr=indptr, indices=indices)
    tier.raise_if_refused()
    fresh, (want_out, want_lse) = expected(seqlens, table, indptr, indices, block_size, granularity, sharing, tensors)
    assert_same_lists(tier, fresh)
    out, lse = run(tier.plan, *tensors)
    torch.testing.assert_close(out, want_out, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse, want_lse, rtol=2e-6, atol=2e-6)


def test_an_update_forgets_the_one_before():
    tensors = tensors_of(2)
    tier = make_tier("token", "kv_head", 2, 1, num_kv_splits=2)
    long, short = draw("token", "kv_head", [64, 60], seed=2), draw("token", "kv_head", [3, 9], seed=3)
    for seqlens, table, indptr, indices, block_size in (short, long, short):
        tier.update(seqlen_kv=seqlens, page_table=table, indptr=indptr, indices=indices)
        tier.raise_if_refused()
        _, (want, _) = expected(seqlens, table, indptr, indices, block_size, "token", "kv_head", tensors)
        torch.testing.assert_close(run(tier.plan, *tensors)[0], want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("entry", "bad"), [(1, 37), (2, -2), (1, 2**31 - 1)])
def test_an_id_outside_the_request_is_named_and_its_rows_stay_unwritten(entry, bad):
    q, k, v = tensors_of(2)
    seqlens, table, indptr, indices, _ = draw("token", "shared", [37, 64], seed=4)
    indices[entry] = bad
    tier = make_tier("token", "shared", 2, 1, num_kv_splits=2)
    tier.update(seqlen_kv=seqlens, page_table=table, indptr=indptr, indices=indices)
    out = torch.full_like(q, 7.0)
    run(tier.plan, q, k, v, out=out)
    assert (out[0] == 7).all()
    assert (out[1] != 7).all()
    with pytest.raises(PlanError, match=rf"^indices\[{entry}\] is refused.*\[SET-RANGE\]$"):
        tier.raise_if_refused()
    tier.raise_if_refused()


def test_a_page_outside_the_pool_is_named():
    seqlens, table, indptr, indices, _ = draw("token", "shared", [64, 64], seed=5)
    table[1] = NUM_PAGES
    tier = make_tier("token", "shared", 2, 1)
    tier.update(seqlen_kv=seqlens, page_table=table, indptr=indptr, indices=indices)
    with pytest.raises(PlanError, match=r"^page_table\[1, \d\] is refused, but num_pages is 24 \[COORD-PAGE-RANGE\]$"):
        tier.raise_if_refused()


def test_a_list_longer_than_the_tier_is_refused_and_overruns_nothing():
    seqlens, table, _, _, _ = draw("token", "shared", [64, 64], seed=6)
    tier = plan_tier(**COMMON, batch_size=2, capacity=16, max_seqlen_kv=64, granularity="token", sharing="shared")
    indptr, indices = torch.tensor([0, 17, 20], dtype=torch.int32), torch.arange(20, dtype=torch.int32)
    indptr, indices = indptr.to(DEVICE), indices.to(DEVICE)
    tier.plan.list_slots.fill_(-5)
    tier.update(seqlen_kv=seqlens, page_table=table, indptr=indptr, indices=indices)
    assert (tier.plan.list_slots[19:] == -5).all()
    assert tier.list_lengths.tolist() == [0, 3]
    with pytest.raises(PlanError, match=r"^list is 0, but it has more tokens than the tier's 16 \[PLAN-CAPACITY\]$"):
        tier.raise_if_refused()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seqlen_kv": torch.zeros(3, dtype=torch.int32, device=DEVICE)}, "seqlen_kv.shape"),
        ({"indptr": torch.zeros(5, device=DEVICE)}, "indptr.dtype"),
        ({"page_table": torch.zeros((8, 2), dtype=torch.int32, device=DEVICE).t()}, r"page_table.stride\(\)"),
    ],
)
def test_an_update_with_unfit_tensors_is_refused_by_name(change, name):
    seqlens, table, indptr, indices, _ = draw("token", "kv_head", [37, 64], seed=7)
    tier = make_tier("token", "kv_head", 2, 1)
    given = {"seqlen_kv": seqlens, "page_table": table, "indptr": indptr, "indices": indices} | change
    with pytest.raises(PlanError, match=f"^{name} is"):
        tier.update(**given)


@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("seqlens", [[37, 64], [5, 1], [33, 36]])
@pytest.mark.parametrize(
    ("window", "num_sink_tokens"), [(1, 0), (9, 0), (0, 3), (0, 8), (10, 5), (64, 64), (30, 7), (3, 100)]
)
def test_window_and_sinks_join_every_list_on_the_gpu(granularity, seqlens, window, num_sink_tokens):
    seqlens, table, indptr, indices, block_size = draw(granularity, "kv_head", seqlens, seed=8)
    local = {"window": window, "num_sink_tokens": num_sink_tokens}
    tier = make_tier(granularity, "kv_head", 2, block_size, **local)
    tier.update(seqlen_kv=seqlens, page_table=table, indptr=indptr, indices=indices)
    tier.raise_if_refused()
    tensors = tensors_of(2)
    fresh, (want, _) = expected(seqlens, table, indptr, indices, block_size, granularity, "kv_head", tensors, **local)
    assert_same_lists(tier, fresh)
    torch.testing.assert_close(run(tier.plan, *tensors)[0], want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("index_parts", [2, 3, 7])
def test_programs_that_share_a_list_write_what_one_would(granularity, index_parts):
    tier = make_tier(granularity, "kv_head", 2, 1 if granularity == "token" else 4, index_parts=index_parts)
    for seed, lengths in ((9, [64, 37]), (10, [3, 9])):
        seqlens, table, indptr, indices, block_size = draw(granularity, "kv_head", lengths, seed=seed)
        tensors = tensors_of(2)
        fresh, (want, _) = expected(seqlens, table, indptr, indices, block_size, granularity, "kv_head", tensors)
        tier.update(seqlen_kv=seqlens, page_table=table, indptr=indptr, indices=indices)
        tier.raise_if_refused()
        assert_same_lists(tier, fresh)
        torch.testing.assert_close(run(tier.plan, *tensors)[0], want, rtol=2e-6, atol=2e-6)


def test_a_bad_page_in_the_share_of_one_program_refuses_the_whole_list():
    seqlens, table, indptr, indices, _ = draw("token", "shared", [64, 64], seed=5)
    indptr, indices = torch.tensor([0, 64, 128]).int().to(DEVICE), torch.arange(64).repeat(2).int().to(DEVICE)
    table[1, 7] = NUM_PAGES
    tier = make_tier("token", "shared", 2, 1, index_parts=4, num_kv_splits=2)
    tier.update(seqlen_kv=seqlens, page_table=table, indptr=indptr, indices=indices)
    q, k, v = tensors_of(2)
    out = torch.full_like(q, 7.0)
    run(tier.plan, q, k, v, out=out)
    assert (out[0] != 7).all()
    assert (out[1] == 7).all()
    with pytest.raises(PlanError, match=r"^page_table\[1, 7\] is refused"):
        tier.raise_if_refused()


def test_ids_past_one_tile_of_the_bitmap_keep_their_order():
    tier = plan_tier(
        **COMMON | {"num_pages": 1300}, batch_size=1, capacity=96, max_seqlen_kv=10400, granularity="token",
        sharing="shared", with_positions=True,
    )  # fmt: skip
    ids = torch.randperm(10400, generator=torch.Generator().manual_seed(11))[:96].int().to(DEVICE)
    table = torch.randperm(1300, generator=torch.Generator().manual_seed(12)).view(1, -1).int().to(DEVICE)
    lengths = torch.tensor([10400], dtype=torch.int32, device=DEVICE)
    tier.update(seqlen_kv=lengths, page_table=table, indptr=torch.tensor([0, 96]).int().to(DEVICE), indices=ids)
    tier.raise_if_refused()
    want = ids.sort().values
    assert torch.equal(tier.plan.list_positions, want)
    assert torch.equal(tier.plan.list_slots, table[0, want // PAGE_SIZE] * PAGE_SIZE + want % PAGE_SIZE)


def test_slots_are_as_wide_as_the_pool_asks_for_and_positions_are_kept_where_a_rule_asks_for_them():
    sizes = {"batch_size": 1, "capacity": 16, "max_seqlen_kv": 64, "granularity": "token", "sharing": "shared"}
    small, large = (plan_tier(**COMMON | {"num_pages": n}, **sizes) for n in (2**28 - 1, 2**28 + 8))
    assert small.plan.list_slots.dtype == torch.int32
    assert large.plan.list_slots.dtype == torch.int64
    assert small.plan.list_positions is None
    assert plan_tier(**COMMON, **sizes, score_rules=[SoftCap(5.0)]).plan.list_positions.numel() == 16
    table = torch.arange(2**28, 2**28 + 8, dtype=torch.int32, device=DEVICE)[None]
    large.update(
        seqlen_kv=torch.tensor([64], device=DEVICE), page_table=table, indptr=torch.tensor([0, 1], device=DEVICE),
        indices=torch.tensor([63], dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    large.raise_if_refused()
    assert int(large.plan.list_slots[0]) == 2**31 + 63


def test_another_requests_page_is_named_and_its_row_stays_unwritten():
    seqlens, table, indptr, indices, _ = draw("token", "shared", [64, 64], seed=13)
    indptr, indices = torch.tensor([0, 64, 128]).int().to(DEVICE), torch.arange(64).repeat(2).int().to(DEVICE)
    owned = torch.zeros(2, NUM_PAGES, dtype=torch.bool, device=DEVICE)
    owned.scatter_(1, table.long(), True)
    tier = make_tier("token", "shared", 2, 1)
    inputs = {"seqlen_kv": seqlens, "page_table": table, "indptr": indptr, "indices": indices}
    tier.update(**inputs, owned=owned)
    tier.raise_if_refused()
    owned[1, table[1, 5]] = False
    tier.update(**inputs, owned=owned)
    q, k, v = tensors_of(2)
    out = torch.full_like(q, 7.0)
    run(tier.plan, q, k, v, out=out)
    assert (out[1] == 7).all()
    limit = r"page_table\[1, 5\] is refused, but request 1 does not own that page \[SAFE-OWNER\]"
    with pytest.raises(PlanError, match=limit):
        tier.raise_if_refused()


@pytest.mark.parametrize("num_kv_splits", [1, 3])
def test_what_was_planned_for_a_retired_slot_writes_nothing(num_kv_splits):
    seqlens, table, indptr, indices, _ = draw("token", "kv_head", [64, 60], seed=14)
    tier = make_tier("token", "kv_head", 2, 1, num_kv_splits=num_kv_splits, has_generations=True)
    inputs = {"seqlen_kv": seqlens, "page_table": table, "indptr": indptr, "indices": indices}
    q, k, v = tensors_of(2)
    tier.update(**inputs)
    want = run(tier.plan, q, k, v)[0]
    tier.retire(1)
    out = torch.full_like(q, 7.0)
    run(tier.plan, q, k, v, out=out)
    assert torch.equal(out[0], want[0])
    assert (out[1] == 7).all()
    tier.update(**inputs)
    assert torch.equal(run(tier.plan, q, k, v)[0], want)


def test_a_tier_without_generations_says_so():
    with pytest.raises(PlanError, match=r"^has_generations is False"):
        make_tier("token", "kv_head", 2, 1).retire(0)


def test_a_step_is_an_update_and_a_run():
    seqlens, table, indptr, indices, block_size = draw("block", "kv_head", [37, 64], seed=15)
    tier, (q, k, v) = make_tier("block", "kv_head", 2, block_size, num_kv_splits=2), tensors_of(2)
    out, lse = torch.empty_like(q), torch.empty(2, 4, device=DEVICE)
    inputs = {"seqlen_kv": seqlens, "page_table": table, "indptr": indptr, "indices": indices}
    tier.step(q, k, v, out=out, lse=lse, **inputs)
    _, (want_out, want_lse) = expected(seqlens, table, indptr, indices, block_size, "block", "kv_head", (q, k, v))
    torch.testing.assert_close(out, want_out, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse, want_lse, rtol=2e-6, atol=2e-6)
    with pytest.raises(PlanError, match=r"^indptr.shape is"):
        tier.step(q, k, v, out=out, lse=lse, **inputs | {"indptr": indptr[:-1]})
    with pytest.raises(PlanError, match=r"^q.shape is"):
        tier.step(q[:1], k, v, out=out, lse=lse, **inputs)
