"""L4: cases whose candidates are synthesized from a recorded trace."""

from collections.abc import Iterator

import numpy as np

from attnconform.conformance.cases.clauses_of import clauses_of
from attnconform.conformance.cases.draw import Draw
from attnconform.conformance.cases.structure import (
    REPLAYED,
    CandidateStructure,
    Case,
    Structure,
    build_problem,
    named,
)
from attnconform.conformance.views import Hints
from attnconform.reference.rules import Causal
from attnconform.traces import CandidateRows, GroupKey, Trace, synthesize

PAGE_SIZE = 16
SEQLENS_KV = (384, 640)  # tokens of the two requests of a case: several blocks of the trace, and not multiples of one
ROWS = {"decode": 1, "prefill": 3}  # consecutive query rows of each request
DTYPES = ("bfloat16", "float32", "float16")
TILE_KV, NUM_KV_SPLITS = 64, 2


def trace_cases(trace: Trace, *, seed: int, max_cases: int) -> list[Case]:
    """Cases over the groups of a trace, spread over its layers, phases and selectors."""
    groups = Draw(seed).shuffled(sorted(trace.groups, key=lambda g: (g.layer, g.kv_head, g.phase, g.selector)))
    kinds = sorted({(g.phase, g.selector) for g in groups})
    by_kind = [[g for g in groups if (g.phase, g.selector) == kind] for kind in kinds]
    # one of each kind in turn, so that a small number of cases still has every phase and selector
    in_turn = [kind[i] for i in range(len(groups)) for kind in by_kind if i < len(kind)]
    return [trace_case(trace, group, seed + i, DTYPES[i % len(DTYPES)]) for i, group in enumerate(in_turn[:max_cases])]


def trace_case(trace: Trace, group: GroupKey, seed: int, dtype: str) -> Case:
    """One case: two requests, the trace's own head geometry, lists as the selector gave them."""
    model, rows = trace.header.model, ROWS[group.phase]
    drawn = [draw_rows(trace, group, seed + n, rows, seqlen_kv) for n, seqlen_kv in enumerate(SEQLENS_KV)]
    pages, num_pages = draw_pages(seed)
    structure = Structure(
        dtype=dtype,  # type: ignore[arg-type]  # one of DTYPES
        seqlens_q=(rows,) * len(SEQLENS_KV),
        seqlens_kv=SEQLENS_KV,
        num_qo_heads=model.num_qo_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim_qk=model.head_dim,
        head_dim_vo=model.head_dim,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        page_table=pages,
        candidates=lists_of(drawn, model.num_kv_heads),
        mask_rule=Causal(),
        sm_scale=1 / float(np.sqrt(model.head_dim)),
        hints=Hints(num_kv_splits=NUM_KV_SPLITS, tile_kv=TILE_KV),
    )
    axes = trace_axes(structure, group)
    case = Case(
        id="",
        level=REPLAYED,
        operation="forward",
        structure=structure,
        values="normal",
        seed=seed,
        clauses=clauses_of("forward", axes, build_problem(structure)),
        axes=axes,
    )
    return named(case, f"{trace.header.name}-{group.phase}-{group.selector}-layer{group.layer}")


def draw_rows(trace: Trace, group: GroupKey, seed: int, rows: int, seqlen_kv: int) -> CandidateRows:
    """The last rows of a request, with the holes and repetitions of the recorded lists."""
    return synthesize(
        trace,
        seed=seed,
        num_rows=rows,
        seqlen_kv=seqlen_kv,
        layer=group.layer,
        kv_head=group.kv_head,
        phase=group.phase,
        selector=group.selector,
        as_listed=True,
    )


def lists_of(drawn: list[CandidateRows], num_kv_heads: int) -> CandidateStructure:
    """Every row's list, the same for each KV head that is not recorded apart."""
    lists = tuple(
        tuple(int(i) for i in request.row(r))
        for request in drawn
        for r in range(len(request.q_positions))
        for _ in range(num_kv_heads)
    )
    granularity, block_size = drawn[0].granularity, drawn[0].block_size
    return CandidateStructure(
        lists=lists,
        granularity=granularity,
        block_size=block_size if granularity == "block" else 1,
        sharing="kv_head",
    )


def draw_pages(seed: int) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Shuffled pages for both requests, and two that nobody owns."""
    needed = [-(-t // PAGE_SIZE) for t in SEQLENS_KV]
    ids = Draw(seed).shuffled(range(sum(needed) + 2))
    return (tuple(ids[: needed[0]]), tuple(ids[needed[0] : sum(needed)])), len(ids)


def trace_axes(structure: Structure, group: GroupKey) -> dict[str, str]:
    """Axis values, so that a backend's declaration applies to these cases as to any others."""
    assert structure.candidates is not None
    return {
        "dtype": structure.dtype,
        "heads": f"{structure.num_qo_heads}/{structure.num_kv_heads}",
        "head_dim": f"{structure.head_dim_qk}/{structure.head_dim_vo}",
        "page_size": str(PAGE_SIZE),
        "phase": "decode" if group.phase == "decode" else "chunk",
        "granularity": structure.candidates.granularity,
        "sharing": "kv_head",
        "q_block": "1",
        "listing": "holes_and_duplicates",
        "local": "none",
        "empty": "none",
        "pages": "shuffled",
        "layout": "NHD",
        "strides": "dense",
        "mask": "causal",
        "score": "none",
        "sink": "none",
        "splits": str(NUM_KV_SPLITS),
        "values": "normal",
    }


def touched(case: Case) -> Iterator[tuple[int, int]]:
    """(candidates, pages) of every list of a case, holes and repetitions aside."""
    lists = case.structure.candidates
    assert lists is not None
    for entries in lists.lists:
        ids = np.unique([i for i in entries if i >= 0])
        tokens = (ids[:, None] * lists.block_size + np.arange(lists.block_size)).ravel()
        yield len(tokens), len(np.unique(tokens // case.structure.page_size))
