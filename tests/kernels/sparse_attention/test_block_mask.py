"""Block masks of the kernels against the reference, list by list."""

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

from attnconform.kernels.sparse_attention import PlanError
from attnconform.kernels.sparse_attention import rules as kernel_rules
from attnconform.kernels.sparse_attention.block_mask import (
    Extent,
    block_mask_of,
    block_statistics,
    build_block_mask,
    transpose_block_mask,
)
from attnconform.kernels.sparse_attention.rules import And, Causal, Custom, Document, HeadWindow, Or, PrefixLM, Window
from attnconform.reference import rules as spec_rules
from attnconform.reference.block_mask import build_block_mask as reference_of_mask
from attnconform.reference.block_mask import transpose_block_mask as reference_transpose
from attnconform.reference.blocks import build as reference_build
from attnconform.reference.blocks.statistics import block_statistics as reference_statistics
from attnconform.reference.rule_values import mask_allows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES = [
    None,
    Causal(),
    Window(5, 0),
    Window(3, 2),
    And((Causal(), Window(6, None))),
    PrefixLM((11,)),
    Document(((0, 7, 8, 20),)),
    And((Causal(), Document(((0, 7, 8, 20),)))),
    And((Causal(), Window(4, None), Document(((0, 9, 21),)))),
    Or((And((Causal(), Window(2, None))), PrefixLM((6,)))),
    And((Or((Window(3, 0), PrefixLM((4,)))), Or((Document(((0, 12),)), Window(1, 1))))),
]
EXTENTS = [
    {"seqlen_q": 24, "seqlen_kv": 24, "q_block_size": 4, "kv_block_size": 4},
    {"seqlen_q": 13, "seqlen_kv": 29, "q_block_size": 5, "kv_block_size": 3},
    {"seqlen_q": 9, "seqlen_kv": 6, "q_block_size": 2, "kv_block_size": 4},  # rows before position 0
    {"seqlen_q": 1, "seqlen_kv": 17, "q_block_size": 8, "kv_block_size": 16},
    {"seqlen_q": 8, "seqlen_kv": 20, "q_block_size": 4, "kv_block_size": 8, "q_offset": 3},
]


def to_spec(rule):
    """The reference's rule of the same name."""
    if rule is None:
        return None
    if isinstance(rule, And | Or):
        return getattr(spec_rules, type(rule).__name__)(tuple(to_spec(part) for part in rule.rules))
    fields = {name: getattr(rule, name) for name in rule.__dataclass_fields__}
    return getattr(spec_rules, type(rule).__name__)(**fields)


def lists_of(table):
    """Columns of every row, head-major."""
    counts, indices = table.counts.flatten().tolist(), table.indices.flatten(0, 1)
    return [indices[row, :count].tolist() for row, count in enumerate(counts)]


def reference_lists(lists):
    return [lists.of(row).tolist() for row in range(len(lists.indptr) - 1)]


def assert_same(got, want):
    assert lists_of(got.full) == reference_lists(want.full)
    assert lists_of(got.partial) == reference_lists(want.partial)


def reference_extent(sizes):
    return reference_build.Extent(**{"q_offset": sizes["seqlen_kv"] - sizes["seqlen_q"], **sizes})


@pytest.mark.parametrize("sizes", EXTENTS)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_of_intervals_gives_the_references_lists(rule, sizes):
    got = build_block_mask(rule, Extent(**sizes), device=DEVICE)
    assert_same(got, reference_build.rule_block_mask(to_spec(rule), reference_extent(sizes)))


def test_heads_with_windows_of_their_own_have_lists_of_their_own():
    rule, sizes = And((HeadWindow((2, None, 9), (0, 1, None)), Causal())), EXTENTS[0]
    got = build_block_mask(rule, Extent(**sizes), num_heads=3, device=DEVICE)
    assert_same(got, reference_build.rule_block_mask(to_spec(rule), reference_extent(sizes), num_heads=3))


def test_a_requests_own_prefix_and_documents_are_taken():
    rule, sizes = Or((PrefixLM((2, 9)), Document(((0,), (0, 4, 16))))), EXTENTS[0]
    got = build_block_mask(rule, Extent(**sizes), request=1, device=DEVICE)
    assert_same(got, reference_build.rule_block_mask(to_spec(rule), reference_extent(sizes), request=1))


@triton.jit
def every_third(q_idx, kv_idx, request, data):
    return (q_idx + kv_idx) % 3 == request


@triton.jit
def from_data(q_idx, kv_idx, request, data):
    return kv_idx >= tl.load(data)


def dense_of(rule, sizes):
    """The mask of a rule with custom parts, element by element."""
    offset = sizes.get("q_offset", sizes["seqlen_kv"] - sizes["seqlen_q"])
    q_idx = offset + np.arange(sizes["seqlen_q"])[:, None]
    kv_idx = np.arange(sizes["seqlen_kv"])[None, :]
    match rule:
        case Custom(mask_fn):
            return (q_idx + kv_idx) % 3 == 0 if mask_fn is every_third else (kv_idx >= 5) & (q_idx == q_idx)
        case And(parts):
            return np.logical_and.reduce([dense_of(part, sizes) for part in parts])
        case Or(parts):
            return np.logical_or.reduce([dense_of(part, sizes) for part in parts])
    return mask_allows(to_spec(rule), 0, q_idx, np.arange(sizes["seqlen_kv"]), 0)


@pytest.mark.parametrize("sizes", EXTENTS[:3])
@pytest.mark.parametrize("shape", ["alone", "and", "or", "two"])
def test_blocks_that_intervals_leave_in_doubt_are_settled_by_their_elements(shape, sizes):
    custom, late = Custom(every_third), Custom(from_data, torch.tensor([5], dtype=torch.int32, device=DEVICE))
    rule = {
        "alone": custom,
        "and": And((Causal(), custom)),
        "or": Or((Window(4, 0), And((custom, Causal())))),
        "two": Or((custom, And((late, Window(9, 1))))),
    }[shape]
    got = build_block_mask(rule, Extent(**sizes), device=DEVICE)
    dense = dense_of(rule, sizes)[None]
    assert_same(got, reference_of_mask(dense, q_block_size=sizes["q_block_size"], kv_block_size=sizes["kv_block_size"]))


@pytest.mark.parametrize(
    "sizes", [(3, 13, 29, 5, 3), (1, 8, 8, 4, 4), (2, 5, 3, 8, 8), (1, 0, 4, 2, 2), (2, 4, 0, 2, 2)]
)
def test_any_mask_gives_the_references_lists_and_their_transpose(sizes):
    heads, seqlen_q, seqlen_kv, q_block_size, kv_block_size = sizes
    rng = np.random.default_rng(sum(sizes))
    dense = rng.random((heads, seqlen_q, seqlen_kv)) < 0.5
    dense[:, : seqlen_q // 2, : seqlen_kv // 2] = True
    dense[:, seqlen_q // 2 :, seqlen_kv // 2 :] = False
    blocks = {"q_block_size": q_block_size, "kv_block_size": kv_block_size}
    got, want = block_mask_of(torch.from_numpy(dense).to(DEVICE), **blocks), reference_of_mask(dense, **blocks)
    assert_same(got, want)
    turned = transpose_block_mask(got)
    assert_same(turned, reference_transpose(want))
    assert_same(transpose_block_mask(turned), want)


def test_strides_of_a_mask_are_honoured():
    dense = torch.rand(20, 2, 12, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.5
    view = dense.permute(1, 2, 0)
    blocks = {"q_block_size": 4, "kv_block_size": 4}
    assert_same(block_mask_of(view, **blocks), reference_of_mask(view.cpu().numpy(), **blocks))


def test_figures_are_those_of_the_reference():
    sizes = EXTENTS[1]
    rule = And((Causal(), Window(6, None)))
    want_mask = reference_build.rule_block_mask(to_spec(rule), reference_extent(sizes))
    got = block_statistics(build_block_mask(rule, Extent(**sizes), device=DEVICE), num_edges=70)
    want = reference_statistics(want_mask, num_edges=70)
    for name in got.__dataclass_fields__:
        assert getattr(got, name) == getattr(want, name), name
    with pytest.raises(PlanError, match=r"^num_edges is 9999, but .*\[BLOCK-STATISTICS\]$"):
        block_statistics(build_block_mask(rule, Extent(**sizes), device=DEVICE), num_edges=9999)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Extent(seqlen_q=4, seqlen_kv=4, q_block_size=0, kv_block_size=2), "q_block_size is 0"),
        (lambda: Extent(seqlen_q=-1, seqlen_kv=4, q_block_size=2, kv_block_size=2), "seqlen_q is -1"),
        (lambda: block_mask_of(torch.ones(2, 2), q_block_size=1, kv_block_size=1), "mask is torch.float32 of"),
        (
            lambda: build_block_mask(PrefixLM((3,)), Extent(**EXTENTS[0]), request=1, device=DEVICE),
            r"len\(prefix_len\) is 1",
        ),
        (
            lambda: build_block_mask(HeadWindow((1,), (1,)), Extent(**EXTENTS[0]), num_heads=2, device=DEVICE),
            r"len\(left\) is 1",
        ),
        (
            lambda: build_block_mask(kernel_rules.SoftCap(2.0), Extent(**EXTENTS[0]), device=DEVICE),
            r"mask_rule is SoftCap",
        ),
    ],
)
def test_what_has_no_block_mask_is_refused_by_name(make, name):
    with pytest.raises(PlanError, match=f"^{name}"):
        make()
