"""The axes of the matrix, their values, and the pairs of values that cannot stand together."""

from collections.abc import Mapping

Row = Mapping[str, str]

FORWARD_AXES: dict[str, tuple[str, ...]] = {
    "dtype": ("float32", "bfloat16", "float16"),
    "heads": ("2/2", "4/2", "6/2", "4/1"),
    "head_dim": ("64/64", "128/128", "80/80", "96/96", "256/256", "64/32"),
    "page_size": ("1", "8", "16", "32"),
    "phase": ("decode", "prefill", "chunk", "mixed"),
    "lengths": ("one", "page_edge", "tile_edge", "long_and_short", "empty_request"),
    "granularity": ("dense", "token", "block"),
    "sharing": ("query_head", "kv_head", "shared"),
    "q_block": ("1", "4"),
    "listing": ("sorted", "shuffled", "duplicates", "holes", "holes_and_duplicates"),
    "local": ("none", "window", "sinks", "window_and_sinks"),
    "empty": ("none", "first", "middle", "last"),
    "pages": ("contiguous", "shuffled", "shared_prefix", "high", "aliased"),
    "layout": ("NHD", "HND"),
    "strides": ("dense", "interleaved"),
    "mask": (
        "none",
        "causal",
        "window",
        "causal_window",
        "prefix",
        "document",
        "causal_or_document",
        "head_window",
        "custom",
    ),
    "score": ("none", "alibi", "softcap", "alibi_softcap", "relative", "softcap_relative", "custom"),
    "sink": ("none", "logits"),
    "form": ("set", "sequence"),
    "quant": (
        "none",
        "int8_tensor",
        "int8_channel",
        "e4m3_page",
        "e4m3_token",
        "e5m2_head",
        "k_only",
        "v_only",
        "mixed",
    ),
    "dropout": ("none", "quarter"),
    "rope": ("none", "encoded", "raw", "raw_interleaved"),
    "epilogue": ("none", "relu", "silu_gate", "cast"),
    "head_pages": ("none", "apart"),
    "splits": ("1", "2", "3", "8"),
    "values": (
        "normal",
        "peaked",
        "zero_q",
        "half_mass",
        "equal_keys",
        "extreme",
        "far_key",
        "zero_lane",
        "v_mean",
        "code_edges",
    ),
}

BACKWARD_AXES: dict[str, tuple[str, ...]] = {
    "dtype": ("float32", "bfloat16", "float16"),
    "heads": ("2/2", "4/2", "6/2"),
    "head_dim": ("64/64", "96/96", "64/32"),
    "page_size": ("8", "16"),
    "phase": ("decode", "prefill", "chunk"),
    "lengths": ("one", "page_edge", "tile_edge", "empty_request"),
    "granularity": ("dense", "token", "block"),
    "sharing": ("query_head", "kv_head", "shared"),
    "q_block": ("1", "4"),
    "listing": ("sorted", "holes_and_duplicates"),
    "local": ("none", "window_and_sinks"),
    "empty": ("none", "first", "last"),
    "pages": ("shuffled", "shared_prefix", "aliased"),
    "layout": ("NHD", "HND"),
    "strides": ("dense", "interleaved"),
    "mask": ("none", "causal", "causal_window", "document", "head_window"),
    "score": ("none", "alibi", "softcap", "alibi_softcap", "relative", "softcap_relative", "custom"),
    "sink": ("none", "logits"),
    "form": ("set", "sequence"),
    "quant": ("none", "mixed"),
    "dropout": ("none", "quarter"),
    "rope": ("none", "raw"),
    "epilogue": ("none", "silu_gate"),
    "head_pages": ("none", "apart"),
    "splits": ("1", "2"),
    "values": ("normal", "half_mass", "v_mean"),
}

# what a row without dynamic lists has in the list axes: a pair with any other value does not exist
DENSE = {"sharing": "shared", "q_block": "1", "listing": "sorted", "local": "none", "empty": "none"}


TURNABLE = ("normal", "peaked", "zero_q", "equal_keys", "v_mean", "code_edges")
CODED = tuple(value for value in FORWARD_AXES["quant"] if value != "none")

# row values that exclude one another, as (axis, value, other axis, the only value or values it may have)
EXCLUSIONS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    *(("granularity", "dense", axis, (value,)) for axis, value in DENSE.items()),
    ("phase", "decode", "q_block", ("1",)),
    # what a sequence does not name one by one has no rank
    ("form", "sequence", "granularity", ("token",)),
    ("form", "sequence", "local", ("none",)),
    ("form", "sequence", "listing", ("sorted", "shuffled", "holes")),
    # keys that were rotated when they were written stand at one place
    ("rope", "encoded", "pages", ("contiguous", "shuffled", "shared_prefix", "high")),
    # scores that are set by hand through one component do not survive a turn
    *(("rope", turn, "values", TURNABLE) for turn in ("raw", "raw_interleaved")),
    ("values", "code_edges", "quant", CODED),
    # an emptied list with a window or sinks is not empty, and a request of no tokens is empty already
    *((("empty", empty, "local", ("none",))) for empty in ("first", "middle", "last")),
    *(
        ("empty", empty, "lengths", ("one", "page_edge", "tile_edge", "long_and_short"))
        for empty in ("first", "middle", "last")
    ),
)


def is_possible(row: Row) -> bool:
    """Whether the values of a row, which may be incomplete, can stand together."""
    return not any(
        row.get(axis) == value and other in row and row[other] not in allowed
        for axis, value, other, allowed in EXCLUSIONS
    )
