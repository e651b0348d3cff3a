"""Long contexts with standard normal numbers, as the tests and benchmarks of published policies have them."""

from functools import cache

import msgspec

from attnconform.conformance.cases.draw import Draw
from attnconform.conformance.cases.structure import CandidateStructure, Case, Operation, Structure, named
from attnconform.reference.rules import Alibi, And, Causal, Document, Or, PrefixLM, SoftCap, Window

FIRST_SEED = 0x90_11_C1
LONG = Structure(
    dtype="bfloat16",
    seqlens_q=(1, 2),
    seqlens_kv=(2042, 1000),
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim_qk=64,
    head_dim_vo=64,
    page_size=16,
    num_pages=195,
    page_table=tuple(tuple((7 * p + 5) % 193 for p in pages) for pages in (range(128), range(128, 191))),
    sm_scale=0.125,
)


@cache
def long_cases() -> tuple[Case, ...]:
    """Long contexts with standard normal numbers, as the policies' own tests and benchmarks draw them."""
    draw = Draw(FIRST_SEED)
    lists, blocks = token_lists(draw), block_lists(draw)
    changes: dict[str, dict[str, object]] = {
        "dense": {},
        "dense-float32": {"dtype": "float32", "mask_rule": Causal(), "layout": "HND"},
        "causal-window": {"mask_rule": And((Causal(), Window(left=1023))), "interleaved": True},
        "prefix": {"mask_rule": PrefixLM((1000, 300))},
        "documents": {"mask_rule": And((Document(((0, 900), (0, 400))), Causal()))},
        "or": {"mask_rule": Or((Window(left=511, right=0), Document(((0, 900), (0, 400)))))},
        "token-lists": {"candidates": lists, "mask_rule": Causal()},
        "block-lists": {"candidates": blocks, "head_dim_vo": 32},
        "alibi-softcap": {"score_rules": (Alibi((0.5, 0.25, 0.125, 0.0625)), SoftCap(30.0)), "dtype": "float16"},
        "sink": {"sink_logits": (0.0, 1.0, -1.0, 2.0), "candidates": lists, "score_rules": (SoftCap(50.0),)},
        "alibi": {"score_rules": (Alibi((0.5, 0.25, 0.125, 0.0625)),), "dtype": "float16"},
    }
    forward = [long_case("forward", name, change) for name, change in changes.items()]
    backward = [long_case("backward", name, changes[name]) for name in ("causal-window", "token-lists", "sink")]
    return (*forward, *backward)


def long_case(operation: Operation, name: str, change: dict[str, object]) -> Case:
    """One long case: two requests, one row and two."""
    structure = msgspec.structs.replace(LONG, **change)
    case = Case(
        id="", level="L3", operation=operation, structure=structure, values="normal", seed=FIRST_SEED, clauses=()
    )
    return named(case, f"long-{name}")


def token_lists(draw: Draw) -> CandidateStructure:
    """Half of the tokens for every row and head, with holes, duplicates, a window and sink positions."""
    lists = []
    for n, rows in enumerate(LONG.seqlens_q):
        for _ in range(rows * LONG.num_qo_heads):
            chosen = draw.shuffled(draw.subset(range(LONG.seqlens_kv[n]), LONG.seqlens_kv[n] // 2))
            lists.append((-1, *chosen, *chosen[:2], -1))
    return CandidateStructure(lists=tuple(lists), window=128, num_sink_tokens=4)


def block_lists(draw: Draw) -> CandidateStructure:
    """Half of the blocks of 64 for every row and KV head."""
    counts = [-(-t // 64) for t in LONG.seqlens_kv]
    lists = tuple(
        tuple(draw.shuffled(draw.subset(range(counts[n]), counts[n] // 2)))
        for n, rows in enumerate(LONG.seqlens_q)
        for _ in range(rows * LONG.num_kv_heads)
    )
    return CandidateStructure(lists=lists, granularity="block", block_size=64, sharing="kv_head")
