"""Which clauses a case exercises, read off its axes."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from attnconform.conformance.cases.axes import CODED, Row
from attnconform.reference.attention import EffectiveSets, effective_sets
from attnconform.reference.candidates import HOLE
from attnconform.reference.problem import AttentionProblem

EVERY_FORWARD = (
    "SET-IDENTITY", "COORD-SLOT", "COORD-ROW", "MASK-BEFORE-MAX", "MASK-OFFSET", "MASK-TAIL", "MASK-INTERFERE",
    "SCORE-SCALE", "LSE-NATURAL", "MERGE-STATE", "GQA-MAP", "SAFE-WRITE", "SAFE-BOUNDS", "SAFE-INPUTS", "SAFE-PATH",
    "DETERMINISM-RUN", "EMPTY-NEIGHBOUR", "COORD-WIDE",
)  # fmt: skip
EVERY_BACKWARD = ("GRAD-FORMULA", "GRAD-SET", "GRAD-ZERO", "GRAD-SUM", "GRAD-LSE")

OF_VALUE: dict[tuple[str, str], tuple[str, ...]] = {
    ("granularity", "token"): ("GQA-LISTS",),
    ("granularity", "block"): ("BLOCK-EXPAND", "BLOCK-MEMBER", "BLOCK-BIND", "GQA-LISTS"),
    ("listing", "shuffled"): ("SET-ORDER",),
    ("listing", "duplicates"): ("SET-DUPLICATE", "SET-ORDER"),
    ("listing", "holes"): ("SET-HOLE", "SET-ORDER"),
    ("listing", "holes_and_duplicates"): ("SET-HOLE", "SET-DUPLICATE", "SET-ORDER"),
    ("local", "window"): ("SET-UNION",),
    ("local", "sinks"): ("SET-UNION",),
    ("local", "window_and_sinks"): ("SET-UNION", "SET-DUPLICATE"),
    ("pages", "shuffled"): ("COORD-RENUMBER", "COORD-LOGICAL"),
    ("pages", "shared_prefix"): ("COORD-RENUMBER", "COORD-LOGICAL"),
    ("pages", "high"): ("COORD-RENUMBER", "COORD-LOGICAL"),
    ("pages", "aliased"): ("SET-ALIAS", "COORD-LOGICAL", "COORD-RENUMBER"),
    ("strides", "interleaved"): ("COORD-STRIDE",),
    ("layout", "HND"): ("COORD-STRIDE",),
    ("mask", "causal"): ("MASK-CAUSAL", "MASK-NO-BIAS"),
    ("mask", "window"): ("MASK-WINDOW", "MASK-NO-BIAS"),
    ("mask", "causal_window"): ("MASK-CAUSAL", "MASK-WINDOW", "MASK-COMPOSE", "MASK-NO-BIAS"),
    ("mask", "prefix"): ("MASK-PREFIX", "MASK-NO-BIAS"),
    ("mask", "document"): ("MASK-DOCUMENT", "MASK-CAUSAL", "MASK-COMPOSE", "MASK-NO-BIAS"),
    ("mask", "causal_or_document"): ("MASK-DOCUMENT", "MASK-WINDOW", "MASK-COMPOSE", "MASK-NO-BIAS"),
    ("score", "alibi"): ("SCORE-ALIBI", "SCORE-HEAD"),
    ("score", "softcap"): ("SCORE-SOFTCAP",),
    ("score", "alibi_softcap"): ("SCORE-ALIBI", "SCORE-SOFTCAP", "SCORE-ORDER", "SCORE-HEAD"),
    ("sink", "logits"): ("LSE-SINK",),
    ("mask", "head_window"): ("MASK-HEAD-WINDOW", "MASK-CAUSAL", "MASK-COMPOSE", "MASK-NO-BIAS"),
    ("mask", "custom"): ("RULE-CUSTOM", "MASK-NO-BIAS"),
    ("score", "relative"): ("SCORE-RELATIVE", "SCORE-HEAD"),
    ("score", "softcap_relative"): ("SCORE-RELATIVE", "SCORE-SOFTCAP", "SCORE-ORDER", "SCORE-HEAD"),
    ("score", "custom"): ("RULE-CUSTOM",),
    ("form", "sequence"): ("SET-SEQUENCE",),
    ("dropout", "quarter"): ("DROPOUT-COUNTER", "DROPOUT-NUMERATOR"),
    ("rope", "encoded"): ("ROPE-POSITION",),
    ("rope", "raw"): ("ROPE-POSITION", "ROPE-PAIRS"),
    ("rope", "raw_interleaved"): ("ROPE-POSITION", "ROPE-PAIRS"),
    ("epilogue", "relu"): ("MERGE-EPILOGUE",),
    ("epilogue", "silu_gate"): ("MERGE-EPILOGUE",),
    ("epilogue", "cast"): ("MERGE-EPILOGUE",),
    ("head_pages", "apart"): ("COORD-HEAD-PAGE",),
}  # fmt: skip
QUANTIZED = ("QUANT-VALUE", "QUANT-GRANULARITY", "QUANT-APART")
EDITABLE_MASKS = ("window", "causal_window", "prefix", "document", "causal_or_document", "head_window")
BACKWARD_OF_VALUE: dict[tuple[str, str], tuple[str, ...]] = {
    ("score", "softcap"): ("GRAD-SOFTCAP", "GRAD-RULE"),
    ("score", "alibi_softcap"): ("GRAD-SOFTCAP", "GRAD-RULE"),
    ("score", "softcap_relative"): ("GRAD-SOFTCAP", "GRAD-RULE"),
    ("score", "alibi"): ("GRAD-RULE",),
    ("score", "relative"): ("GRAD-RULE",),
    ("sink", "logits"): ("GRAD-SINK",),
    **{("quant", value): ("QUANT-GRAD",) for value in CODED},
    ("dropout", "quarter"): ("DROPOUT-BACKWARD",),
    ("rope", "raw"): ("ROPE-GRAD",),
    ("rope", "raw_interleaved"): ("ROPE-GRAD",),
    **{("epilogue", value): ("GRAD-EPILOGUE",) for value in ("relu", "silu_gate", "cast")},
}
# what it takes further calls to judge, each on one forward case in so many
SAMPLED = {
    "DETERMINISM-BATCH": 6, "SET-REPRESENTATION": 8, "SCORE-WEIGHTS": 6,
    "PLAN-REPLAN": 20, "PLAN-WORKSPACE": 20, "PLAN-INPUTS": 20,
    "PLAN-APART": 24, "PLAN-COPY": 24, "PLAN-ALLOCATE": 24, "PLAN-REPLAY": 32,
}  # fmt: skip
NARROW_ELEMENTS, NARROW_PAGES = 2**15, 2**5  # 2**31 scaled down to pools that a small case has
BLOCKS_OF_THE_MASK = ("BLOCK-COMPLETE", "BLOCK-EXCLUSIVE", "BLOCK-FULL", "BLOCK-DECODE")


def clauses_of(operation: str, row: Row, problem: AttentionProblem) -> tuple[str, ...]:
    """Clauses that a problem with these axis values exercises; none that nothing in it could break."""
    edges, unmasked = (effective_sets(p) for p in (problem, replace(problem, mask_rule=None)))
    counts = edges.counts()
    has_empty_row = bool(counts.size) and not counts.all()
    clauses = set(EVERY_FORWARD)
    for pair in row.items():
        clauses.update(OF_VALUE.get(pair, ()))
    if row.get("quant", "none") != "none":
        clauses.update(QUANTIZED)
    if operation == "forward" and row["values"] == "peaked":  # every forward case is measured; one kind speaks for all
        clauses.add("SAFE-MEMORY")
    if is_editable(operation, row):
        clauses.add("RULE-EDIT")
    if operation == "forward":
        clauses.update(sampled_clauses(row))
    if operation == "forward" and row["values"] == "zero_q":  # a turned 0 is 0
        clauses -= {"ROPE-POSITION", "ROPE-PAIRS"}
    if row["splits"] != "1":
        clauses.update(("MERGE-SPLIT", "MERGE-DISJOINT", "MERGE-OUTPUTS", "MERGE-EMPTY"))
    if row["granularity"] == "dense" and row["mask"] != "none":
        clauses.update(BLOCKS_OF_THE_MASK)
    if has_empty_row:
        clauses.update(("EMPTY-OUT", "EMPTY-LSE", "EMPTY-POLICY"))
    if operation == "backward":
        clauses.update(EVERY_BACKWARD)
        for pair in row.items():
            clauses.update(BACKWARD_OF_VALUE.get(pair, ()))
        if row["granularity"] == "dense":
            clauses.add("BLOCK-TRANSPOSE")
        if row["values"] == "summed_out":  # nothing arrives through lse
            clauses.discard("GRAD-LSE")
        if has_empty_row:
            clauses.add("EMPTY-GRAD")
    if (counts == unmasked.counts()).all():
        clauses -= {c for c in clauses if c.startswith("MASK-") and c not in EVERY_FORWARD}
        clauses.discard("MASK-BEFORE-MAX")
    return tuple(sorted(clauses - unbreakable(problem, edges)))


def unbreakable(problem: AttentionProblem, edges: EffectiveSets) -> set[str]:
    """Clauses that every case would name, and that nothing in this problem could break."""
    counts, quants = edges.counts(), (problem.k_quant, problem.v_quant)
    can_break = {
        "SET-ALIAS": has_alias(problem),
        "EMPTY-NEIGHBOUR": bool(counts.any()) and not counts.all(),
        "COORD-WIDE": reaches_far(problem, edges),
        "GQA-MAP": problem.num_kv_heads > 1,
        "MASK-OFFSET": problem.mask_rule is not None,
        "SET-ORDER": any(descends(problem)),
        "QUANT-GRANULARITY": any(quant is not None and quant.granularity != "tensor" for quant in quants),
    }
    return {clause for clause, is_possible in can_break.items() if not is_possible}


def descends(problem: AttentionProblem) -> Iterator[bool]:
    """Of every list, whether some entry is smaller than one before it; holes aside. [SET-ORDER]"""
    if problem.candidates is not None:
        for i in range(problem.candidates.num_lists):
            entries = problem.candidates.entries(i)
            yield bool((np.diff(entries[entries != HOLE]) < 0).any())


def reaches_far(problem: AttentionProblem, edges: EffectiveSets) -> bool:
    """Whether some key lies on a page, or at an element, whose number a narrow type would wrap. [COORD-WIDE]"""
    last = int(edges.slots.max(initial=0))
    element = last * problem.num_kv_heads * max(problem.head_dim_qk, problem.head_dim_vo)
    return element >= NARROW_ELEMENTS or last // problem.cache.page_size >= NARROW_PAGES


def is_editable(operation: str, row: Row) -> bool:
    """Whether a rule's numbers could change from this call to the next; on one kind of values, for it costs a call."""
    has_numbers = row["score"] not in ("none", "custom") or row["mask"] in EDITABLE_MASKS
    return operation == "forward" and row["values"] == "normal" and has_numbers


def sampled_clauses(row: Row) -> set[str]:
    """Clauses whose checks make further calls, on a share of the cases that a hash of the axes picks."""
    found = {clause for clause, one_in in SAMPLED.items() if is_sampled(clause, one_in, row)}
    if (
        row["mask"] == "custom" or row.get("lengths") == "one"
    ):  # a registered rule knows no other request; one key, one split
        found.discard("DETERMINISM-BATCH")
    if row.get("form", "set") != "set":  # a list is more than its edges
        found.discard("SET-REPRESENTATION")
    if row.get("epilogue", "none") != "none":  # what follows the sum is not linear
        found.discard("SCORE-WEIGHTS")
    return found


def is_sampled(what: str, one_in: int, row: Row) -> bool:
    """True for about one row in so many; other ones for another name."""
    content = ";".join(f"{axis}={value}" for axis, value in sorted(row.items()))
    return int.from_bytes(hashlib.sha256(f"{what} {content}".encode()).digest()[:4]) % one_in == 0


def has_alias(problem: AttentionProblem) -> bool:
    """Whether some request names one page at two logical places."""
    pages = -(-problem.seqlen_kv // problem.cache.page_size)
    used = (problem.cache.page_table[n, : int(count)] for n, count in enumerate(pages))
    return any(len(np.unique(row)) < len(row) for row in used)
