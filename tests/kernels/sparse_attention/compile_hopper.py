"""Compiles the kernels of Hopper for a GPU that is not there, and counts spills between their products.

Those of the backward where its name is given. A process of its own: once Triton interprets, it compiles no more.
Nothing is launched.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import triton
from compile_without_gpu import Target
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from attnconform.kernels.sparse_attention import (
    BackwardHints,
    CandidateLists,
    Plan,
    hopper_backward_choice,
    hopper_choice,
    hopper_union_choice,
    plan,
    plan_backward,
)
from attnconform.kernels.sparse_attention.backward_hints import KeyShape, QueryShape
from attnconform.kernels.sparse_attention.backward_plan import allocate_buffers
from attnconform.kernels.sparse_attention.backward_query import RowInputs
from attnconform.kernels.sparse_attention.forward import launch_run
from attnconform.kernels.sparse_attention.hopper_backward import (
    launch_hopper_keys,
    launch_hopper_queries,
    launch_hopper_rows,
    launch_hopper_union_queries,
)
from attnconform.kernels.sparse_attention.hopper_backward_choice import PAIR_LANES, SLOT_TILE, TASK_LANES
from attnconform.kernels.sparse_attention.rules import Alibi, Causal, SoftCap
from attnconform.kernels.sparse_attention.tuning import Choice

ROWS, HEADS, KV_HEADS, DIM, PAGE = 256, 32, 8, 128, 16
BLOCKS = CandidateLists(
    granularity="block", sharing="shared", block_size=PAGE, q_block_size=ROWS, indptr=torch.tensor([0, 2]),
    indices=torch.tensor([1, 3]),
)  # fmt: skip
OWN_BLOCKS = CandidateLists(  # a list for every row
    granularity="block", sharing="shared", block_size=64, indptr=torch.arange(ROWS + 1),
    indices=torch.arange(ROWS).int() % (ROWS // 64),
)  # fmt: skip
SMALL_BLOCKS = replace(OWN_BLOCKS, block_size=PAGE)
VARIANTS = {
    "plain": {"mask_rule": Causal()},
    "alibi": {"mask_rule": Causal(), "score_rules": [Alibi((0.5,) * HEADS)]},
    "cap": {"mask_rule": Causal(), "score_rules": [SoftCap(20.0)]},
    "lists": {"candidates": BLOCKS},
    "unions": {"mask_rule": Causal(), "candidates": OWN_BLOCKS, "page_size": 64, "num_kv_heads": 2},
    "unions of small blocks": {"mask_rule": Causal(), "candidates": SMALL_BLOCKS},
}


def compile_only(run: Callable, compiled: list) -> Callable:
    """A call of a kernel that ends where it would be launched."""

    class Uncalled:
        def __getitem__(self, grid: object) -> Callable:
            return lambda *arguments: None

    def instead(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> object:
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))
        return Uncalled()

    return instead


def make_plan(**changes: object) -> Plan:
    page_size = changes.get("page_size", PAGE)
    options = {
        "qo_indptr": [0, ROWS], "seqlen_kv": [ROWS], "page_table": torch.arange(ROWS // page_size).int()[None],
        "page_size": page_size, "num_pages": ROWS // page_size, "num_qo_heads": HEADS, "num_kv_heads": KV_HEADS,
        "head_dim_qk": DIM, "head_dim_vo": DIM, "sm_scale": 0.1, "dtype": torch.bfloat16, "device": "cpu",
        "choice": Choice(forward="hopper"),
    }  # fmt: skip
    return plan(**options | changes)


def attend(**rules: object) -> None:
    the_plan = make_plan(**rules)
    q, k, v, out, lse = (torch.zeros(shape, dtype=dtype) for _, shape, dtype in the_plan.tensor_shapes)
    launch_run(the_plan, q, k, v, None, None, out, lse)


def differentiate(what: str) -> None:
    """dQ, or dK and dV, of tasks and pairs as a long prompt has them."""
    the_plan = make_plan(**VARIANTS["plain"])
    hints = BackwardHints(query_shape=QueryShape(TASK_LANES, 64, 8, 3), key_shape=KeyShape(SLOT_TILE, PAIR_LANES, 8, 3))
    work = plan_backward(the_plan, replace(hints, kernels="hopper"))
    assert work.hopper_queries is not None
    assert work.keys is not None
    assert work.hopper_keys is not None
    buffers = allocate_buffers(the_plan, work)
    q, k, v, out, _lse = (torch.zeros(shape, dtype=dtype) for _, shape, dtype in the_plan.tensor_shapes)
    inputs = RowInputs(q, k, v, torch.zeros_like(out), buffers.lse_log2, buffers.delta)
    if what == "queries":
        launch, parts = work.launches[-1], buffers.dq_parts[-1]
        assert launch_hopper_queries(the_plan, launch, inputs, torch.zeros_like(q), parts, work.hopper_queries)
    else:
        sums = (torch.zeros_like(k), torch.zeros_like(v))
        assert launch_hopper_keys(the_plan, work.keys, inputs, *sums, buffers.parts, work.hopper_keys)


def differentiate_rows(what: str, lists: str) -> None:
    """dK and dV, or dQ over unions, of lists for every row."""
    the_plan = make_plan(**VARIANTS[lists])
    work = plan_backward(the_plan, BackwardHints(kernels="hopper"))
    assert work.keys is not None
    assert work.hopper_union is not None
    buffers = allocate_buffers(the_plan, work)
    q, k, v, out, _lse = (torch.zeros(shape, dtype=dtype) for _, shape, dtype in the_plan.tensor_shapes)
    inputs = RowInputs(q, k, v, torch.zeros_like(out), buffers.lse_log2, buffers.delta)
    if what == "unions":
        assert launch_hopper_union_queries(the_plan, inputs, torch.zeros_like(q), work.hopper_union)
        return
    assert work.hopper_rows is not None
    sums = (torch.zeros_like(k), torch.zeros_like(v))
    assert launch_hopper_rows(the_plan, work.keys, inputs, *sums, buffers.parts, work.hopper_rows)


def are_products_serialized(ptx: str) -> bool:
    """Whether the assembler says that it lets no two products of a kernel run side by side."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source, tempfile.NamedTemporaryFile() as target:
        source.write(ptx)
        source.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", source.name, "-o", target.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return "wgmma" in done.stderr and "serialized" in done.stderr


def loops_of_products(cubin: bytes) -> list[list[str]]:
    """Instructions of every loop of a kernel that multiplies and has none in it that does."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    starts: dict[str, int] = {}
    instructions: list[str] = []
    loops = []
    for line in text.splitlines():
        label = re.match(r"\s*\.(L\w+):", line)
        found = re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
        if label:
            starts[label[1]] = len(instructions)
        elif found:
            instructions.append(found[1])
            # a loop over tiles jumps back by a condition; what waits out of line comes back by none
            jump = re.match(r"@\S+ BRA.*?`\(\.(L\w+)\)", found[1])
            if jump and jump[1] in starts:
                loops.append((starts[jump[1]], len(instructions)))
    multiplying = [(a, b) for a, b in loops if any("GMMA" in line for line in instructions[a:b])]
    innermost = [a for a in multiplying if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in multiplying)]
    return [instructions[start:end] for start, end in innermost]


if __name__ == "__main__":
    driver.set_active(Target())
    for choice in (hopper_choice, hopper_union_choice, hopper_backward_choice):
        choice.why_not_here = lambda device: None
    kernels: list = []
    JITFunction.run = compile_only(JITFunction.run, kernels)
    forward = {name: partial(attend, **rules) for name, rules in VARIANTS.items()}
    backward = {what: partial(differentiate, what) for what in ("queries", "keys")}
    backward |= {what: partial(differentiate_rows, what, "unions") for what in ("rows", "unions")}
    backward["unions of small blocks"] = partial(differentiate_rows, "unions", "unions of small blocks")
    for name, compile_one in (backward if "backward" in sys.argv[1:] else forward).items():
        compile_one()
        bodies = loops_of_products(kernels[-1].asm["cubin"])
        spills = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for body in bodies for line in body)
        print(f"compiled {name}: {spills} spills among products of {len(bodies)} groups", flush=True)
        # what a loop changes and has no room for, a sum say, is stored there; what only waits outside is loaded
        print(f"stored {name}: {sum(bool(re.search(r'STL', line)) for body in bodies for line in body)}", flush=True)
        if name in ("rows", "unions", "unions of small blocks"):
            print(f"serialized {name}: {are_products_serialized(kernels[-1].asm['ptx'])}", flush=True)
    sys.exit(0)
