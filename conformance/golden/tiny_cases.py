"""Tiny cases for frozen vectors: few keys, head_dim 4, so that a file can be read by eye."""

from collections.abc import Iterator

import msgspec

from attnconform.conformance.cases.clauses_of import clauses_of
from attnconform.conformance.cases.generate import QUANTS, build_structure
from attnconform.conformance.cases.matrix import SMOKE_ROW
from attnconform.conformance.cases.structure import Case, build_problem, named

BASE = SMOKE_ROW | {"heads": "4/2", "head_dim": "4/4", "page_size": "4", "lengths": "page_edge", "pages": "shuffled"}
LISTS = {"granularity": "token", "sharing": "kv_head"}
CHANGES: tuple[dict[str, str], ...] = (
    {},
    {"values": "integers"},
    {"values": "zero_q"},
    {"values": "zero_lane"},
    {"values": "extreme"},
    {"values": "v_mean"},
    {"heads": "6/2", "lengths": "long_and_short"},
    {"phase": "chunk", "mask": "causal"},
    {"phase": "prefill", "mask": "causal_window"},
    {"phase": "prefill", "mask": "window"},
    {"phase": "prefill", "mask": "prefix"},
    {"phase": "prefill", "mask": "document"},
    {"phase": "prefill", "mask": "causal_or_document"},
    {"score": "alibi"},
    {"score": "softcap", "values": "peaked"},
    {"score": "alibi_softcap", "values": "peaked"},
    {"sink": "logits"},
    {"sink": "logits", "splits": "3"},
    {"splits": "3", "values": "peaked"},
    {"splits": "8", "lengths": "one"},
    {"pages": "aliased", "page_size": "2", "lengths": "tile_edge"},
    {"pages": "shared_prefix"},
    {"pages": "high"},
    {"layout": "HND"},
    {"strides": "interleaved"},
    {"lengths": "empty_request"},
    LISTS | {"listing": "shuffled"},
    LISTS | {"listing": "duplicates"},
    LISTS | {"listing": "duplicates", "lengths": "long_and_short"},
    LISTS | {"listing": "holes"},
    LISTS | {"listing": "holes", "sharing": "query_head"},
    LISTS | {"listing": "holes_and_duplicates", "sharing": "shared"},
    LISTS | {"local": "window_and_sinks"},
    LISTS | {"empty": "middle", "phase": "decode"},
    LISTS | {"empty": "first", "phase": "chunk", "sink": "logits"},
    LISTS | {"q_block": "4", "phase": "prefill", "mask": "causal"},
    {"granularity": "block", "sharing": "kv_head", "lengths": "tile_edge"},
    {"granularity": "block", "sharing": "query_head", "lengths": "long_and_short", "mask": "causal"},
    {"phase": "prefill", "mask": "head_window"},
    {"phase": "prefill", "mask": "custom"},
    {"score": "relative"},
    {"score": "softcap_relative", "values": "peaked"},
    {"score": "custom", "values": "peaked"},
    LISTS | {"form": "sequence", "listing": "holes"},
    LISTS | {"form": "sequence", "listing": "shuffled"},
    *({"quant": quant} for quant in QUANTS if quant != "none"),
    {"quant": "mixed", "values": "code_edges", "pages": "high"},
    {"quant": "e4m3_token", "values": "code_edges"},
    {"dropout": "quarter"},
    {"dropout": "quarter", "phase": "chunk", "mask": "causal"},
    {"rope": "encoded"},
    {"rope": "raw", "phase": "chunk"},
    {"rope": "raw_interleaved"},
    {"epilogue": "relu", "splits": "2"},
    {"epilogue": "silu_gate"},
    {"epilogue": "cast"},
    {"head_pages": "apart"},
    {"score": "alibi", "phase": "chunk", "values": "normal"},
)
FIRST_SEED = 0xF17C_0000


def tiny_cases(operation: str) -> Iterator[Case]:
    """A case for each change, for one operation."""
    for i, change in enumerate(CHANGES):
        row = BASE | change
        structure = msgspec.structs.replace(build_structure(row, FIRST_SEED + i), dtype="float32")
        clauses = clauses_of(operation, row, build_problem(structure))
        case = Case(
            id="",
            level="L1",
            operation=operation,  # type: ignore[arg-type]  # "forward" or "backward"
            structure=structure,
            values=row["values"],  # type: ignore[arg-type]  # the axis holds the literal's values
            seed=FIRST_SEED + i,
            clauses=clauses,
            axes=row,
        )
        yield named(case, "tiny")
