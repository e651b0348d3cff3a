"""The large oracle against Steps, on numpy and on torch, with tiles of every size."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from feature_structures import SMALL, featured_cases, features_of, with_features
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnconform.conformance.cases import profiles
from attnconform.conformance.cases.sample_rules import DECAY
from attnconform.conformance.cases.structure import Case, build_problem
from attnconform.conformance.cases.values import Values, build_values
from attnconform.reference import large
from attnconform.reference.attention import attention, attention_gradients, effective_sets
from attnconform.reference.cache import PagedCache
from attnconform.reference.candidates import Candidates
from attnconform.reference.dropout import Dropout
from attnconform.reference.epilogue import Activation
from attnconform.reference.errors import RefusedInput
from attnconform.reference.large import large_attention, large_gradients
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.quantization import Quantization
from attnconform.reference.rope import Rope
from attnconform.reference.rules import Causal, CustomScore
from attnconform.reference.steps import Steps

profiles.load_profile()

FEATURES = ("head_pages", "sequence", "relative_bias", "head_window", "custom_mask")
MET = {"head_pages", "sequence", "lists", "sinks", "Alibi", "RelativeBias", "SoftCap", "HeadWindow", "CustomMask"}
CASES = featured_cases(with_features(SMALL, features=FEATURES), values=("normal", "equal_keys", "peaked"))
LIBRARIES: dict[str, Callable[[np.ndarray], Any]] = {"numpy": np.asarray, "torch": torch.from_numpy}
BOUND = 1e-12


def assert_close(got: Any, want: np.ndarray, name: str) -> None:
    got = np.asarray(got)
    assert got.shape == want.shape, name
    finite = np.isfinite(want)
    assert np.array_equal(np.isneginf(got), np.isneginf(want)), name
    assert np.abs(got[finite] - want[finite]).max(initial=0.0) <= BOUND * max(1, np.abs(want[finite]).max(initial=0))


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_large_oracle_gives_what_steps_give(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    met: set[str] = set()
    into = LIBRARIES[library]

    @settings(max_examples=profiles.examples(120), suppress_health_check=[HealthCheck.too_slow])
    @given(CASES, st.sampled_from((1, 7, 64, 1 << 20)), st.sampled_from((1, 2, 128)))
    def check(case: Case, tile_edges: int, tile_rows: int) -> None:
        monkeypatch.setattr(large, "TILE_EDGES", tile_edges)
        monkeypatch.setattr(large, "TILE_ROWS", tile_rows)
        problem = build_problem(case.structure)
        values = build_values(case, problem)
        compare(problem, values, into)
        met.update(features_of(case.structure))

    check()
    assert met >= MET


def compare(problem: AttentionProblem, values: Values, into: Callable[[np.ndarray], Any]) -> None:
    want = attention(problem, values.q, values.k, values.v)
    q, k, v, dout, dlse = (into(x) for x in (values.q, values.k, values.v, values.dout, values.dlse))
    got = large_attention(problem, q, k, v)
    assert type(got.out) is type(q)
    assert_close(got.out, want.out, "out")
    assert_close(got.lse, want.lse, "lse")
    owed = attention_gradients(problem, values.q, values.k, values.v, values.dout, values.dlse)
    found = large_gradients(problem, q, k, v, got, dout, dlse)
    assert np.array_equal(found.slots, owed.slots)
    for name in ("dq", "dk", "dv"):
        assert_close(getattr(found, name), getattr(owed, name), name)
    if owed.dsink is not None:
        assert_close(found.dsink, owed.dsink, "dsink")


def long_prefill(rows: int, seqlen_kv: int) -> AttentionProblem:
    """More rows than a tile has, lists per KV head of blocks of rows, aliased pages and a window."""
    rng = np.random.default_rng(rows)
    pages = -(-seqlen_kv // 16)
    table = rng.permutation(pages)
    table[3] = table[1]
    num_lists = -(-rows // 96) * 2
    return AttentionProblem(
        qo_indptr=np.array([0, rows]),
        seqlen_kv=np.array([seqlen_kv]),
        q_offset=np.array([seqlen_kv - rows]),
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim_qk=8,
        head_dim_vo=4,
        cache=PagedCache(page_size=16, num_pages=pages, page_table=table[None]),
        sm_scale=0.35,
        candidates=Candidates(
            indptr=np.arange(num_lists + 1) * 5,
            indices=rng.integers(0, pages, num_lists * 5),
            granularity="block",
            block_size=16,
            sharing="kv_head",
            q_block_size=96,
            window=20,
            num_sink_tokens=3,
        ),
        mask_rule=Causal(),
    )


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("has_lists", [True, False])
def test_rows_beyond_one_tile_and_blocks_that_do_not_divide_give_what_steps_give(library: str, has_lists: bool) -> None:
    problem = long_prefill(150, 213)
    problem = problem if has_lists else replace(problem, candidates=None)
    rng = np.random.default_rng(0)
    slots = problem.cache.num_slots
    values = Values(
        q=rng.normal(size=(150, 4, 8)),
        k=rng.normal(size=(slots, 2, 8)),
        v=rng.normal(size=(slots, 2, 4)),
        dout=rng.normal(size=(150, 4, 4)),
        dlse=rng.normal(size=(150, 4)),
    )
    compare(problem, values, LIBRARIES[library])


def test_no_key_outside_the_sets_is_read_and_each_tile_is_as_small_as_it_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = long_prefill(150, 2000)
    attended = set(effective_sets(problem).slots.tolist())
    for edges in (200, 5000):
        monkeypatch.setattr(large, "TILE_EDGES", edges)
        found = [tile for unit in large.units(problem) for tile in large.tiles(problem, unit)]
        assert max(tile.mask.shape[1] * 2 * len(tile.positions) for tile in found) <= max(edges, 96 * 2)
        assert {slot for tile in found for slot in tile.slots.tolist()} == attended
    everything = sum(len(tile.slots) for unit in large.units(problem) for tile in large.tiles(problem, unit))
    listed = sum(len(unit.positions) for unit in large.units(problem))
    assert everything <= listed < 4 * 2 * (5 * 16 + 20 + 96 + 3)


REFUSED: dict[str, Any] = {
    "k_quant": Quantization(format="int8", granularity="tensor", scale=np.ones(1)),
    "v_quant": Quantization(format="int8", granularity="tensor", scale=np.ones(1)),
    "dropout": Dropout(0.5, 0),
    "rope": Rope(rotary_dim=4, k_position="raw"),
    "epilogue": (Activation("relu"),),
    "score_rules": (CustomScore(DECAY),),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_compute_is_refused_in_one_line(name: str) -> None:
    problem = replace(long_prefill(2, 64), **{name: REFUSED[name]})
    q, k, v = np.ones((2, 4, 8)), np.ones((64, 2, 8)), np.ones((64, 2, 4))
    with pytest.raises(RefusedInput, match=rf"^{name} is \w+, but the large oracle does without it \[SAFE-REFUSE\]$"):
        large_attention(problem, q, k, v)
    with pytest.raises(RefusedInput, match="the large oracle does without it"):
        large_gradients(problem, q, k, v, Steps().forward(problem, q, k, v), v)


def test_encoded_keys_are_left_alone() -> None:
    problem = long_prefill(2, 64)
    in_order = replace(problem.cache, page_table=np.arange(4)[None])
    problem = replace(problem, cache=in_order, rope=Rope(rotary_dim=4))
    rng = np.random.default_rng(3)
    q, k, v = rng.normal(size=(2, 4, 8)), rng.normal(size=(64, 2, 8)), rng.normal(size=(64, 2, 4))
    assert_close(large_attention(problem, q, k, v).out, attention(problem, q, k, v).out, "out")


def test_another_precision_is_refused() -> None:
    problem = long_prefill(2, 64)
    k, v = torch.ones((64, 2, 8), dtype=torch.float64), torch.ones((64, 2, 4), dtype=torch.float64)
    with pytest.raises(RefusedInput, match=r"q\.dtype is torch\.float32, but the large oracle computes in float64"):
        large_attention(problem, torch.ones((2, 4, 8)), k, v)


def test_an_empty_row_is_refused_where_the_problem_says_so() -> None:
    lists = Candidates(indptr=np.array([0, 1, 2]), indices=np.array([-1, 3]), sharing="shared")
    problem = replace(long_prefill(2, 64), candidates=lists, empty_row="refuse", sink_logits=np.zeros(4))
    q, k, v = np.ones((2, 4, 8)), np.ones((64, 2, 8)), np.ones((64, 2, 4))
    messages = []
    for of in (attention, large_attention):
        with pytest.raises(RefusedInput) as caught:
            of(problem, q, k, v)
        messages.append(str(caught.value))
    assert messages[0] == messages[1] == "row is 0, but it sees no key and empty_row is 'refuse' [EMPTY-POLICY]"
