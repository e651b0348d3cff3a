"""From a failing case to a small one that fails the same check: structure first, then the numbers."""

from collections.abc import Callable, Iterator

import msgspec

from attnconform.conformance.cases.structure import CandidateStructure, Case, Structure, named
from attnconform.reference.rules import And, Document, MaskRule, Or, PrefixLM

StillFails = Callable[[Case], bool]
MAX_TRIALS = 150


def shrink(case: Case, still_fails: StillFails) -> Case:
    """The smallest case found that still fails; greedy, one change at a time, at most MAX_TRIALS judgements."""
    trials = 0
    improved = True
    while improved and trials < MAX_TRIALS:
        improved = False
        for smaller in smaller_cases(case):
            trials += 1
            if still_fails(smaller):
                case, improved = smaller, True
                break
            if trials >= MAX_TRIALS:
                break
    return case


def smaller_cases(case: Case) -> Iterator[Case]:
    """Cases that are smaller in one respect, the boldest first."""
    for structure in smaller_structures(case.structure):
        yield named(msgspec.structs.replace(case, structure=structure, axes={}), "shrunk")
    if case.operation == "forward" and case.values not in ("integers", "zero_q"):
        yield named(msgspec.structs.replace(case, values="integers"), "shrunk")


def smaller_structures(structure: Structure) -> Iterator[Structure]:
    """Structures with a request, a rule, a row, a token, a list entry or a storage trick less."""
    for n in range(len(structure.seqlens_q)):
        if len(structure.seqlens_q) > 1:
            yield without_request(structure, n)
    yield from without_extras(structure)
    yield from with_shorter_lengths(structure)
    if structure.candidates is not None:
        yield from with_shorter_lists(structure, structure.candidates)


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


def replaced(items: tuple[object, ...], index: int, value: object) -> tuple[object, ...]:
    """The tuple with one item replaced."""
    return (*items[:index], value, *items[index + 1 :])
