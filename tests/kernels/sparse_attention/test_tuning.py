"""Tiles, steps and splits by how many tiles share the processors."""

from dataclasses import replace

import pytest

from attnconform.kernels.sparse_attention.tuning import (
    Geometry,
    IndexShape,
    TileShape,
    choose_index_shape,
    choose_shape,
    count_tier_splits,
    largest_tile_m,
    least_steps,
)

GEOMETRY = Geometry(32, 8, 128, 128, 2, "kv_head", None, None, 132)


def decode_shape(num_requests: int, geometry: Geometry = GEOMETRY) -> TileShape:
    return choose_shape(1, largest_tile_m(geometry), 4, geometry, num_requests)


@pytest.mark.parametrize(
    ("num_requests", "steps"),
    [(1, (64, 8, 8)), (2, (128, 4, 2)), (8, (128, 4, 2)), (9, (64, 2, 4)), (12, (64, 2, 4)), (64, (64, 2, 4))],
)
def test_steps_of_a_decode_tile_by_how_many_tiles_there_are(num_requests, steps):
    shape = decode_shape(num_requests)
    assert (shape.tile_kv, shape.num_warps, shape.num_stages) == steps


def test_codes_have_one_more_stage_in_flight():
    assert decode_shape(64, replace(GEOMETRY, is_quantized=True)).num_stages == decode_shape(64).num_stages + 1


@pytest.mark.parametrize(
    ("num_requests", "capacity", "splits"),
    [(1, 4224, 16), (1, 512, 2), (1, 64, 1), (2, 4224, 11), (8, 4224, 4), (12, 4224, 5), (64, 4224, 1)],
)
def test_splits_of_a_tier_keep_all_processors_busy_with_chunks_that_are_worth_it(num_requests, capacity, splits):
    assert count_tier_splits(num_requests * 8, capacity, decode_shape(num_requests), GEOMETRY) == splits


def test_a_chunk_of_long_steps_has_fewer_of_them_in_decode_only():
    shape = decode_shape(2)
    assert least_steps(shape) == 3
    assert least_steps(replace(shape, tile_kv=64)) == least_steps(replace(shape, tile_m=128)) == 4


def index_shape(num_lists: int, capacity: int, unit: int) -> IndexShape:
    return choose_index_shape(num_lists, capacity, 128, 132, unit)


@pytest.mark.parametrize(
    ("num_lists", "capacity", "unit", "warps", "step"),
    [
        (512, 4224, 16, 4, 256),
        (512, 65536, 16, 8, 512),  # longer than what was measured
        (8, 4224, 16, 8, 512),
        (512, 4224, 1, 8, 1024),
        (512, 64, 1, 8, 64),
    ],
)
def test_warps_and_steps_of_an_index_by_its_lists_and_units(num_lists, capacity, unit, warps, step):
    shape = index_shape(num_lists, capacity, unit)
    assert (shape.num_warps, shape.expand_step) == (warps, step)


@pytest.mark.parametrize(("capacity", "unit", "parts"), [(4224, 16, 1), (65536, 16, 8), (4224, 1, 16)])
def test_programs_share_an_index_list_where_it_is_long_or_each_token_needs_its_page(capacity, unit, parts):
    assert index_shape(8, capacity, unit).parts == parts


def test_many_lists_are_not_shared_out():
    assert index_shape(512, 65536, 1).parts == 1
