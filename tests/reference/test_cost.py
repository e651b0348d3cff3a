"""Cost models: the articles' numbers stand in the docstrings; here are the laws between them, and what is refused."""

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.conformance.cases import profiles
from attnconform.reference.cost.end_to_end import StepTimes, end_to_end_speedup, total_time
from attnconform.reference.cost.flops import arithmetic_intensity, attention_flops, block_flops
from attnconform.reference.cost.gather import (
    Bandwidths,
    break_even_reads,
    direct_time,
    gather_time,
    gather_traffic,
)
from attnconform.reference.cost.scales import GRANULARITIES, num_scales, scale_bytes
from attnconform.reference.cost.tiles import (
    aligned_tiles,
    block_use,
    execution_amplification,
    index_use,
    num_blocks,
    tile_efficiency,
)
from attnconform.reference.cost.traffic import (
    block_mask_bytes,
    index_table_bytes,
    kv_bytes,
    memory_time,
    roofline_time,
    step_bytes,
    transaction_utilization,
)
from attnconform.reference.cost.workspace import gradient_partial_bytes, hot_atomics, partial_state_bytes
from attnconform.reference.errors import RefusedInput

profiles.load_profile()


@settings(max_examples=profiles.examples(200))
@given(st.sets(st.integers(0, 300), max_size=60), st.sampled_from((1, 8, 16, 64)), st.sampled_from((16, 24, 32, 64)))
def test_tiles_are_those_that_hold_a_token_counted_one_by_one(pages: set[int], page_size: int, tile_size: int) -> None:
    tiles = {t // tile_size for page in pages for t in range(page * page_size, (page + 1) * page_size)}
    listed = np.array(sorted(pages), dtype=np.int64)
    assert aligned_tiles(listed, page_size=page_size, tile_size=tile_size) == len(tiles)
    assert 0 < tile_efficiency(len(pages) * page_size, len(tiles), tile_size) <= 1


@settings(max_examples=profiles.examples(200))
@given(st.sets(st.integers(0, 200), min_size=1, max_size=40), st.integers(1, 70))
def test_tokens_touch_between_k_over_b_and_k_blocks(tokens: set[int], block_size: int) -> None:
    touched = len({t // block_size for t in tokens})
    use = block_use(len(tokens), touched, block_size)
    assert 1 / block_size <= use <= 1
    assert use == len(tokens) / (touched * block_size)


@pytest.mark.parametrize("direct", [50.0, 100.0, 400.0])
@pytest.mark.parametrize("launch", [0.0, 3e-6])
def test_from_the_break_even_on_the_copy_is_faster_and_before_it_is_not(direct: float, launch: float) -> None:
    bandwidths = Bandwidths(direct=direct * 1e9, gather=direct * 1e9, write=1e12, contiguous=1e12)
    reads = int(break_even_reads(1e6, bandwidths, launch=launch))
    assert gather_time(1e6, bandwidths, num_reads=reads, launch=launch) < direct_time(1e6, bandwidths, num_reads=reads)
    fewer = reads - 1
    assert gather_time(1e6, bandwidths, num_reads=fewer, launch=launch) >= direct_time(1e6, bandwidths, num_reads=fewer)


def test_a_copy_never_pays_where_scattered_reads_are_as_fast() -> None:
    same = Bandwidths(direct=1e12, gather=1e12, write=1e12, contiguous=1e12)
    assert break_even_reads(1e6, same) == inf
    # used once, it adds a writing and a reading: the time of twice the bytes
    added = gather_time(1e6, same, num_reads=1) - direct_time(1e6, same, num_reads=1)
    assert added == pytest.approx(memory_time(gather_traffic(1, 1e6), 1e12))


def test_a_row_of_uneven_widths_pads_to_the_longest() -> None:
    assert index_use(np.array([32] * 99 + [800]), 800) == pytest.approx((32 * 99 + 800) / 80000)
    assert index_use(np.empty(0, dtype=np.int64), 8) == 1.0


def test_flops_of_blocks_are_those_of_their_elements() -> None:
    assert block_flops(9, q_block_size=2, kv_block_size=2, head_dim=64) == attention_flops(36, head_dim_qk=64)
    assert attention_flops(10, head_dim_qk=576, head_dim_vo=512) == 2 * 10 * 1088


@pytest.mark.parametrize("element_bytes", [1, 2, 4])
def test_a_decode_row_has_intensity_2_over_the_bytes_of_an_element(element_bytes: int) -> None:
    moved = kv_bytes(2048, head_dim_qk=128, k_bytes=element_bytes, v_bytes=element_bytes)
    assert arithmetic_intensity(attention_flops(2048, head_dim_qk=128), moved) == 2 / element_bytes


def test_k_and_v_may_be_stored_differently() -> None:
    assert kv_bytes(10, head_dim_qk=64, head_dim_vo=32, k_bytes=2, v_bytes=1) == 10 * (128 + 32)
    shape = {"num_pages": 3, "page_size": 8, "num_kv_heads": 2, "head_dim": 64}
    assert scale_bytes("channel", "token", **shape) == 4 * (2 * 64 + 2 * 24)  # type: ignore[arg-type]


def test_finer_scales_are_never_fewer() -> None:
    shape = {"num_pages": 5, "page_size": 16, "num_kv_heads": 4, "head_dim": 128}
    count = {g: num_scales(g, **shape) for g in GRANULARITIES}
    assert count["tensor"] <= count["head"] <= count["page"] <= count["token"]
    assert count["head"] <= count["channel"] <= count["page_channel"]


def test_the_longer_of_computing_and_moving_bounds_the_time() -> None:
    assert roofline_time(2e12, 1e9, peak_flops=1e15, bandwidth=1e12) == 2e-3
    assert roofline_time(1e12, 4e9, peak_flops=1e15, bandwidth=1e12) == 4e-3


def test_a_mask_of_nothing_is_amplified_by_1_and_blocks_of_nothing_without_end() -> None:
    assert (execution_amplification(0, 0), execution_amplification(4, 0)) == (1.0, inf)


def test_the_articles_block_mask_of_a_million_tokens_has_61_million_blocks() -> None:
    # at a byte a block, the article's 60 MB; with blocks of 1024 under 1 MB
    assert num_blocks(1_000_000, 128) ** 2 == 61_042_969
    assert num_blocks(1_000_000, 1024) ** 2 == 954_529


def test_what_surrounds_a_kernel_bounds_its_worth() -> None:
    around = StepTimes(route=12, topk=10, index=8, reduce=5, launch=6)
    assert end_to_end_speedup(100, around) == pytest.approx(100 / 41)
    assert total_time(StepTimes()) == 0


EXAMPLE = Bandwidths(direct=1.0, gather=1.0, write=1.0, contiguous=0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention_flops(-1, head_dim_qk=8), r"num_keys is -1, but must be finite.*\[COST-FLOPS\]"),
        (lambda: attention_flops(1, head_dim_qk=0), r"head_dim_qk is 0, but must be finite and above 0 \[COST-FLOPS\]"),
        (lambda: block_flops(1, q_block_size=0, kv_block_size=1, head_dim=1), r"q_block_size is 0.*\[COST-FLOPS\]"),
        (lambda: arithmetic_intensity(1, 0), r"num_bytes is 0.*\[COST-INTENSITY\]"),
        (lambda: num_blocks(5, 0), r"block_size is 0.*\[COST-GRID\]"),
        (lambda: aligned_tiles(np.array([1, 1]), page_size=1, tile_size=1), r"pages is 2, but only 1 of them differ"),
        (lambda: tile_efficiency(65, 1, 64), r"part is 65, but the whole is 64 \[COST-TILES\]"),
        (lambda: block_use(9, 1, 8), r"part is 9, but the whole is 8 \[COST-UTILIZATION\]"),
        (lambda: index_use(np.array([1, 9]), 8), r"lengths\[1\] is 9, but width is 8 \[COST-INDEX-USE\]"),
        (lambda: execution_amplification(3, 4), r"num_edges is 4, but only 3 elements are computed"),
        (lambda: kv_bytes(1, head_dim_qk=8, k_bytes=inf), r"k_bytes is inf, but must be finite"),
        (lambda: index_table_bytes(-1), r"num_entries is -1.*\[COST-INDEX-BYTES\]"),
        (lambda: block_mask_bytes(1, -1), r"num_rows is -1.*\[COST-INDEX-BYTES\]"),
        (lambda: step_bytes(1, num_rows=1, head_dim_qk=0, head_dim_vo=1), r"head_dim_qk is 0.*\[COST-BYTES\]"),
        (lambda: transaction_utilization(1, 0), r"num_transactions is 0.*\[COST-TRANSACTION\]"),
        (lambda: memory_time(1, 0), r"bandwidth is 0.*\[COST-TIME\]"),
        (lambda: roofline_time(1, 1, peak_flops=0, bandwidth=1), r"peak_flops is 0.*\[COST-TIME\]"),
        (lambda: gather_time(1, EXAMPLE, num_reads=1), r"contiguous is 0.0.*\[COST-GATHER\]"),
        (lambda: partial_state_bytes(-1, num_qo_heads=1, head_dim_vo=1), r"num_splits is -1.*\[COST-PARTIALS\]"),
        (lambda: hot_atomics(1, page_size=0, head_dim=1), r"page_size is 0.*\[COST-ATOMICS\]"),
        (lambda: gradient_partial_bytes(1, -1, page_size=1, head_dim=1), r"num_pages is -1.*\[COST-GRADIENTS\]"),
        (lambda: total_time(StepTimes(topk=-1)), r"topk is -1.*\[COST-END-TO-END\]"),
        (lambda: num_scales("row", num_pages=1, page_size=1, num_kv_heads=1, head_dim=1), r"granularity is row, but"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_numbers_that_mean_nothing_are_refused_by_name(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RefusedInput, match=message):
        call()
