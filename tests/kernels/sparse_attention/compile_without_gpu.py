"""Compiles the kernels for a GPU that is not there, and prints the name of each: what no interpreter sees.

A process of its own: once Triton interprets, it compiles no more. Nothing is launched.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from attnconform.kernels.sparse_attention import (
    BackwardHints,
    CandidateLists,
    Dropout,
    KVQuantization,
    backward,
    plan,
    plan_backward,
)
from attnconform.kernels.sparse_attention.backward_hints import KeyShape, QueryShape, choose_key_shape
from attnconform.kernels.sparse_attention.forward import launch_run
from attnconform.kernels.sparse_attention.plan import Plan
from attnconform.kernels.sparse_attention.prepared import PreparedLaunch
from attnconform.kernels.sparse_attention.rules import Alibi, Causal, CustomScore, RelativeBias, SoftCap

ROWS, HEADS, KV_HEADS, DIM, PAGE = 64, 4, 2, 32, 16
SHARED: list[int] = []  # bytes that the kernels compiled so far take


class Target:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_only(run: Callable) -> Callable:
    """A call of a kernel that ends where it would be launched."""

    def compiled(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> object:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        product = next((name for name in ("wgmma", "mma") if f"{name}." in kernel.asm["ptx"]), "no product")
        print("compiled", self.fn.__name__, "with", product, flush=True)
        SHARED.append(kernel.metadata.shared)
        return kernel

    return compiled


@triton.jit
def scale(scores, q_idx, kv_idx, heads, data_ptr):
    return scores * tl.load(data_ptr)


@triton.jit
def scale_slope(scores, q_idx, kv_idx, heads, data_ptr):
    return tl.zeros_like(scores) + tl.load(data_ptr)


@triton.jit
def scale_by_data(scores, q_idx, kv_idx, heads, data_ptr, ENTRY: tl.constexpr):
    return scores


PLAIN_STEP = 3


@triton.jit
def reads_a_plain_global(out_ptr):
    """What the interpreter takes and the compiler does not."""
    tl.store(out_ptr, PLAIN_STEP)


FORWARDS: tuple[dict[str, Any], ...] = (
    {},
    {"score_rules": [SoftCap(20.0)], "num_kv_splits": 2},
    {"score_rules": [Alibi((0.1,) * HEADS)], "k_quant": KVQuantization("int8", "channel")},
    {"k_quant": KVQuantization("int8", "page"), "dropout": Dropout(0.5, 7)},
    {"v_quant": KVQuantization("float8_e4m3", "token"), "score_rules": [RelativeBias(((0.0,) * 5,) * HEADS)]},
    {"k_quant": KVQuantization("float8_e5m2", "tensor"), "v_quant": KVQuantization("int8", "channel")},
    {"sink_logits": torch.zeros(HEADS), "score_rules": [CustomScore(scale, (2.0,), scale_slope, scale_by_data)]},
    {"mask_rule": None, "rows_per_union": 4, "sharing": "kv_head"},
    {"mask_rule": Causal(), "sharing": "query_head", "window": 3},
)


def compile_forward() -> None:
    """One plan for each way in which the attention kernel is specialized."""
    for options in FORWARDS:
        launch_forward(forward_plan(**{"mask_rule": Causal(), **options}))


def compile_element_loads() -> None:
    """Rows of 40 elements, which Triton cannot load at once; the last dimension of heads is 32."""
    the_plan = forward_plan(mask_rule=Causal())
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape, dtype in the_plan.tensor_shapes}
    for name in ("k_cache", "v_cache"):
        tensors[name] = tensors[name].new_zeros((*tensors[name].shape[:-1], DIM + 8))[..., :DIM]
    launch_run(the_plan, **tensors, k_scale=None, v_scale=None)


def forward_plan(*, sharing: str | None = None, **options: Any) -> Plan:
    """A prompt, with a list of two blocks a row where lists are shared in some way."""
    num_lists = ROWS * {"kv_head": KV_HEADS, "query_head": HEADS}.get(sharing or "", 0)
    lists = CandidateLists(
        granularity="block", sharing=sharing, block_size=PAGE, indptr=2 * torch.arange(num_lists + 1),
        indices=torch.arange(2).repeat(num_lists),
    )  # fmt: skip
    return plan(
        qo_indptr=[0, ROWS], seqlen_kv=[ROWS], page_table=torch.arange(ROWS // PAGE).int()[None], page_size=PAGE,
        num_pages=ROWS // PAGE, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim_qk=DIM, head_dim_vo=DIM,
        sm_scale=0.1, dtype=torch.bfloat16, device="cpu", candidates=lists if sharing else None, **options,
    )  # fmt: skip


def launch_forward(the_plan: Plan) -> None:
    """Every launch of a run, which ends where it would begin."""
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape, dtype in the_plan.tensor_shapes}
    scales = {name: None if shape is None else torch.ones(shape) for name, shape in the_plan.scale_shapes}
    launch_run(the_plan, **tensors, **scales)


def compile_backward() -> None:
    """Every rule, dropout-free, in the mode that has every kernel; tiles so small that it takes seconds."""
    rules = [
        Alibi((0.1,) * HEADS), CustomScore(scale, (2.0,), scale_slope, scale_by_data), SoftCap(20.0),
        RelativeBias(((0.0,) * 5,) * HEADS),
    ]  # fmt: skip
    the_plan = plan(
        qo_indptr=[0, ROWS], seqlen_kv=[ROWS], page_table=torch.arange(ROWS // PAGE).int()[None], page_size=PAGE,
        num_pages=ROWS // PAGE, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim_qk=DIM, head_dim_vo=DIM,
        sm_scale=0.1, dtype=torch.bfloat16, device="cpu", mask_rule=Causal(), score_rules=rules,
    )  # fmt: skip
    hints = BackwardHints(
        mode="hybrid", reuse_threshold=5, rows_per_item=16, steps_per_task=1, query_shape=QueryShape(16, 16, 4, 1),
        key_shape=KeyShape(16, 16, 4, 1),
    )  # fmt: skip
    q = torch.zeros(ROWS, HEADS, DIM, dtype=torch.bfloat16)
    k, v = (torch.zeros(ROWS // PAGE, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16) for _ in range(2))
    lse = torch.zeros(ROWS, HEADS)
    backward(the_plan, q, k, v, q, lse, q, dlse=lse, work=plan_backward(the_plan, hints), score_gradients=True)


def compile_widest_backward() -> None:
    """Float32 rows of 576 and 512, with the tiles that a GPU is given; says what shared memory they take."""
    the_plan = plan(
        qo_indptr=[0, ROWS], seqlen_kv=[ROWS], page_table=torch.arange(ROWS // PAGE).int()[None], page_size=PAGE,
        num_pages=ROWS // PAGE, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim_qk=576, head_dim_vo=512,
        sm_scale=0.1, dtype=torch.float32, device="cpu", mask_rule=Causal(),
    )  # fmt: skip
    on_gpu = replace(the_plan, device=torch.device("cuda"))
    q, dout = torch.zeros(ROWS, HEADS, 576), torch.zeros(ROWS, HEADS, 512)
    k, v = (torch.zeros(ROWS // PAGE, PAGE, KV_HEADS, dim) for dim in (576, 512))
    hints = BackwardHints(key_shape=choose_key_shape(on_gpu, 1))
    backward(the_plan, q, k, v, dout, torch.zeros(ROWS, HEADS), dout, work=plan_backward(the_plan, hints))
    print("shared memory", max(SHARED), flush=True)


if __name__ == "__main__":
    driver.set_active(Target())
    JITFunction.run = compile_only(JITFunction.run)
    PreparedLaunch.__call__ = PreparedLaunch.compile_and_launch
    compile_forward()
    compile_backward()
    compile_element_loads()
    compile_widest_backward()
    try:
        reads_a_plain_global[(1,)](torch.zeros(1))
    except triton.CompilationError:
        print("refused reads_a_plain_global")
