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
    "mask": ("none", "causal", "window", "causal_window", "prefix", "document", "causal_or_document"),
    "score": ("none", "alibi", "softcap", "alibi_softcap"),
    "sink": ("none", "logits"),
    "splits": ("1", "2", "3", "8"),
    "values": ("normal", "peaked", "zero_q", "half_mass", "equal_keys", "extreme", "far_key", "zero_lane", "v_mean"),
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
    "mask": ("none", "causal", "causal_window", "document"),
    "score": ("none", "alibi", "softcap"),
    "sink": ("none", "logits"),
    "splits": ("1", "2"),
    "values": ("normal", "half_mass", "v_mean"),
}

# what a row without dynamic lists has in the list axes: a pair with any other value does not exist
DENSE = {"sharing": "shared", "q_block": "1", "listing": "sorted", "local": "none", "empty": "none"}


# row values that exclude one another, as (axis, value, other axis, the only value or values it may have)
EXCLUSIONS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    *(("granularity", "dense", axis, (value,)) for axis, value in DENSE.items()),
    ("phase", "decode", "q_block", ("1",)),
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
