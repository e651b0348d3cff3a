"""Tiles, steps and splits by how many tiles share the processors."""

from dataclasses import replace

import pytest

from attnconform.kernels.sparse_attention.tuning import (
    Geometry,
    TileShape,
    choose_shape,
    count_tier_splits,
    largest_tile_m,
)

GEOMETRY = Geometry(32, 8, 128, 128, 2, "kv_head", None, None, 132)


def decode_shape(num_requests: int, geometry: Geometry = GEOMETRY) -> TileShape:
    return choose_shape(1, largest_tile_m(geometry), 4, geometry, num_requests)


@pytest.mark.parametrize(
    ("num_requests", "steps"),
    [(1, (64, 8, 8)), (2, (64, 8, 8)), (3, (128, 4, 2)), (16, (128, 4, 2)), (17, (64, 2, 4)), (64, (64, 2, 4))],
)
def test_steps_of_a_decode_tile_by_how_many_tiles_there_are(num_requests, steps):
    shape = decode_shape(num_requests)
    assert (shape.tile_kv, shape.num_warps, shape.num_stages) == steps


def test_codes_have_one_more_stage_in_flight():
    assert decode_shape(64, replace(GEOMETRY, is_quantized=True)).num_stages == decode_shape(64).num_stages + 1


@pytest.mark.parametrize(
    ("num_requests", "capacity", "splits"), [(1, 4224, 16), (1, 512, 2), (1, 64, 1), (8, 4224, 4), (64, 4224, 1)]
)
def test_splits_of_a_tier_keep_all_processors_busy_with_chunks_that_are_worth_it(num_requests, capacity, splits):
    assert count_tier_splits(num_requests * 8, capacity, decode_shape(num_requests), GEOMETRY) == splits
