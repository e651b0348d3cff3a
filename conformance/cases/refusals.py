"""Inputs that must be refused before anything is launched: one sound problem, broken in one place each."""

from functools import cache

import msgspec

from attnconform.conformance.cases.sample_rules import IMPURE
from attnconform.conformance.cases.structure import (
    CandidateStructure,
    Case,
    Corruption,
    QuantStructure,
    Structure,
    named,
)
from attnconform.reference.dropout import Dropout
from attnconform.reference.epilogue import Activation
from attnconform.reference.rope import Rope
from attnconform.reference.rules import Alibi, CustomMask, CustomScore, HeadWindow, RelativeBias, SoftCap, Window

PER_HEAD = QuantStructure(format="int8", granularity="head")

SOUND = Structure(
    seqlens_q=(1, 1),
    seqlens_kv=(20, 9),
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim_qk=64,
    head_dim_vo=64,
    page_size=8,
    num_pages=8,
    page_table=((5, 2, 7), (1, 4)),
    candidates=CandidateStructure(lists=((0, 7, 19), (3, -1, 8)), sharing="shared"),
    sm_scale=0.125,
)


def with_lists(*lists: tuple[int, ...], **changes: object) -> Structure:
    """The sound problem with other lists."""
    assert SOUND.candidates is not None
    return msgspec.structs.replace(SOUND, candidates=msgspec.structs.replace(SOUND.candidates, lists=lists, **changes))


def changed(**changes: object) -> Structure:
    """The sound problem with other fields."""
    return msgspec.structs.replace(SOUND, **changes)


def corrupted(corruption: Corruption, **changes: object) -> Structure:
    """The sound problem with a number that JSON cannot hold, or a tensor of another shape."""
    return changed(corruption=corruption, **changes)


# name -> (clause that refuses, structure)
REFUSALS: dict[str, tuple[str, Structure]] = {
    "negative-not-hole": ("SET-RANGE", with_lists((0, -2, 19), (3, -1, 8))),
    "negative-wraps": ("SET-RANGE", with_lists((0, 7, -(2**31)), (3, -1, 8))),
    "position-at-length": ("SET-RANGE", with_lists((0, 7, 20), (3, -1, 8))),
    "position-of-longer-request": ("SET-RANGE", with_lists((0, 7, 19), (3, -1, 9))),
    "position-far-out": ("SET-RANGE", with_lists((0, 7, 2**31 - 1), (3, -1, 8))),
    "block-past-the-end": ("SET-RANGE", with_lists((0, 2), (0, 2), granularity="block", block_size=8)),
    "page-at-pool-size": ("COORD-PAGE-RANGE", changed(page_table=((5, 8, 7), (1, 4)))),
    "page-missing": ("COORD-PAGE-RANGE", changed(page_table=((5, 2, 7), (1, -1)))),
    "page-table-too-short": ("COORD-PAGE-RANGE", changed(page_table=((5, 2), (1, 4)))),
    "foreign-page": ("SAFE-OWNER", changed(page_owner=(-1, 1, 0, -1, 0, 0, -1, 0))),
    "repeated-key-asked-for": ("SET-FORM", with_lists((0, 7, 7), (3, -1, 8), form="multiset")),
    "head-map-uneven": ("GQA-MAP", changed(num_qo_heads=5)),
    "too-few-lists": ("SAFE-SHAPE", with_lists((0, 7, 19))),
    "scale-nan": ("SAFE-FINITE", corrupted("nan_sm_scale")),
    "sink-nan": ("SAFE-FINITE", corrupted("nan_sink_logit", sink_logits=(0.0, 0.0, 0.0, 0.0))),
    "slope-infinite": ("SAFE-FINITE", corrupted("inf_slope", score_rules=(Alibi((0.5, 0.25, 0.125, 0.0625)),))),
    "cap-zero": ("SAFE-FINITE", changed(score_rules=(SoftCap(0.0),))),
    "slopes-too-few": ("SAFE-SHAPE", changed(score_rules=(Alibi((0.5, 0.25)),))),
    "window-negative": ("MASK-WINDOW", changed(mask_rule=Window(left=-1))),
    "query-of-another-head-dim": ("SAFE-SHAPE", corrupted("q_head_dim")),
    "cache-of-another-head-count": ("SAFE-SHAPE", corrupted("kv_heads")),
    "bias-infinite": (
        "SAFE-FINITE",
        corrupted("inf_bias", score_rules=(RelativeBias(((0.5, 0.25, 0.5),) * 4),)),
    ),
    "bias-table-even": ("SCORE-RELATIVE", changed(score_rules=(RelativeBias(((0.5, 0.25),) * 4),))),
    "head-windows-too-few": ("SAFE-SHAPE", changed(mask_rule=HeadWindow(left=(3, 3), right=(0, 0)))),
    "rank-twice": ("SET-SEQUENCE", with_lists((0, 7, 7), (3, -1, 8), form="sequence", rank_bias=(0.5, 0.25, 0.125))),
    "rank-of-a-window": (
        "SET-SEQUENCE",
        with_lists((0, 7, 19), (3, -1, 8), form="sequence", rank_bias=(0.5, 0.25, 0.125), window=2),
    ),
    "rank-without-bias": ("SET-SEQUENCE", with_lists((0, 7, 19), (3, -1, 8), form="sequence", rank_bias=(0.5, 0.25))),
    "head-base-outside": ("COORD-HEAD-PAGE", changed(head_pages=((0, 1),) * 7 + ((2, 8),))),
    "rule-unknown": ("RULE-NAME", changed(mask_rule=CustomMask("nobody.registered.this"))),
    "score-rule-unknown": ("RULE-NAME", changed(score_rules=(CustomScore("nobody.registered.this"),))),
    "rule-impure": ("RULE-PURE", changed(mask_rule=CustomMask(IMPURE))),
    "scale-zero": ("QUANT-SCALE", corrupted("zero_scale", k_quant=PER_HEAD)),
    "scale-shape": ("QUANT-GRANULARITY", corrupted("scale_shape", v_quant=PER_HEAD)),
    "dropout-of-all": ("DROPOUT-RATE", changed(dropout=Dropout(1.0, seed=3))),
    "dropout-negative": ("DROPOUT-RATE", changed(dropout=Dropout(-0.25, seed=3))),
    "rotated-page-twice": ("ROPE-ENCODED", changed(page_table=((5, 2, 7), (1, 5)), rope=Rope(rotary_dim=64))),
    "rotary-dim-odd": ("ROPE-PAIRS", changed(rope=Rope(rotary_dim=33, k_position="raw"))),
    "rotary-dim-beyond": ("ROPE-PAIRS", changed(rope=Rope(rotary_dim=128, k_position="raw"))),
    "activation-unknown": ("MERGE-EPILOGUE", changed(epilogue=(Activation("gelu"),))),
    "empty-row-refused": (
        "EMPTY-POLICY",
        msgspec.structs.replace(with_lists((-1, -1), (3, -1, 8)), empty_row="refuse"),
    ),
}


@cache
def refusal_cases() -> tuple[Case, ...]:
    """One case a refusal, each expecting its clause."""
    cases = []
    for i, (name, (clause, structure)) in enumerate(REFUSALS.items()):
        clauses = tuple(sorted({clause, "SAFE-REFUSE"}))
        case = Case(
            id="",
            level="L1",
            operation="refusal",
            structure=structure,
            values="normal",
            seed=i,
            clauses=clauses,
            axes={"refusal": name},
            refuses=clause,
        )
        cases.append(named(case, name))
    return tuple(cases)
