"""What a plan refuses, what its lists hold and how it cuts the work; no kernel runs here."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import itertools

from attnconform.kernels.sparse_attention import CandidateLists, Plan, PlanError, plan
from attnconform.kernels.sparse_attention.rules import (
    Alibi,
    And,
    Causal,
    Custom,
    Document,
    Or,
    PrefixLM,
    QueryRows,
    SoftCap,
    Window,
    lower_mask,
)
from attnconform.kernels.sparse_attention.tasks import MERGE_FIELDS, TASK_FIELDS

SEQLEN_Q = (3, 0, 6)
SEQLEN_KV = (20, 0, 33)
PAGE_SIZE = 8
PAGE_TABLE = torch.tensor([[4, 1, 7, -1, -1, -1], [-1] * 6, [0, 2, 9, 3, 5, -1]], dtype=torch.int32)
LENGTHS = {"query_head": 4, "kv_head": 2, "shared": 1}


def build(**changes) -> Plan:
    options = {
        "qo_indptr": [0, 3, 3, 9],
        "seqlen_kv": list(SEQLEN_KV),
        "page_table": PAGE_TABLE,
        "page_size": PAGE_SIZE,
        "num_pages": 10,
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim_qk": 64,
        "head_dim_vo": 64,
        "sm_scale": 0.125,
        "dtype": torch.float32,
        "device": "cpu",
    }
    return plan(**{**options, **changes})


def draw_lists(sharing: str, block_size: int, q_block_size: int, seed: int = 0) -> tuple[CandidateLists, list]:
    """Lists with holes and duplicates, and (request, first row, row count, entries) of each."""
    rng, owners = np.random.default_rng(seed), []
    blocks = [(n, first) for n in range(3) for first in range(0, SEQLEN_Q[n], q_block_size)]
    for n, first in np.repeat(blocks, LENGTHS[sharing], axis=0).tolist():
        drawn = rng.integers(-1, -(-SEQLEN_KV[n] // block_size), size=rng.integers(0, 12))
        owners.append((n, first, min(q_block_size, SEQLEN_Q[n] - first), drawn))
    indptr = np.concatenate([[0], np.cumsum([len(owner[3]) for owner in owners])])
    lists = CandidateLists(
        granularity="token" if block_size == 1 else "block",
        sharing=sharing,
        indptr=torch.as_tensor(indptr),
        indices=torch.as_tensor(np.concatenate([owner[3] for owner in owners])),
        block_size=block_size,
        q_block_size=q_block_size,
    )
    return lists, owners


@pytest.mark.parametrize("sharing", ["query_head", "kv_head", "shared"])
@pytest.mark.parametrize(
    ("block_size", "q_block_size", "window", "num_sink_tokens"), [(1, 1, None, 0), (4, 4, 5, 2), (16, 2, 1, 40)]
)
def test_lists_hold_the_union_of_their_parts(sharing, block_size, q_block_size, window, num_sink_tokens):
    candidates, owners = draw_lists(sharing, block_size, q_block_size)
    got = build(candidates=candidates, window=window, num_sink_tokens=num_sink_tokens)
    assert got.list_indptr.dtype == got.list_positions.dtype == torch.int32
    assert got.list_slots.dtype == torch.int32
    for i, (n, first, count, entries) in enumerate(owners):
        length, start = SEQLEN_KV[n], SEQLEN_KV[n] - SEQLEN_Q[n] + first
        members = {e * block_size + t for e in entries[entries != -1] for t in range(block_size)} & set(range(length))
        members |= set(range(min(num_sink_tokens, length)))
        windows = {j for i in range(start, start + count) for j in range(max(0, i - (window or 0) + 1), i + 1)}
        want = np.array(sorted(members | (windows if window else set())), dtype=np.int64)
        here = slice(int(got.list_indptr[i]), int(got.list_indptr[i + 1]))
        assert got.list_positions[here].tolist() == want.tolist()
        assert got.list_members[here].tolist() == [j in members for j in want]
        pages = PAGE_TABLE[n].numpy()[want // PAGE_SIZE]
        assert got.list_slots[here].tolist() == (pages * PAGE_SIZE + want % PAGE_SIZE).tolist()


@pytest.mark.parametrize("last_token", [47, 46], ids=["whole blocks", "a cut block"])
@pytest.mark.parametrize("block_size", [2, 8, 12, 16, 24])
def test_slots_of_blocks_follow_the_page_table_whatever_their_size_and_the_pages(block_size, last_token):
    table = torch.tensor([[4, 1, 7, 0, 2, 9], [8, 3, 5, 6, -1, -1]], dtype=torch.int32)
    lengths = (last_token + 1, 24)
    blocks = [torch.arange(-(-length // block_size)) for length in lengths]
    lists = CandidateLists(
        granularity="block", sharing="shared", block_size=block_size, indices=torch.cat(blocks),
        indptr=torch.tensor([0, len(blocks[0]), len(blocks[0]) + len(blocks[1])]),
    )  # fmt: skip
    got = build(qo_indptr=[0, 1, 2], seqlen_kv=list(lengths), page_table=table, candidates=lists)
    want = [int(table[n, j // PAGE_SIZE]) * PAGE_SIZE + j % PAGE_SIZE for n in range(2) for j in range(lengths[n])]
    assert got.list_indptr.tolist() == [0, lengths[0], sum(lengths)]
    assert got.list_positions.tolist() == [j for length in lengths for j in range(length)]
    assert got.list_slots.tolist() == want


def test_fixed_width_lists_with_holes_are_passed_flattened():
    indices = torch.tensor([[3, -1, 1], [-1, -1, -1], [2, 2, -1]] * 3)
    lists = CandidateLists(
        granularity="token", sharing="shared", indptr=torch.arange(10) * 3, indices=indices.flatten()
    )
    got = build(candidates=lists)
    assert got.list_indptr.tolist() == [0, 2, 2, 3, 5, 5, 6, 8, 8, 9]
    assert got.list_positions.tolist() == [1, 3, 2] * 3


def corrupt(values: torch.Tensor, index: int, value: int) -> torch.Tensor:
    values = values.clone()
    values[index] = value
    return values


TOKENS = CandidateLists(granularity="token", sharing="shared", indptr=torch.arange(10) * 2, indices=torch.arange(18))
BLOCKS = replace(TOKENS, granularity="block", block_size=8, indices=torch.tensor([0, 2] * 9))


@pytest.mark.parametrize(
    ("changes", "clause", "name", "index", "value"),
    [
        (
            {"candidates": replace(TOKENS, indices=corrupt(TOKENS.indices, 13, -2))},
            "SET-RANGE",
            "candidates.indices",
            (13,),
            -2,
        ),
        (
            {"candidates": replace(TOKENS, indices=corrupt(TOKENS.indices, 5, 20))},
            "SET-RANGE",
            "candidates.indices",
            (5,),
            20,
        ),
        (
            {"candidates": replace(TOKENS, indices=corrupt(TOKENS.indices, 7, 33))},
            "SET-RANGE",
            "candidates.indices",
            (7,),
            33,
        ),
        (
            {"candidates": replace(BLOCKS, indices=corrupt(BLOCKS.indices, 4, 3))},
            "SET-RANGE",
            "candidates.indices",
            (4,),
            3,
        ),
        ({"candidates": replace(TOKENS, indptr=torch.arange(9) * 2)}, "SAFE-SHAPE", "len(candidates.indptr)", None, 9),
        (
            {"candidates": replace(TOKENS, indptr=corrupt(TOKENS.indptr, 9, 17))},
            "SAFE-SHAPE",
            "candidates.indptr",
            (9,),
            17,
        ),
        (
            {"candidates": replace(TOKENS, indptr=corrupt(TOKENS.indptr, 4, 11))},
            "SAFE-SHAPE",
            "candidates.indptr",
            (5,),
            10,
        ),
        ({"candidates": replace(TOKENS, block_size=2)}, "SAFE-SHAPE", "candidates.block_size", None, 2),
        ({"candidates": replace(TOKENS, q_block_size=0)}, "SAFE-SHAPE", "candidates.q_block_size", None, 0),
        ({"candidates": replace(TOKENS, sharing="row")}, "SAFE-SHAPE", "candidates.sharing", None, "row"),
        (
            {"candidates": replace(TOKENS, indices=torch.zeros(18))},
            "SAFE-SHAPE",
            "candidates.indices.dtype",
            None,
            torch.float32,
        ),
        ({"num_pages": 9}, "COORD-PAGE-RANGE", "page_table", (2, 2), 9),
        ({"seqlen_kv": [25, 0, 33]}, "COORD-PAGE-RANGE", "page_table", (0, 3), -1),
        (
            {"page_table": corrupt(PAGE_TABLE.flatten(), 1, -7).reshape(3, 6)},
            "COORD-PAGE-RANGE",
            "page_table",
            (0, 1),
            -7,
        ),
        ({"page_table": PAGE_TABLE[:, :4]}, "SAFE-SHAPE", "page_table.shape", None, (3, 4)),
        ({"page_table": PAGE_TABLE[:2]}, "SAFE-SHAPE", "page_table.shape", None, (2, 6)),
        ({"page_table": PAGE_TABLE.float()}, "SAFE-SHAPE", "page_table.dtype", None, torch.float32),
        ({"qo_indptr": [0, 3, 9]}, "SAFE-SHAPE", "len(qo_indptr)", None, 3),
        ({"qo_indptr": [0, 3, 2, 9]}, "SAFE-SHAPE", "qo_indptr", (2,), 2),
        ({"qo_indptr": [1, 3, 3, 9]}, "SAFE-SHAPE", "qo_indptr", (0,), 1),
        ({"seqlen_kv": [20, -1, 33]}, "SAFE-SHAPE", "seqlen_kv", (1,), -1),
        ({"q_offset": [0, 0]}, "SAFE-SHAPE", "len(q_offset)", None, 2),
        ({"q_offset": [0, 0, 2**31 - 6]}, "SAFE-SHAPE", "q_offset", (2,), 2**31 - 6),
        ({"num_qo_heads": 5}, "GQA-MAP", "num_qo_heads", None, 5),
        ({"num_kv_heads": 0}, "SAFE-SHAPE", "num_kv_heads", None, 0),
        ({"head_dim_qk": 577}, "SAFE-SHAPE", "head_dim_qk", None, 577),
        ({"head_dim_vo": 513}, "SAFE-SHAPE", "head_dim_vo", None, 513),
        ({"order": "page"}, "SAFE-SHAPE", "order", None, "page"),
        ({"rows_per_union": 3}, "SAFE-SHAPE", "rows_per_union", None, 3),
        ({"owned": torch.ones(3, 9, dtype=torch.bool)}, "SAFE-SHAPE", "owned.shape", None, (3, 9)),
        ({"page_size": 0}, "SAFE-SHAPE", "page_size", None, 0),
        ({"dtype": torch.float64}, "SAFE-SHAPE", "dtype", None, torch.float64),
        ({"layout": "DNH"}, "SAFE-SHAPE", "layout", None, "DNH"),
        ({"window": -1}, "SAFE-SHAPE", "window", None, -1),
        ({"num_sink_tokens": -1}, "SAFE-SHAPE", "num_sink_tokens", None, -1),
        ({"num_kv_splits": 0}, "SAFE-SHAPE", "num_kv_splits", None, 0),
        ({"tile_kv": 24}, "SAFE-SHAPE", "tile_kv", None, 24),
        ({"sm_scale": float("inf")}, "SAFE-FINITE", "sm_scale", None, float("inf")),
        ({"sink_logits": torch.zeros(3)}, "SAFE-SHAPE", "sink_logits.shape", None, (3,)),
        ({"sink_logits": torch.tensor([0.0, 1.0, torch.inf, 0.0])}, "SAFE-FINITE", "sink_logits", (2,), torch.inf),
        ({"mask_rule": PrefixLM((1, 2))}, "SAFE-SHAPE", "len(prefix_len)", None, 2),
        ({"mask_rule": Document(((0,), (0,)))}, "SAFE-SHAPE", "len(starts)", None, 2),
        ({"score_rules": (Alibi((0.5,)),)}, "SAFE-SHAPE", "len(slopes)", None, 1),
        ({"score_rules": (Alibi((0.5, 0.1, torch.inf, 0.0)),)}, "SAFE-FINITE", "slopes", (2,), torch.inf),
        ({"mask_rule": Or((Custom(None), Causal()))}, "MASK-COMPOSE", "mask_rule", None, "Custom"),
    ],
)
def test_bad_input_is_refused_by_name_index_value_and_clause(changes, clause, name, index, value):
    with pytest.raises(PlanError) as caught:
        build(**changes)
    error = caught.value
    assert (error.clause, error.name, error.index, error.value) == (clause, name, index, value)
    place = "" if index is None else f"[{', '.join(map(str, index))}]"
    assert str(error).startswith(f"{name}{place} is {value}, but ")
    assert str(error).endswith(f" [{clause}]")
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Window(left=-1), "window_left"),
        (lambda: Window(right=-2), "window_right"),
        (lambda: Document(((0, 5, 5),)), "starts"),
        (lambda: And(()), "rules"),
        (lambda: Or(()), "rules"),
        (lambda: SoftCap(0.0), "cap"),
    ],
)
def test_rule_without_meaning_is_refused_when_made(make, name):
    with pytest.raises(PlanError, match=rf"^{name}"):
        make()


def test_page_ids_past_the_length_are_never_looked_at():
    table = PAGE_TABLE.clone()
    table[0, 3:], table[1] = 10**6, -5
    assert build(page_table=table).page_table.tolist() == PAGE_TABLE.tolist()


DOCUMENTS = Document(((0, 7, 19), (), (4, 5, 30)))
MASKS = {
    "none": (None, lambda n, i, j: True),
    "causal": (Causal(), lambda n, i, j: j <= i),
    "window": (Window(5, 2), lambda n, i, j: -2 <= i - j <= 5),
    "right": (Window(None, 0), lambda n, i, j: j <= i),
    "prefix": (PrefixLM((4, 1, 40)), lambda n, i, j: j < (4, 1, 40)[n] or j <= i),
    "document": (DOCUMENTS, lambda n, i, j: document(n, i) == document(n, j)),
    "and": (And((Causal(), DOCUMENTS)), lambda n, i, j: j <= i and document(n, i) == document(n, j)),
    "or": (
        Or((Window(1, 1), DOCUMENTS, PrefixLM((2, 2, 2)))),
        lambda n, i, j: abs(i - j) <= 1 or document(n, i) == document(n, j) or j < 2 or j <= i,
    ),
    "and_of_ors": (
        And((Or((Window(0, 0), Window(20, 0), Causal(), Window(3))), Or((DOCUMENTS, Window(2, 9))), Causal())),
        lambda n, i, j: i - j >= 0 and (document(n, i) == document(n, j) or i - j <= 2),
    ),
}  # fmt: skip


def document(n: int, position: int) -> int:
    return sum(start <= position for start in DOCUMENTS.starts[n])


@pytest.mark.parametrize(("rule", "allows"), MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("q_offset", [-3, 0, 14, 35])
def test_interval_of_every_row_allows_exactly_what_the_rule_says(rule, allows, q_offset):
    request, position = torch.tensor([0] * 9 + [2] * 9), torch.arange(9).repeat(2) + q_offset
    rows = QueryRows(request, position, torch.tensor(SEQLEN_KV)[request], 3)
    mask = lower_mask(rule, rows)
    for r, (n, i) in enumerate(zip(request.tolist(), position.tolist(), strict=True)):
        assert list(range(int(mask.starts[0, r]), int(mask.ends[0, r]))) == [
            j for j in range(SEQLEN_KV[n]) if allows(n, i, j)
        ]


def test_values_of_a_rule_change_no_compiled_constant():
    first, second = (
        build(mask_rule=Or((Window(w, 0), PrefixLM((w, w, w)))), score_rules=(Alibi((w, w, w, w)), SoftCap(w)))
        for w in (2, 9)
    )
    assert first.mask_starts.shape == second.mask_starts.shape
    assert first.score_codes == second.score_codes == (0, 1)


def columns(table: torch.Tensor, names: tuple[str, ...]) -> list[dict[str, int]]:
    return [dict(zip(names, row, strict=True)) for row in table.tolist()]


def covered(got: Plan) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """The runs of keys that the tasks of every (row, head) walk, ascending."""
    runs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for launch in got.launches:
        for task in columns(launch.tasks, TASK_FIELDS):
            assert task["q_count"] <= launch.shape.tile_q
            assert task["head_count"] <= launch.shape.heads_per_tile
            for row in range(task["q_start"], task["q_start"] + task["q_count"]):
                for head in range(task["head_start"], task["head_start"] + task["head_count"]):
                    assert head // got.group_size == task["kv_head"]
                    assert got.row_requests[row] == task["request"]
                    runs.setdefault((row, head), []).append((task["kv_start"], task["kv_end"]))
    return {key: sorted(spans) for key, spans in sorted(runs.items())}


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("sharing", [None, "query_head", "kv_head", "shared"])
def test_tasks_cover_every_row_and_key_once(splits, sharing):
    candidates = draw_lists(sharing, 4, 4)[0] if sharing else None
    got = build(candidates=candidates, num_kv_splits=splits, tile_kv=16, mask_rule=PrefixLM((0, 0, 33)))
    runs = covered(got)
    assert list(runs) == [(row, head) for row in range(9) for head in range(4)]
    for (row, head), spans in runs.items():
        assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
        assert len(spans) <= splits
        assert len(spans) == 1 or all(start < end for start, end in spans)
        assert all((end - start) % 16 == 0 for start, end in spans[:-1])
        positions = range(spans[0][0], spans[-1][1])
        if sharing:
            head_list = {"query_head": head, "kv_head": head // 2, "shared": 0}[sharing]
            n = int(got.row_requests[row])
            block = [0, 1, 1][n] + (row - int(got.qo_indptr[n])) // 4
            i = block * LENGTHS[sharing] + head_list
            entries = range(int(got.list_indptr[i]), int(got.list_indptr[i + 1]))
            assert set(positions) <= set(entries)
            positions = [int(got.list_positions[e]) for e in positions]
            left_out = {int(got.list_positions[e]) for e in entries} - set(positions)
        else:
            left_out = set(range(int(got.seqlen_kv[got.row_requests[row]]))) - set(positions)
        end = int(got.mask_ends[0, row])
        assert all(j >= end for j in left_out)


@pytest.mark.parametrize("splits", [2, 8])
def test_every_partial_state_is_written_once_and_merged_once(splits):
    got = build(num_kv_splits=splits, tile_kv=16)
    for launch in got.launches:
        written = sorted(t["partial"] for t in columns(launch.tasks, TASK_FIELDS) if t["partial"] >= 0)
        merged = [
            m["first_partial"] + s for m in columns(launch.merges, MERGE_FIELDS) for s in range(m["num_partials"])
        ]
        assert written == sorted(merged) == list(range(launch.partial_sum.shape[0]))
        assert all(m["num_partials"] > 1 for m in columns(launch.merges, MERGE_FIELDS))


@pytest.mark.parametrize("window", [None, 4])
def test_keys_without_a_mask_are_admitted_by_every_row_of_the_task(window):
    rule = Or((And((Causal(), Window(11))), PrefixLM((3, 0, 9))))
    candidates = draw_lists("kv_head", 4, 4)[0]
    for options in ({"candidates": candidates, "window": window}, {}):
        got = build(mask_rule=rule, tile_kv=16, **options)
        seen = 0
        for task in (t for launch in got.launches for t in columns(launch.tasks, TASK_FIELDS)):
            assert task["kv_start"] <= task["full_start"] <= task["full_end"] <= task["kv_end"]
            for row in range(task["q_start"], task["q_start"] + task["q_count"]):
                for key in range(task["full_start"], task["full_end"]):
                    j = key if not options else int(got.list_positions[key])
                    assert got.mask_starts[0, row] <= j < got.mask_ends[0, row]
                    seen += 1
                    assert not options or got.list_members[key] or 0 <= int(got.row_positions[row]) - j < window
        assert seen > 0


def test_longest_tasks_come_first():
    got = build(mask_rule=Causal(), num_kv_splits=3, tile_kv=16, candidates=draw_lists("kv_head", 4, 1)[0])
    for launch in got.launches:
        lengths = [t["kv_end"] - t["kv_start"] for t in columns(launch.tasks, TASK_FIELDS)]
        assert lengths == sorted(lengths, reverse=True)


def test_decode_rows_and_prefill_rows_have_tiles_of_their_own():
    got = build(qo_indptr=[0, 1, 1, 101], dtype=torch.bfloat16)
    assert [launch.shape.tile_m for launch in got.launches] == [16, 256]
    assert [launch.shape.tile_q for launch in got.launches] == [1, 100]


def test_empty_batch_has_no_launch():
    assert build(qo_indptr=[0], seqlen_kv=[], page_table=torch.zeros(0, 3, dtype=torch.int32)).launches == ()
    assert build(qo_indptr=[0, 0, 0, 0]).launches == ()
