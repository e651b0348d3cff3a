"""Prints how many specializations of each kernel launches ask for while only lengths or candidates change.

Runs without a GPU and compiles nothing: Triton is given a device that is not there, asked for each launch's key, and
stopped before it compiles. The last line changes what is compiled in, so that a count that cannot rise is seen.
"""

from unittest.mock import patch

import torch
from launches_without_gpu import watch_launches

from attnconform.kernels.sparse_attention import CandidateLists, hopper_choice, plan, plan_tier
from attnconform.kernels.sparse_attention.block_mask import Extent, build_block_mask
from attnconform.kernels.sparse_attention.forward import launch_run
from attnconform.kernels.sparse_attention.rules import And, Causal, Document, Window
from attnconform.kernels.sparse_attention.tuning import Choice

HEADS = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "head_dim_vo": 64}
COMMON = {**HEADS, "page_size": 16, "num_pages": 64, "sm_scale": 0.1, "dtype": torch.bfloat16, "device": "cpu"}


KEYS: set[tuple[str, str]] = set()


def remember(*, key, fn, **_):
    """Stops Triton before it compiles."""
    KEYS.add((fn.name, key))
    return True


def table(batch_size, page_size=16):
    return torch.arange(batch_size * (512 // page_size), dtype=torch.int32).view(batch_size, -1) % 64


def attend(planned):
    shapes = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in planned.tensor_shapes}
    launch_run(planned, shapes["q"], shapes["k_cache"], shapes["v_cache"], None, None, shapes["out"], shapes["lse"])


def lists(num_lists, length, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(16, generator=generator)[:length] for _ in range(num_lists)])
    indptr = torch.arange(0, num_lists * length + 1, length)
    return CandidateLists(
        granularity="block", sharing="kv_head", block_size=16, indptr=indptr, indices=ids.flatten().int()
    )


def decode():
    for length, count in ((300, 3), (511, 9), (256, 1)):
        rows = {"qo_indptr": [0, 1, 2], "seqlen_kv": [length, 256], "page_table": table(2)}
        attend(plan(**COMMON, **rows, candidates=lists(4, count, length)))


def prefill():
    for seqlen_q, seqlen_kv in ((300, 400), (512, 512), (257, 500)):
        rows = {"qo_indptr": [0, seqlen_q], "seqlen_kv": [seqlen_kv], "page_table": table(1)}
        attend(plan(**COMMON, **rows, mask_rule=And((Causal(), Window(left=seqlen_q)))))


@patch.object(hopper_choice, "why_not_here", lambda device: None)
def hopper():
    for lengths in ((300, 400), (512, 512), (257, 500), (1, 16)):
        rows = {"qo_indptr": [0, lengths[0]], "seqlen_kv": [lengths[1]], "page_table": table(1)}
        attend(plan(**COMMON, **rows, mask_rule=Causal(), choice=Choice(forward="hopper")))


def union():
    for seqlen_q, count in ((9, 3), (31, 7)):
        rows = {"qo_indptr": [0, seqlen_q], "seqlen_kv": [300], "page_table": table(1)}
        attend(plan(**COMMON, **rows, candidates=lists(2 * seqlen_q, count, count), rows_per_union=4))


def tier():
    made = plan_tier(**COMMON, batch_size=2, capacity=256, max_seqlen_kv=512, granularity="block", block_size=16)
    for length, count in ((300, 3), (511, 9)):
        chosen = lists(4, count, length)
        made.update(
            seqlen_kv=torch.tensor([length, 256]).int(), page_table=table(2),
            indptr=chosen.indptr.int(), indices=chosen.indices,
        )  # fmt: skip


def block_mask():
    for length, window, starts in ((512, 64, (0, 100)), (8192, 1000, (0, 7, 3000, 8000))):
        extent = Extent(seqlen_q=length, seqlen_kv=length, q_block_size=128, kv_block_size=128)
        build_block_mask(And((Causal(), Window(left=window), Document((starts,)))), extent, device="cpu")


def page_size():
    for size in (16, 32):
        rows = {"qo_indptr": [0, 1], "seqlen_kv": [500], "page_table": table(1, size), "page_size": size}
        attend(plan(**COMMON | rows, candidates=lists(2, 5, size)))


if __name__ == "__main__":
    watch_launches(remember)
    for work in (decode, prefill, hopper, union, tier, block_mask, page_size):
        KEYS.clear()
        work()
        print(work.__name__, len(KEYS))
