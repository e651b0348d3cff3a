"""Blocks and bitmaps of token lists against the reference, entry by entry."""

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from attnconform.kernels.sparse_attention import PlanError
from attnconform.kernels.sparse_attention.block_members import expand_to_blocks
from attnconform.reference.block_expansion import expand_to_blocks as reference_expand

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def to_csr(lists):
    indptr = np.cumsum([0, *map(len, lists)])
    return indptr, np.array([token for row in lists for token in row], dtype=np.int64)


def expand(indptr, positions, **sizes):
    return expand_to_blocks(
        torch.as_tensor(indptr).int().to(DEVICE), torch.as_tensor(positions).int().to(DEVICE), **sizes
    )


@pytest.mark.parametrize("block_size", [1, 3, 32, 64, 65, 130])
@pytest.mark.parametrize("q_block_size", [1, 2, 4])
def test_blocks_and_bitmaps_are_those_of_the_reference(block_size, q_block_size):
    rng = np.random.default_rng(block_size * 8 + q_block_size)
    lists = [rng.integers(0, 700, n).tolist() for n in (9, 0, 1, 30, 5)]
    lists[0] += [-1, lists[0][0], 699]
    indptr, positions = to_csr(lists)
    want = reference_expand(indptr, positions, block_size=block_size, q_block_size=q_block_size)
    got = expand(indptr, positions, block_size=block_size, q_block_size=q_block_size, max_seqlen_kv=700, capacity=700)
    got.raise_if_refused()
    for q_block, count in enumerate(got.counts.tolist()):
        assert got.blocks[q_block, :count].tolist() == want.of(q_block).tolist()
        bitmaps = want.bitmaps[want.indptr[q_block] : want.indptr[q_block + 1]]
        assert np.array_equal(got.bitmaps[q_block, :count].cpu().numpy().view(np.uint64), bitmaps)


def test_an_entry_outside_the_request_is_named_and_sizes_below_1_too():
    got = expand([0, 3], [4, 9, -3], block_size=4, q_block_size=1, max_seqlen_kv=9, capacity=3)
    with pytest.raises(PlanError, match=r"^positions\[1\] is refused.*\[SET-RANGE\]$"):
        got.raise_if_refused()
    with pytest.raises(PlanError, match=r"^block_size is 0"):
        expand([0, 1], [1], block_size=0, q_block_size=1, max_seqlen_kv=9, capacity=3)


def test_no_rows_have_no_blocks():
    got = expand([0], [], block_size=4, q_block_size=2, max_seqlen_kv=9, capacity=3)
    got.raise_if_refused()
    assert got.counts.numel() == 0
