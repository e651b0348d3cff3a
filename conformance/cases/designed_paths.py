"""Designed cases of features on paths: what a kernel's other paths have right, one of them may lack.

The arrays hold every pair of values and few triples. Which path a problem takes is decided by several axes together:
lists, blocks or all keys; whole prompts or single rows; split or not; codes or numbers. Each case here is a feature on
a path that no row of the arrays has. Seeds begin elsewhere than those of the other lists of designs.
"""

from attnconform.conformance.cases.axes import Row
from attnconform.conformance.cases.designed import designed_case
from attnconform.conformance.cases.generate import Lengths
from attnconform.conformance.cases.structure import Case, Structure

FIRST_SEED = 0x5EED_8000_0000
PROMPTS = Lengths(q=(5, 11), kv=(5, 11))
ROWS = Lengths(q=(1, 1), kv=(35, 17))
CHUNK = Lengths(q=(3, 1), kv=(37, 9))
Changes = dict[str, str]

FORWARD: dict[str, tuple[Changes, Lengths]] = {
    "unsplit-prompts-with-slopes": ({"phase": "prefill", "mask": "causal", "score": "alibi"}, PROMPTS),
    "unsplit-prompts-with-a-table": ({"phase": "prefill", "mask": "causal", "score": "relative"}, PROMPTS),
    "unsplit-prompts-with-sinks": ({"phase": "prefill", "mask": "causal", "sink": "logits"}, PROMPTS),
    "unsplit-prompts-of-blocks-with-slopes": (
        {"phase": "prefill", "mask": "causal", "granularity": "block", "sharing": "kv_head", "score": "alibi"}, PROMPTS
    ),
    "unsplit-prompts-of-blocks-with-all": (
        {"phase": "prefill", "mask": "causal", "granularity": "block", "sharing": "query_head", "q_block": "4",
         "score": "softcap_relative", "sink": "logits"}, PROMPTS
    ),
    "unsplit-prompts-of-lists-with-all": (
        {"phase": "prefill", "mask": "causal", "granularity": "token", "sharing": "query_head", "listing": "shuffled",
         "score": "relative", "sink": "logits"}, PROMPTS
    ),
    "unsplit-lists-of-codes": (
        {"granularity": "token", "sharing": "kv_head", "listing": "holes", "score": "softcap_relative",
         "quant": "e4m3_token"}, ROWS
    ),
    "unsplit-blocks-of-codes": (
        {"phase": "chunk", "mask": "causal", "granularity": "block", "sharing": "shared", "score": "alibi_softcap",
         "sink": "logits", "quant": "mixed"}, CHUNK
    ),
    "codes-with-sinks": ({"sink": "logits", "quant": "e5m2_head", "splits": "3"}, ROWS),
    "unsplit-codes-with-sinks": (
        {"phase": "chunk", "mask": "causal", "sink": "logits", "quant": "e4m3_page"}, CHUNK
    ),
}  # fmt: skip
BACKWARD: dict[str, tuple[Changes, Lengths]] = {
    "prompts-under-a-cap": ({"phase": "prefill", "mask": "causal", "score": "softcap"}, PROMPTS),
    "single-rows-of-blocks": (
        {"granularity": "block", "sharing": "kv_head", "score": "alibi_softcap", "sink": "logits"}, ROWS
    ),
    "blocks-of-codes": (
        {"phase": "chunk", "mask": "causal", "granularity": "block", "sharing": "query_head", "q_block": "4",
         "score": "alibi", "quant": "mixed"}, CHUNK
    ),
    "codes-with-sinks": (
        {"phase": "prefill", "mask": "causal", "score": "relative", "sink": "logits", "quant": "mixed"}, PROMPTS
    ),
}  # fmt: skip


def as_built(structure: Structure) -> Structure:
    """The structure as it is: here the number of splits is part of the path."""
    return structure


def cases_of_paths(plain: Row) -> tuple[Case, ...]:
    """One case a design; `plain` has the axis values that a design does not name."""
    designs = [("forward", slug, design) for slug, design in FORWARD.items()]
    designs += [("backward", slug, design) for slug, design in BACKWARD.items()]
    return tuple(
        designed_case(operation, slug, {**plain, **changes}, FIRST_SEED + 8 * i + 1, lengths, as_built, ())
        for i, (operation, slug, (changes, lengths)) in enumerate(designs)
    )
