"""Which calls go to the kernel of Hopper, and how TMA sees a cache: decided without a GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnconform.kernels.sparse_attention import CandidateLists, PlanError, hopper_choice
from attnconform.kernels.sparse_attention.hopper import Grid, find_grid, has_wide_rows
from attnconform.kernels.sparse_attention.hopper_choice import Call, box_size, choose_box, why_not, why_not_here
from attnconform.kernels.sparse_attention.rules import Alibi, RelativeBias, SoftCap
from attnconform.kernels.sparse_attention.tuning import Choice, Geometry, choose_shape, largest_tile_m

SCRIPT = Path(__file__).with_name("compile_hopper.py")
ON_GPU = torch.device("cuda", 0)
GEOMETRY = Geometry(32, 8, 128, 128, 2, None, None, None, 132)
CALL = Call(
    page_size=16, sm_scale=0.1, has_custom_mask=False, has_dropout=False, score_rules=(), candidates=None,
    has_local=False, order="position",
)  # fmt: skip
ALIBI = Alibi((0.5,) * 32)


def blocks(size: int, granularity: str = "block") -> CandidateLists:
    nothing = torch.zeros(1, dtype=torch.int32)
    return CandidateLists(granularity=granularity, sharing="kv_head", indptr=nothing, indices=nothing, block_size=size)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"page_size": 256},
        {"page_size": 48},
        {"score_rules": (ALIBI,)},
        {"score_rules": (SoftCap(20.0),)},
        {"candidates": blocks(64)},
        {"candidates": blocks(64), "score_rules": (SoftCap(20.0),)},
        {"sm_scale": 2.0**-126},
        {"sm_scale": 2.0**-100, "score_rules": (ALIBI,)},
    ],
)
def test_a_call_that_the_kernel_can_say(changes):
    assert why_not(GEOMETRY, replace(CALL, **changes)) is None


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"page_size": 8}, "16 keys"),
        ({"page_size": 24}, "16 keys"),
        ({"score_rules": (ALIBI, SoftCap(20.0))}, "one Alibi"),
        ({"score_rules": (RelativeBias(((0.0,),) * 32),)}, "one Alibi"),
        ({"candidates": blocks(64), "score_rules": (ALIBI,)}, "one Alibi"),
        ({"candidates": blocks(8)}, "16 keys"),
        ({"candidates": blocks(1, "token")}, "lists of blocks"),
        ({"candidates": blocks(64), "has_local": True}, "beside a list"),
        ({"candidates": blocks(64), "order": "slot"}, "by position"),
        ({"has_custom_mask": True}, "Custom"),
        ({"has_dropout": True}, "drops"),
        ({"sm_scale": 0.0}, "above 0"),
        ({"sm_scale": -1.0}, "above 0"),
        ({"sm_scale": 2.0**-110, "score_rules": (ALIBI,)}, "divides slopes"),
        ({"sm_scale": 2.0**61, "score_rules": (ALIBI,)}, "divides slopes"),
    ],
)
def test_a_call_that_the_kernel_cannot_say(changes, limit):
    assert limit in (why_not(GEOMETRY, replace(CALL, **changes)) or "")


@pytest.mark.parametrize(
    "changes",
    [{"element_size": 4}, {"head_dim_qk": 96, "head_dim_vo": 96}, {"head_dim_vo": 64}, {"is_quantized": True}],
)
def test_a_geometry_that_the_kernel_does_not_have(changes):
    assert why_not(replace(GEOMETRY, **changes), CALL) is not None


@pytest.mark.parametrize(
    ("page_size", "block_size", "box"), [(16, None, 16), (256, None, 128), (48, None, 16), (128, 32, 32), (64, 96, 32)]
)
def test_a_box_lies_in_one_page_and_one_block(page_size, block_size, box):
    lists = None if block_size is None else blocks(block_size)
    assert box_size(replace(CALL, page_size=page_size, candidates=lists)) == box


def test_a_box_of_a_capped_call_lies_in_its_smaller_tile():
    assert box_size(replace(CALL, page_size=256, score_rules=(SoftCap(20.0),))) == 64


@pytest.mark.parametrize(
    ("shape", "view", "is_wide"),
    [
        ((6, 4, 64), (slice(None),), True),
        ((6, 4, 64), (slice(1, None), slice(1, 3)), True),
        ((6, 4, 72), (slice(None), slice(None), slice(64)), True),
        ((6, 4, 72), (slice(None), slice(None), slice(8, None)), True),
        ((6, 4, 68), (slice(None), slice(None), slice(64)), False),
        ((6, 4, 72), (slice(None), slice(None), slice(4, 68)), False),
        ((6, 4, 128), (slice(None), slice(None), slice(None, None, 2)), False),
    ],
)
def test_rows_are_wide_where_every_one_starts_at_16_bytes_and_is_dense(shape, view, is_wide):
    assert has_wide_rows(torch.zeros(shape, dtype=torch.bfloat16)[view]) is is_wide


@pytest.fixture
def on_hopper(monkeypatch):
    """As on a machine with the GPU."""
    monkeypatch.setattr(hopper_choice, "why_not_here", lambda device: None)


def test_the_kernel_is_chosen_by_shape_and_by_hint(on_hopper):
    asked = {name: replace(GEOMETRY, choice=Choice(forward=name)) for name in ("hopper", "plain")}
    assert choose_box(GEOMETRY, CALL, ON_GPU) == 16
    assert choose_box(asked["plain"], CALL, ON_GPU) == 0
    assert choose_box(replace(GEOMETRY, tile_kv=64), CALL, ON_GPU) == 0
    assert choose_box(replace(GEOMETRY, choice=Choice(num_warps=4)), CALL, ON_GPU) == 0
    assert choose_box(replace(asked["hopper"], tile_kv=64), CALL, ON_GPU) == 16
    assert choose_box(GEOMETRY, replace(CALL, has_dropout=True), ON_GPU) == 0


def test_what_is_asked_for_and_cannot_run_is_refused(on_hopper):
    asked = replace(GEOMETRY, choice=Choice(forward="hopper"))
    with pytest.raises(PlanError, match=r"choice\.forward is hopper, but its kernel drops no edges"):
        choose_box(asked, replace(CALL, has_dropout=True), ON_GPU)
    with pytest.raises(PlanError, match=r"choice\.forward is quick, but must be None, hopper or plain"):
        choose_box(replace(GEOMETRY, choice=Choice(forward="quick")), CALL, ON_GPU)  # type: ignore[arg-type]


def test_other_devices_run_attend_kernel():
    cpu = torch.device("cpu")
    assert "not on cpu" in (why_not_here(cpu) or "")
    assert choose_box(GEOMETRY, CALL, cpu) == 0
    with pytest.raises(PlanError, match="not on cpu"):
        choose_box(replace(GEOMETRY, choice=Choice(forward="hopper")), CALL, cpu)


def test_a_tile_of_few_rows_is_one_of_attend_kernel_unless_asked_for():
    boxed = replace(GEOMETRY, box=16)
    asked = replace(boxed, choice=Choice(forward="hopper"))
    cap = largest_tile_m(boxed)
    shapes = {rows: choose_shape(rows, cap, 4, boxed, 1) for rows in (1, 16, 17, 4096)}
    assert {rows: shape.box for rows, shape in shapes.items()} == {1: 0, 16: 0, 17: 16, 4096: 16}
    assert shapes[4096].tile_q * 4 == shapes[4096].tile_m == cap == 128
    one = choose_shape(1, cap, 4, asked, 1)
    assert (one.tile_q, one.tile_m, one.box) == (1, 128, 16)


# strides and sizes of pages, tokens, heads and dimensions, in elements
@pytest.mark.parametrize(
    ("strides", "sizes", "grid"),
    [
        ((16 * 1024, 1024, 128, 1), (5, 16, 8, 128), Grid(80, 1024, 1024, 16, 0, 128)),  # NHD
        ((16 * 1024, 128, 16 * 128, 1), (5, 16, 8, 128), Grid(640, 128, 128, 128, 16, 0)),  # HND
        ((32 * 1024, 2048, 128, 1), (5, 16, 8, 128), Grid(80, 1024, 2048, 16, 0, 128)),  # K and V side by side
        ((64 * 1024, 1024, 128, 1), (5, 16, 8, 128), Grid(4 * 64 + 16, 1024, 1024, 64, 0, 128)),  # room between pages
        ((16 * 136, 136, 136 * 16, 1), (2, 16, 1, 128), Grid(32, 128, 136, 16, 0, 0)),  # a padded row
        ((7, 64, 3, 1), (1, 16, 1, 64), Grid(16, 64, 64, 0, 0, 0)),  # strides of axes of one element
    ],
)
def test_a_cache_is_a_grid_of_rows(strides, sizes, grid):
    found = find_grid(strides, sizes, 2)
    assert found == grid
    num_pages, page_size, num_heads, head_dim = sizes
    for page, token, head in ((0, 0, 0), (num_pages - 1, page_size - 1, num_heads - 1), (0, 3, num_heads // 2)):
        row = page * grid.page_rows + head * grid.head_rows + token
        column = head * grid.head_columns
        place = sum(i * s for i, s in zip((page, token, head), strides, strict=False) if i)
        assert row * grid.row_stride + column == place
        assert row < grid.num_rows
        assert column + head_dim <= grid.num_columns


@pytest.mark.parametrize(
    ("strides", "sizes"),
    [
        ((16 * 1024 + 8, 1024, 128, 1), (5, 16, 8, 128)),  # a page that starts within a row
        ((16 * 1028, 1028, 128, 1), (5, 16, 8, 128)),  # rows of 2,056 bytes
        ((16 * 1056, 1056, 132, 1), (5, 16, 8, 128)),  # heads of 264 bytes
        ((16 * 2048, 2048, 256, 2), (5, 16, 8, 128)),  # every other number
        ((0, 0, 128, 1), (5, 16, 8, 128)),  # one token for all
        ((16 * 1024, 1024, 1536, 1), (5, 16, 8, 128)),  # heads between rows
        ((2**40, 128, 2048, 1), (5, 16, 8, 128)),  # rows past 31 bits
    ],
)
def test_a_cache_that_is_no_grid_of_rows(strides, sizes):
    assert find_grid(strides, sizes, 2) is None


def test_the_kernel_compiles_and_spills_nothing_where_it_multiplies(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("compiled ")]
    names = ("plain", "alibi", "cap", "lists", "unions", "unions of small blocks")
    assert [line.split(":")[0] for line in lines] == [f"compiled {name}" for name in names]
    assert lines[0].endswith(": 0 spills among products of 2 groups")
    assert lines[4].endswith(": 0 spills among products of 3 groups")
