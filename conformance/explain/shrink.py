"""From a failing case to a small one that fails the same check: structure first, then the numbers."""

from collections.abc import Callable, Iterator
from math import lcm
from typing import TypeVar

import msgspec

from attnconform.conformance.cases.structure import CandidateStructure, Case, Structure, build_problem, named
from attnconform.reference.errors import RefusedInput
from attnconform.reference.rules import And, Document, MaskRule, Or, PrefixLM
from attnconform.reference.steps import Steps

StillFails = Callable[[Case], bool]
R = TypeVar("R", bound=msgspec.Struct)
MAX_TRIALS = 150
PER_HEAD = ("slopes", "tables", "left", "right", "logits")  # fields of rules and steps with an entry per query head
# what a case can do without, and what is there instead
OPTIONAL_PARTS: dict[str, object] = {
    "k_quant": None, "v_quant": None, "dropout": None, "rope": None, "epilogue": (), "head_pages": None,
}  # fmt: skip


def shrink(case: Case, still_fails: StillFails) -> Case:
    """The smallest case found that still fails; greedy, one change at a time, at most MAX_TRIALS judgements."""
    trials = 0
    improved = True
    while improved and trials < MAX_TRIALS:
        improved = False
        for smaller in filter(is_sound, smaller_cases(case)):
            trials += 1
            if still_fails(smaller):
                case, improved = smaller, True
                break
            if trials >= MAX_TRIALS:
                break
    return case


def is_sound(case: Case) -> bool:
    """Whether the reference takes the case: what shrinking breaks, such as a part it does not know, is left out."""
    try:
        Steps().refuse(build_problem(case.structure))
    except (RefusedInput, ValueError, IndexError, KeyError):
        return False
    return True


def smaller_cases(case: Case) -> Iterator[Case]:
    """Cases that are smaller in one respect, the boldest first."""
    for structure in smaller_structures(case.structure):
        yield with_structure(case, structure)
    if case.operation == "forward" and case.values not in ("integers", "zero_q"):
        yield named(msgspec.structs.replace(case, values="integers"), "shrunk")


def with_structure(case: Case, structure: Structure) -> Case:
    """The case with another structure, and the id that belongs to it."""
    return named(msgspec.structs.replace(case, structure=structure, axes={}), "shrunk")


def smaller_structures(structure: Structure) -> Iterator[Structure]:
    """Structures with a request, a head, a rule, a row, a token, a list entry or a storage trick less."""
    for n in range(len(structure.seqlens_q)):
        if len(structure.seqlens_q) > 2:
            yield only_request(structure, n)
    for n in range(len(structure.seqlens_q)):
        if len(structure.seqlens_q) > 1:
            yield without_request(structure, n)
    yield from with_fewer_heads(structure)
    yield from without_extras(structure)
    yield from with_shorter_lengths(structure)
    if structure.candidates is not None:
        yield from with_shorter_lists(structure, structure.candidates)
    yield from with_smaller_storage(structure)


def with_fewer_heads(structure: Structure) -> Iterator[Structure]:
    """One KV head with its group, or the first query head of every group."""
    group = structure.num_qo_heads // structure.num_kv_heads
    if structure.num_kv_heads > 1:
        for head in dict.fromkeys((0, structure.num_kv_heads - 1)):
            yield with_heads(structure, (head,), tuple(range(head * group, (head + 1) * group)))
    if group > 1:
        every = tuple(range(structure.num_kv_heads))
        yield with_heads(structure, every, tuple(head * group for head in every))


def with_heads(structure: Structure, kv_heads: tuple[int, ...], qo_heads: tuple[int, ...]) -> Structure:
    """The structure with these heads alone; what is given per head is cut with them."""
    changes: dict[str, object] = {
        "num_qo_heads": len(qo_heads),
        "num_kv_heads": len(kv_heads),
        "score_rules": tuple(of_heads(rule, qo_heads, structure.num_qo_heads) for rule in structure.score_rules),
        "epilogue": tuple(of_heads(step, qo_heads, structure.num_qo_heads) for step in structure.epilogue),
    }
    if structure.mask_rule is not None:
        changes["mask_rule"] = of_heads(structure.mask_rule, qo_heads, structure.num_qo_heads)
    if structure.head_pages is not None:
        changes["head_pages"] = tuple(tuple(row[h] for h in kv_heads) for row in structure.head_pages)
    if structure.sink_logits is not None:
        changes["sink_logits"] = tuple(structure.sink_logits[h] for h in qo_heads)
    lists = structure.candidates
    if lists is not None and lists.sharing != "shared":
        kept = qo_heads if lists.sharing == "query_head" else kv_heads
        heads = structure.num_qo_heads if lists.sharing == "query_head" else structure.num_kv_heads
        cut = tuple(entries for i, entries in enumerate(lists.lists) if i % heads in kept)
        changes["candidates"] = msgspec.structs.replace(lists, lists=cut)
    return msgspec.structs.replace(structure, **changes)


def of_heads(rule: R, qo_heads: tuple[int, ...], num_qo_heads: int) -> R:
    """A rule for some of the query heads: whatever it has one of per head is cut, in its parts as well."""
    parts = getattr(rule, "rules", None)
    if parts is not None:
        return msgspec.structs.replace(rule, rules=tuple(of_heads(part, qo_heads, num_qo_heads) for part in parts))
    per_head = {
        name: tuple(getattr(rule, name)[h] for h in qo_heads)
        for name in PER_HEAD
        if isinstance(getattr(rule, name, None), tuple) and len(getattr(rule, name)) == num_qo_heads
    }
    return msgspec.structs.replace(rule, **per_head) if per_head else rule


def with_smaller_storage(structure: Structure) -> Iterator[Structure]:
    """Pages that no request uses left out, in the order in which they lie; smaller head dimensions."""
    used = sorted({page for row in structure.page_table for page in row})
    if structure.page_owner is None and structure.head_pages is None and 0 < len(used) < structure.num_pages:
        new = {page: i for i, page in enumerate(used)}
        table = tuple(tuple(new[page] for page in row) for row in structure.page_table)
        yield msgspec.structs.replace(structure, page_table=table, num_pages=len(used))
    for dim in (4, 16):
        if dim < min(structure.head_dim_qk, structure.head_dim_vo):
            yield msgspec.structs.replace(structure, head_dim_qk=dim, head_dim_vo=dim)


def without_extras(structure: Structure) -> Iterator[Structure]:
    """One optional part removed."""
    if structure.sink_logits is not None:
        yield msgspec.structs.replace(structure, sink_logits=None)
    for i in range(len(structure.score_rules)):
        rules = structure.score_rules[:i] + structure.score_rules[i + 1 :]
        yield msgspec.structs.replace(structure, score_rules=rules)
    if structure.mask_rule is not None:
        yield msgspec.structs.replace(structure, mask_rule=None)
        if isinstance(structure.mask_rule, And | Or):
            for part in structure.mask_rule.rules:
                yield msgspec.structs.replace(structure, mask_rule=part)
    for name, absent in OPTIONAL_PARTS.items():
        if getattr(structure, name) != absent:
            yield msgspec.structs.replace(structure, **{name: absent})
    if structure.interleaved:
        yield msgspec.structs.replace(structure, interleaved=False)
    if structure.layout == "HND":
        yield msgspec.structs.replace(structure, layout="NHD")
    if (structure.hints.num_kv_splits or 1) > 1:
        hints = msgspec.structs.replace(structure.hints, num_kv_splits=1)
        yield msgspec.structs.replace(structure, hints=hints)


def with_shorter_lengths(structure: Structure) -> Iterator[Structure]:
    """One request's query rows or committed tokens cut, to one, to half, or by one."""
    for n, rows in enumerate(structure.seqlens_q):
        for fewer in dict.fromkeys((1, rows // 2, rows - 1)):
            if 0 < fewer < rows:
                yield with_query_rows(structure, n, fewer)
    for n in range(len(structure.seqlens_kv)):
        yield from with_later_start(structure, n)
    for n, tokens in enumerate(structure.seqlens_kv):
        for fewer in dict.fromkeys((structure.seqlens_q[n], tokens // 2, tokens - 1)):
            if max(structure.seqlens_q[n], 1) <= fewer < tokens:
                yield with_tokens(structure, n, fewer)


def with_shorter_lists(structure: Structure, candidates: CandidateStructure) -> Iterator[Structure]:
    """The window or the sink tokens dropped, or one half of one list."""
    for name in ("window", "num_sink_tokens"):
        if getattr(candidates, name):
            yield msgspec.structs.replace(structure, candidates=msgspec.structs.replace(candidates, **{name: 0}))
    for i, entries in enumerate(candidates.lists):
        half = len(entries) // 2
        for kept in (entries[half:], entries[:half]) if half else ():
            lists = (*candidates.lists[:i], kept, *candidates.lists[i + 1 :])
            yield msgspec.structs.replace(structure, candidates=msgspec.structs.replace(candidates, lists=lists))


def lists_of_request(structure: Structure, candidates: CandidateStructure, request: int) -> slice:
    """Which lists belong to a request."""
    heads = {"query_head": structure.num_qo_heads, "kv_head": structure.num_kv_heads, "shared": 1}[candidates.sharing]
    blocks = [-(-rows // candidates.q_block_size) * heads for rows in structure.seqlens_q]
    return slice(sum(blocks[:request]), sum(blocks[: request + 1]))


def only_request(structure: Structure, request: int) -> Structure:
    """One request of the batch."""
    for n in reversed(range(len(structure.seqlens_q))):
        if n != request:
            structure = without_request(structure, n)
    return structure


def without_request(structure: Structure, request: int) -> Structure:
    """The batch without one request."""

    def drop(items: tuple[object, ...]) -> tuple[object, ...]:
        return items[:request] + items[request + 1 :]

    changes: dict[str, object] = {
        name: drop(getattr(structure, name)) for name in ("seqlens_q", "seqlens_kv", "page_table")
    }
    if structure.q_offset is not None:
        changes["q_offset"] = drop(structure.q_offset)
    if structure.candidates is not None:
        mine = lists_of_request(structure, structure.candidates, request)
        lists = structure.candidates.lists[: mine.start] + structure.candidates.lists[mine.stop :]
        changes["candidates"] = msgspec.structs.replace(structure.candidates, lists=lists)
    changes["mask_rule"] = map_requests(structure.mask_rule, lambda items: drop(items))
    return msgspec.structs.replace(structure, **changes)


def map_requests(rule: MaskRule | None, change: Callable[[tuple[object, ...]], tuple[object, ...]]) -> MaskRule | None:
    """A rule with its per-request tables changed."""
    match rule:
        case And(rules) | Or(rules):
            return type(rule)(tuple(part for r in rules if (part := map_requests(r, change)) is not None))
        case PrefixLM(prefix_len):
            return PrefixLM(change(prefix_len))  # type: ignore[arg-type]
        case Document(starts):
            return Document(change(starts))  # type: ignore[arg-type]
        case _:
            return rule


def with_query_rows(structure: Structure, request: int, rows: int) -> Structure:
    """One request with its last `rows` query rows; their logical positions stay."""
    q_block = 1 if structure.candidates is None else structure.candidates.q_block_size
    cut = structure.seqlens_q[request] - rows
    if cut % q_block:
        return structure
    changes: dict[str, object] = {"seqlens_q": replaced(structure.seqlens_q, request, rows)}
    if structure.q_offset is not None:
        changes["q_offset"] = replaced(structure.q_offset, request, structure.q_offset[request] + cut)
    if structure.candidates is not None:
        mine = lists_of_request(structure, structure.candidates, request)
        blocks = -(-structure.seqlens_q[request] // q_block)
        dropped = (mine.stop - mine.start) // max(blocks, 1) * (cut // q_block)
        lists = structure.candidates.lists[: mine.start] + structure.candidates.lists[mine.start + dropped :]
        changes["candidates"] = msgspec.structs.replace(structure.candidates, lists=lists)
    return msgspec.structs.replace(structure, **changes)


def with_tokens(structure: Structure, request: int, tokens: int) -> Structure:
    """One request with its first `tokens` committed tokens; lists lose the ids past the end."""
    pages = -(-tokens // structure.page_size)
    changes: dict[str, object] = {
        "seqlens_kv": replaced(structure.seqlens_kv, request, tokens),
        "page_table": replaced(structure.page_table, request, structure.page_table[request][:pages]),
    }
    if structure.candidates is not None:
        mine = lists_of_request(structure, structure.candidates, request)
        size = structure.candidates.block_size
        lists = tuple(
            tuple(i for i in entries if i * size < tokens) if mine.start <= at < mine.stop else entries
            for at, entries in enumerate(structure.candidates.lists)
        )
        changes["candidates"] = msgspec.structs.replace(structure.candidates, lists=lists)
    return msgspec.structs.replace(structure, **changes)


def with_later_start(structure: Structure, request: int) -> Iterator[Structure]:
    """One request without its first pages, all of them that no list of its names, or one; positions move along.

    Only what is told by distances stays the same when positions move; a prefix or a document does not.
    """
    lists, rule = structure.candidates, structure.mask_rule
    if names_places(rule):
        return
    size = lcm(structure.page_size, 1 if lists is None else lists.block_size)
    longest = (structure.seqlens_kv[request] - max(structure.seqlens_q[request], 1)) // size
    free = longest
    if lists is not None:
        mine = lists.lists[lists_of_request(structure, lists, request)]
        first = min((e for entries in mine for e in entries if e >= 0), default=0)
        free = min(longest, first * lists.block_size // size)
    for steps in dict.fromkeys((free, longest // 2, 1)):
        if 0 < steps <= longest:
            yield without_prefix(structure, request, steps * size)


def names_places(rule: MaskRule | None) -> bool:
    """Whether a rule speaks of positions themselves, and not of distances alone."""
    if isinstance(rule, And | Or):
        return any(names_places(part) for part in rule.rules)
    return type(rule).__name__ not in ("NoneType", "Causal", "Window", "HeadWindow")


def without_prefix(structure: Structure, request: int, tokens: int) -> Structure:
    """One request without its first tokens, whole pages and blocks of them; list entries and queries move with them."""
    pages = structure.page_table[request][tokens // structure.page_size :]
    changes: dict[str, object] = {
        "seqlens_kv": replaced(structure.seqlens_kv, request, structure.seqlens_kv[request] - tokens),
        "page_table": replaced(structure.page_table, request, pages),
    }
    if structure.q_offset is not None:
        changes["q_offset"] = replaced(structure.q_offset, request, structure.q_offset[request] - tokens)
    if structure.candidates is not None:
        mine, gone = (
            lists_of_request(structure, structure.candidates, request),
            tokens // structure.candidates.block_size,
        )
        moved = tuple(
            tuple(e if e < 0 else e - gone for e in entries if e < 0 or e >= gone)
            if mine.start <= at < mine.stop
            else entries
            for at, entries in enumerate(structure.candidates.lists)
        )
        changes["candidates"] = msgspec.structs.replace(structure.candidates, lists=moved)
    return msgspec.structs.replace(structure, **changes)


def replaced(items: tuple[object, ...], index: int, value: object) -> tuple[object, ...]:
    """The tuple with one item replaced."""
    return (*items[:index], value, *items[index + 1 :])
