"""Problems made from another one, whose answers follow from its answer: what metamorphic and lifecycle checks ask."""

from dataclasses import replace

import msgspec
import numpy as np

from attnconform.conformance.cases.structure import CandidateStructure, Dtype, Structure
from attnconform.conformance.cases.values import Values
from attnconform.conformance.judge.trial import Trial, with_values
from attnconform.conformance.views import Hints, ProblemView
from attnconform.reference import philox
from attnconform.reference.candidates import HOLE, Candidates
from attnconform.reference.coordinates import FloatArray, IntArray
from attnconform.reference.epilogue import EpilogueStep, Gate
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.quantization import Quantization
from attnconform.reference.rules import And, CustomMask, Document, MaskRule, Or, PrefixLM

PAGE_STREAM, ENTRY_STREAM, NEW_Q_STREAM, NEW_K_STREAM, NEW_V_STREAM = range(101, 106)
NUM_HOLES = 2
OTHER_SCALE, OTHER_SINK, OTHER_GATE = 0.75, 0.5, 0.75  # the scale times, a logit plus so much
NEXT_DTYPE: dict[Dtype, Dtype] = {"float32": "bfloat16", "bfloat16": "float16", "float16": "float32"}


def variation(
    trial: Trial,
    *,
    structure: Structure | None = None,  # None: the trial's own
    problem: AttentionProblem | None = None,  # None: the one that the structure builds
    values: Values | None = None,  # None: the trial's own
) -> Trial:
    """A trial of another problem before the same backend."""
    structure = structure or trial.case.structure
    other = Trial(msgspec.structs.replace(trial.case, structure=structure), trial.backend)
    other.values = values or trial.values
    if problem is not None:
        other.problem = problem
        other.view = ProblemView(problem, structure.hints, trial.backend.device, structure.interleaved)
    return other


# -- pages -------------------------------------------------------------------------------------------------------------


def with_pages_renumbered(trial: Trial) -> Trial:
    """The pool's pages in another order, and everything that names a page along with them. [COORD-RENUMBER]"""
    problem, values = trial.problem, trial.values
    cache = problem.cache
    new = philox.permutation(trial.case.seed, PAGE_STREAM, cache.num_pages)  # of each page, its place
    old = np.argsort(new)  # of each place, the page that comes there
    slots = (old[:, None] * cache.page_size + np.arange(cache.page_size)).ravel()
    moved = replace(
        cache,
        page_table=np.where(cache.page_table < 0, cache.page_table, new[cache.page_table]),
        owned=None if cache.owned is None else cache.owned[:, old],
        head_pages=None if cache.head_pages is None else new[cache.head_pages][old],
    )
    k_quant, v_quant = (with_scales_moved(quant, old, slots) for quant in (problem.k_quant, problem.v_quant))
    return variation(
        trial,
        problem=replace(problem, cache=moved, k_quant=k_quant, v_quant=v_quant),
        values=with_values(values, k=values.k[slots], v=values.v[slots]),
    )


def with_scales_moved(quant: Quantization | None, pages: IntArray, slots: IntArray) -> Quantization | None:
    """Scales of a cache whose pages moved; those of a tensor, a head or a channel stay."""
    if quant is None or quant.granularity not in ("page", "token"):
        return quant
    return replace(quant, scale=quant.scale[pages if quant.granularity == "page" else slots])


# -- batches -----------------------------------------------------------------------------------------------------------


def rows_of_requests(qo_indptr: IntArray, order: list[int]) -> IntArray:
    """(total_q,) rows of q, request after request in this order."""
    parts = [np.arange(qo_indptr[n], qo_indptr[n + 1]) for n in order]
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def knows_requests(structure: Structure) -> bool:
    """Whether a request's number decides anything: drawn dropout does, and a registered rule may."""
    return structure.dropout is not None or has_custom_mask(structure.mask_rule)


def has_custom_mask(rule: MaskRule | None) -> bool:
    """Whether some part of a rule is a registered one."""
    if isinstance(rule, And | Or):
        return any(has_custom_mask(part) for part in rule.rules)
    return isinstance(rule, CustomMask)


def with_requests_reversed(trial: Trial) -> tuple[Trial, IntArray]:
    """The batch in the other order, and for each row of the first problem its row in this one. [COORD-ROW]"""
    order = list(range(trial.problem.batch_size))[::-1]
    return with_requests(trial, order), np.argsort(rows_of_requests(trial.problem.qo_indptr, order))


def with_requests(trial: Trial, order: list[int]) -> Trial:
    """Some requests of the batch, in this order, over the same cache."""
    structure, values = trial.case.structure, trial.values
    came_from = rows_of_requests(trial.problem.qo_indptr, order)
    changes: dict[str, object] = {
        name: tuple(getattr(structure, name)[n] for n in order) for name in ("seqlens_q", "seqlens_kv", "page_table")
    }
    changes["q_offset"] = tuple(int(trial.problem.q_offset[n]) for n in order)
    changes["mask_rule"] = rule_of_requests(structure.mask_rule, order)
    if structure.page_owner is not None:
        changes["page_owner"] = tuple(order.index(n) if n in order else -1 for n in structure.page_owner)
    if structure.candidates is not None:
        changes["candidates"] = lists_of_requests(trial.problem, structure.candidates, order)
    return variation(
        trial,
        structure=msgspec.structs.replace(structure, **changes),
        values=with_values(values, q=values.q[came_from], dout=values.dout[came_from], dlse=values.dlse[came_from]),
    )


def rule_of_requests(rule: MaskRule | None, order: list[int]) -> MaskRule | None:
    """A mask rule with its numbers per request in another order."""
    match rule:
        case And(parts) | Or(parts):
            kept = tuple(part for part in (rule_of_requests(p, order) for p in parts) if part is not None)
            return type(rule)(kept)
        case PrefixLM(prefix_len):
            return PrefixLM(tuple(prefix_len[n] for n in order))
        case Document(starts):
            return Document(tuple(starts[n] for n in order))
        case _:
            return rule


def lists_of_requests(
    problem: AttentionProblem, candidates: CandidateStructure, order: list[int]
) -> CandidateStructure:
    """Lists of a batch in another order of its requests."""
    blocks = -(-np.diff(problem.qo_indptr) // candidates.q_block_size) * problem.lists_per_block
    starts = np.concatenate([[0], np.cumsum(blocks)])
    lists = tuple(entries for n in order for entries in candidates.lists[starts[n] : starts[n + 1]])
    return msgspec.structs.replace(candidates, lists=lists)


def with_request_appended(trial: Trial) -> Trial:
    """The same batch and a decode request behind it, longer than any, with pages of its own. [DETERMINISM-BATCH]"""
    structure, values = trial.case.structure, trial.values
    length = max(structure.seqlens_kv, default=0) + structure.page_size
    pages = tuple(range(structure.num_pages, structure.num_pages - (-length // structure.page_size)))
    changes: dict[str, object] = {
        "seqlens_q": (*structure.seqlens_q, 1),
        "seqlens_kv": (*structure.seqlens_kv, length),
        "q_offset": (*(int(start) for start in trial.problem.q_offset), length - 1),
        "num_pages": structure.num_pages + len(pages),
        "page_table": (*structure.page_table, pages),
        "mask_rule": rule_with_request(structure.mask_rule),
    }
    if structure.page_owner is not None:
        changes["page_owner"] = (*structure.page_owner, *(len(structure.seqlens_q) for _ in pages))
    if structure.head_pages is not None:
        changes["head_pages"] = (*structure.head_pages, *((page,) * structure.num_kv_heads for page in pages))
    if structure.candidates is not None:
        num_ids = -(-length // structure.candidates.block_size)
        width = min(num_ids, max((len(entries) for entries in structure.candidates.lists), default=1))
        added = (tuple(range(num_ids - width, num_ids)),) * trial.problem.lists_per_block
        changes["candidates"] = msgspec.structs.replace(
            structure.candidates, lists=(*structure.candidates.lists, *added)
        )
    return variation(
        trial,
        structure=msgspec.structs.replace(structure, **changes),
        values=values_with_request(trial, values, len(pages) * structure.page_size),
    )


def rule_with_request(rule: MaskRule | None) -> MaskRule | None:
    """A mask rule that has numbers for one request more."""
    match rule:
        case And(parts) | Or(parts):
            return type(rule)(tuple(part for part in (rule_with_request(p) for p in parts) if part is not None))
        case PrefixLM(prefix_len):
            return PrefixLM((*prefix_len, 1))
        case Document(starts):
            return Document((*starts, (0,)))
        case _:
            return rule


def values_with_request(trial: Trial, values: Values, num_slots: int) -> Values:
    """The numbers, a query row and some slots more; small integers, which every dtype and every code holds."""

    def more(stream: int, like: FloatArray, count: int) -> FloatArray:
        drawn = philox.integers(trial.case.seed, stream, (count, *like.shape[1:]), low=-1, high=2)
        return np.concatenate([like, drawn.astype(np.float64)])

    return with_values(
        values,
        q=more(NEW_Q_STREAM, values.q, 1),
        dout=more(NEW_Q_STREAM, values.dout, 1),
        dlse=more(NEW_Q_STREAM, values.dlse, 1),
        k=more(NEW_K_STREAM, values.k, num_slots),
        v=more(NEW_V_STREAM, values.v, num_slots),
    )


# -- lists -------------------------------------------------------------------------------------------------------------


def with_lists_relisted(trial: Trial, listing: str) -> Trial:
    """Every list's ids, listed otherwise: shuffled, with holes, with duplicates, or all of these. [SET-ORDER]"""
    candidates = trial.case.structure.candidates
    assert candidates is not None
    lists = tuple(relisted(entries, listing, trial.case.seed + i) for i, entries in enumerate(candidates.lists))
    return with_candidates(trial, msgspec.structs.replace(candidates, lists=lists))


def relisted(entries: tuple[int, ...], listing: str, seed: int) -> tuple[int, ...]:
    """One list's ids in another listing; an empty list stays one, but for holes."""
    ids = list(dict.fromkeys(entry for entry in entries if entry != HOLE))
    changed = [ids[i] for i in philox.permutation(seed, ENTRY_STREAM, len(ids))]
    if "duplicates" in listing and ids:
        changed += [changed[0], changed[-1]]
    if "holes" in listing:
        middle = len(changed) // 2
        changed = [HOLE, *changed[:middle], *[HOLE] * NUM_HOLES, *changed[middle:], HOLE]
    return tuple(changed)


def with_candidates(
    trial: Trial, candidates: CandidateStructure | None, *, mask_rule: MaskRule | bool | None = True
) -> Trial:
    """The problem with other lists, and with the mask rule given; True: its own."""
    changes: dict[str, object] = {"candidates": candidates}
    if not isinstance(mask_rule, bool):
        changes["mask_rule"] = mask_rule
    return variation(trial, structure=msgspec.structs.replace(trial.case.structure, **changes))


def edges_as_lists(trial: Trial) -> CandidateStructure:
    """Token lists of what each row and query head attends: nothing is left for a mask to do. [SET-REPRESENTATION]"""
    rows, heads = trial.problem.total_q, trial.problem.num_qo_heads
    lists = [tuple(trial.edges.of(row, h)[0].tolist()) for row in range(rows) for h in range(heads)]
    return CandidateStructure(lists=tuple(lists), sharing="query_head")


def whole_requests_as_lists(trial: Trial, block_size: int) -> CandidateStructure:
    """One list a row of all that its request has committed, in blocks or in tokens. [SET-REPRESENTATION]"""
    lengths = [int(trial.problem.seqlen_kv[where.request]) for where in trial.problem.rows()]
    return CandidateStructure(
        lists=tuple(tuple(range(-(-length // block_size))) for length in lengths),
        granularity="token" if block_size == 1 else "block",
        block_size=block_size,
        sharing="shared",
    )


# -- hints and other problems of the same shapes -----------------------------------------------------------------------


def with_hints(trial: Trial, hints: Hints) -> Trial:
    """The same problem, run otherwise. [MERGE-SPLIT]"""
    return variation(trial, structure=msgspec.structs.replace(trial.case.structure, hints=hints))


def with_half_the_keys(trial: Trial) -> Trial:
    """The same query rows over requests half as long: less of everything, and of the same tensors. [PLAN-REPLAN]

    Queries stay where they are, unless they sit at the end and there is room for them at the new one.
    """
    structure = trial.case.structure
    lengths = tuple(-(-length // 2) for length in structure.seqlens_kv)
    has_room = all(rows <= length for rows, length in zip(structure.seqlens_q, lengths, strict=True))
    stay = structure.q_offset is not None or not has_room
    pages = [-(-length // structure.page_size) for length in lengths]
    changes: dict[str, object] = {
        "seqlens_kv": lengths,
        "q_offset": tuple(int(start) for start in trial.problem.q_offset) if stay else None,
        "page_table": tuple(row[:count] for row, count in zip(structure.page_table, pages, strict=True)),
    }
    if structure.candidates is not None:
        changes["candidates"] = lists_within(trial.problem, structure.candidates, lengths)
    return variation(trial, structure=msgspec.structs.replace(structure, **changes))


def with_a_request_ended(trial: Trial) -> Trial:
    """The same query rows, and no key any more for those of the longest request: it fills up a batch. [PLAN-REPLAN]"""
    structure = trial.case.structure
    ended = int(np.argmax(trial.problem.seqlen_kv))
    lengths = tuple(0 if n == ended else length for n, length in enumerate(structure.seqlens_kv))
    changes: dict[str, object] = {
        "seqlens_kv": lengths,
        "q_offset": tuple(int(start) for start in trial.problem.q_offset),
        "page_table": tuple(() if n == ended else row for n, row in enumerate(structure.page_table)),
    }
    if structure.candidates is not None:
        changes["candidates"] = lists_within(trial.problem, structure.candidates, lengths)
    return variation(trial, structure=msgspec.structs.replace(structure, **changes))


def with_other_numbers(trial: Trial) -> Trial:
    """The same shapes over other pages, and other numbers wherever there are any. [PLAN-REPLAN]

    Everything that a plan may hold and that is neither a length, a list nor a rule. Queries with places of their own
    move one position back; those at the end of their request stay there, for a decode backend knows no other place.
    """
    moved = with_pages_renumbered(trial)
    problem = moved.problem
    dropout, sinks, lists = problem.dropout, problem.sink_logits, problem.candidates
    other = replace(
        problem,
        sm_scale=OTHER_SCALE * problem.sm_scale,
        q_offset=problem.q_offset - (problem.q_offset > 0) * (trial.case.structure.q_offset is not None),
        sink_logits=None if sinks is None else sinks + OTHER_SINK,
        dropout=None if dropout is None else replace(dropout, seed=dropout.seed + 1),
        k_quant=with_half_scales(problem.k_quant),
        v_quant=with_half_scales(problem.v_quant),
        epilogue=tuple(other_step(step) for step in problem.epilogue),
        candidates=None if lists is None else with_other_local_keys(lists),
    )
    return variation(moved, problem=other)


def with_half_scales(quantization: Quantization | None) -> Quantization | None:
    """Codes that are worth half as much."""
    return None if quantization is None else replace(quantization, scale=quantization.scale / 2)


def other_step(step: EpilogueStep) -> EpilogueStep:
    """A gate with other logits; any other step as it is."""
    return Gate(tuple(logit + OTHER_GATE for logit in step.logits)) if isinstance(step, Gate) else step


def with_other_local_keys(lists: Candidates) -> Candidates:
    """One sink position and one of the window more, where there are any; ranks with each other's biases."""
    return replace(
        lists,
        window=lists.window + (lists.window > 0),
        num_sink_tokens=lists.num_sink_tokens + (lists.num_sink_tokens > 0),
        rank_bias=None if lists.rank_bias is None else lists.rank_bias[::-1].copy(),
    )


def with_another_dtype(trial: Trial) -> Trial:
    """The same structure in another dtype, with the numbers that belong to it. [PLAN-REPLAN]"""
    structure = msgspec.structs.replace(trial.case.structure, dtype=NEXT_DTYPE[trial.case.structure.dtype])
    return Trial(msgspec.structs.replace(trial.case, structure=structure), trial.backend)


def lists_within(
    problem: AttentionProblem, candidates: CandidateStructure, lengths: tuple[int, ...]
) -> CandidateStructure:
    """Lists without the ids that shorter requests do not have; a hole stands where one was, and keeps its rank."""
    ids = [-(-length // candidates.block_size) for length in lengths]
    kept = [
        tuple(entry if entry < ids[n] else HOLE for entry in entries)
        for n, entries in zip(requests_of_lists(problem), candidates.lists, strict=True)
    ]
    return msgspec.structs.replace(candidates, lists=tuple(kept))


def requests_of_lists(problem: AttentionProblem) -> list[int]:
    """The request of each list."""
    assert problem.candidates is not None
    blocks = -(-np.diff(problem.qo_indptr) // problem.candidates.q_block_size) * problem.lists_per_block
    return [int(n) for n in np.repeat(np.arange(problem.batch_size), blocks)]


def with_ids_mirrored(trial: Trial) -> Trial:
    """Other lists of the very same lengths: id i of n becomes n - 1 - i. [PLAN-REPLAN]"""
    candidates = trial.case.structure.candidates
    assert candidates is not None
    sizes = -(-trial.problem.seqlen_kv // candidates.block_size)
    lists = [
        tuple(HOLE if entry == HOLE else int(sizes[n]) - 1 - entry for entry in entries)
        for n, entries in zip(requests_of_lists(trial.problem), candidates.lists, strict=True)
    ]
    return with_candidates(trial, msgspec.structs.replace(candidates, lists=tuple(lists)))
