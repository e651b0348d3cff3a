"""Which backwards go to the kernels of Hopper, and by what boxes they read: decided without a GPU."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from test_backward import DEVICE, Case, make_plan

from attnconform.kernels.sparse_attention import BackwardHints, PlanError, hopper_backward_choice, plan_backward
from attnconform.kernels.sparse_attention.backward_hints import KeyShape, QueryShape
from attnconform.kernels.sparse_attention.dropout import Dropout
from attnconform.kernels.sparse_attention.hopper_backward_choice import PAIR_LANES, SLOT_TILE, TASK_LANES, box_size
from attnconform.kernels.sparse_attention.rules import Alibi, Causal, Custom, HeadWindow, RelativeBias, SoftCap

WHY_NOT_HERE = hopper_backward_choice.why_not_here(DEVICE)
SCRIPT = Path(__file__).with_name("compile_hopper.py")
QUERY_SHAPE, KEY_SHAPE = QueryShape(TASK_LANES, 64, 8, 3), KeyShape(SLOT_TILE, PAIR_LANES, 8, 3)
HOPPER = BackwardHints(kernels="hopper", query_shape=QUERY_SHAPE, key_shape=KEY_SHAPE)
CASE = Case(
    seqlen_q=(70, 0, 40),
    seqlen_kv=(90, 0, 48),
    head_dim_qk=64,
    head_dim_vo=64,
    page_size=16,
    dtype=torch.bfloat16,
    mask_rule=Causal(),
)
ALIBI = Alibi((0.5, 0.25, 0.125, 0.0625))
# lists of two blocks of 16, pages of 32: a box is no longer than a block
BLOCKS = {
    "seqlen_q": (40,), "seqlen_kv": (96,), "page_size": 32, "block_size": 16, "q_block_size": 40, "sharing": "shared",
}  # fmt: skip


@triton.jit
def is_before(q_idx, kv_idx, request, data):
    return kv_idx < q_idx


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with the GPU."""
    monkeypatch.setattr(hopper_backward_choice, "why_not_here", lambda device: None)


def boxes(case: Case, hints: BackwardHints) -> tuple[int | None, int | None]:
    """Of dQ, and of dK and dV; None where other kernels run."""
    work = plan_backward(make_plan(case), hints)
    return tuple(None if shape is None else shape.box for shape in (work.hopper_queries, work.hopper_keys))


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("changes", "box"),
    [
        ({}, 16),
        ({"page_size": 8}, 8),
        ({"page_size": 48}, 16),
        ({"page_size": 256}, 64),
        ({"dtype": torch.float16}, 16),
        ({"head_dim_qk": 128, "head_dim_vo": 128}, 16),
        ({"score_rules": (ALIBI,)}, 16),
        ({"score_rules": (SoftCap(3.0),), "sink_logits": (0.0, 1.0, 2.0, 3.0)}, 16),
        ({"mask_rule": HeadWindow((3, 40, None, 9), (0, None, 5, 0))}, 16),
        ({**BLOCKS, "lists": ((1, 4),)}, 16),
        ({**BLOCKS, "lists": ((1,),), "block_size": 48}, 16),
        ({**BLOCKS, "lists": ((1, 4),), "block_size": 8}, 8),
    ],
)
def test_a_backward_that_the_kernels_can_say(changes: dict[str, object], box: int) -> None:
    assert boxes(replace(CASE, **changes), HOPPER) == (box, box)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"dtype": torch.float32}, "bfloat16 and float16"),
        ({"head_dim_vo": 128}, "alike"),
        ({"head_dim_qk": 96, "head_dim_vo": 96}, "head_dim 64 or 128"),
        ({"dropout": Dropout(rate=0.3, seed=1)}, "drop no edges"),
        ({"mask_rule": Custom(is_before)}, "no Custom mask"),
        ({"score_rules": (ALIBI, SoftCap(3.0))}, "one Alibi"),
        ({"score_rules": (RelativeBias(((0.0,),) * 4),)}, "one Alibi"),
        ({**BLOCKS, "lists": ((1, 4),), "window": 5}, "beside a list"),
        ({"page_size": 4}, "whole boxes"),
        ({"page_size": 12}, "whole boxes"),
        ({**BLOCKS, "lists": ((1, 5),), "block_size": 4}, "whole boxes"),
        ({**BLOCKS, "lists": ((3, 8, 9),), "block_size": 1}, "whole boxes"),
    ],
)
def test_a_backward_that_the_kernels_cannot_say(changes: dict[str, object], limit: str) -> None:
    case = replace(CASE, **changes)
    with pytest.raises(PlanError, match=f"kernels is hopper, but .*{limit}"):
        plan_backward(make_plan(case), HOPPER)
    assert boxes(case, BackwardHints()) == (None, None)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("slope", "sm_scale"), [(0.5, 2.0**-61), (0.5, 2.0**61), (2.0**101, 1.0), (2.0**50, 2.0**-51)])
def test_slopes_and_lse_before_sm_scale_must_be_numbers(slope: float, sm_scale: float) -> None:
    the_plan = make_plan(replace(CASE, score_rules=(Alibi((slope, 0.5, 0.5, 0.5)),)))
    with pytest.raises(PlanError, match="divide slopes and lse by sm_scale"):
        plan_backward(replace(the_plan, sm_scale=sm_scale), HOPPER)


@pytest.mark.usefixtures("on_hopper")
def test_every_one_of_the_two_is_chosen_for_itself() -> None:
    small_queries = replace(HOPPER, query_shape=QueryShape(32, 64, 4, 2))
    small_keys = replace(HOPPER, key_shape=KeyShape(64, 64, 4, 2))
    assert boxes(CASE, small_queries) == (None, 16)
    assert boxes(CASE, small_keys) == (16, None)
    assert boxes(CASE, replace(HOPPER, mode="hybrid", reuse_threshold=1))[0] is None
    with pytest.raises(PlanError, match="128 slots"):
        plan_backward(make_plan(CASE), replace(small_keys, query_shape=QueryShape(32, 64, 4, 2)))


@pytest.mark.usefixtures("on_hopper")
def test_the_kernels_are_chosen_by_hint_and_not_beside_shapes_that_are_asked_for() -> None:
    assert boxes(CASE, replace(HOPPER, kernels="plain")) == (None, None)
    assert boxes(CASE, replace(HOPPER, kernels=None)) == (None, None)
    with pytest.raises(PlanError, match="kernels is quick, but must be None, hopper or plain"):
        BackwardHints(kernels="quick")  # type: ignore[arg-type]


@pytest.mark.skipif(WHY_NOT_HERE is None, reason="a Hopper GPU runs them")
def test_other_devices_run_the_other_kernels() -> None:
    assert boxes(CASE, BackwardHints()) == (None, None)
    with pytest.raises(PlanError, match=f"kernels is hopper, but {re.escape(str(WHY_NOT_HERE))}"):
        plan_backward(make_plan(CASE), HOPPER)


def test_a_box_is_no_longer_than_what_lies_together() -> None:
    shuffled = replace(CASE, **BLOCKS, lists=((0, 1, 3, 4),))
    assert box_size(make_plan(replace(shuffled, page_table=((3, 0, 4),)))) == 16
    assert box_size(make_plan(replace(shuffled, lists=((0, 1),), page_table=((3, 0, 4),)))) == 32


def test_the_kernels_compile_and_do_not_spill_sums(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(SCRIPT), "backward"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("compiled ")]
    # Of some, places and counts of both groups; a tile of sums or of weights would be 16 registers or more, there and
    # back. Of small blocks, where shared memory begins, which every part of the kernel asks for.
    limits = {"queries": 0, "keys": 5, "rows": 14, "unions": 0, "unions of small blocks": 2}
    assert len(lines) == len(limits)
    for line, (kernel, limit) in zip(lines, limits.items(), strict=True):
        name, _, rest = line.partition(": ")
        assert name == f"compiled {kernel}"
        assert rest.endswith(" spills among products of 2 groups")
        assert int(rest.split()[0]) <= limit
    for kernel in ("queries", "unions", "unions of small blocks"):
        assert f"stored {kernel}: 0" in done.stdout.splitlines()
    for kernel in ("rows", "unions", "unions of small blocks"):
        assert f"serialized {kernel}: False" in done.stdout.splitlines()
