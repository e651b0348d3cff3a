"""L2 and L3: large, permanent, valid, covering what they say, and quick to list."""

import hashlib
import itertools
import time

import msgspec
import numpy as np
import pytest

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.cases.axes import FORWARD_AXES
from attnconform.conformance.cases.coverage import measure, total
from attnconform.conformance.cases.covering import AXES
from attnconform.conformance.cases.draw import Draw, first_word
from attnconform.conformance.cases.freeze import (
    NUMBERS,
    Unsound,
    fault_of,
    make_cases,
    sound_case,
    structure_seed,
    wide_case,
)
from attnconform.conformance.cases.frozen import FROZEN_LEVELS, frozen_cases, write_frozen
from attnconform.conformance.cases.greedy import Wanted
from attnconform.conformance.cases.matrix import LEVELS, SMOKE_ROW, frozen_rows, matrix
from attnconform.conformance.cases.structure import Case, build_problem, case_digest
from attnconform.conformance.cases.triples import rows_of_strength_three
from attnconform.conformance.cases.values import build_values
from attnconform.conformance.cases.wide_axes import USUAL, core_axes, is_possible_wide, wide_axes
from attnconform.conformance.cases.wide_rows import EDGES, edge_rows
from attnconform.conformance.cases.work import MAX_TILE_STEPS_L1, tile_steps
from attnconform.conformance.clauses import CLAUSES
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.storage import store_inputs
from attnconform.conformance.selection import case_by_id, select_cases
from attnconform.conformance.views import Hints
from attnconform.reference import philox
from attnconform.reference.attention import attention, effective_sets
from attnconform.reference.problem import check_problem

# sha256 of the sorted ids, one a line, as for L1
IDS_DIGESTS = {
    "L2": "d3643107c21ee32052bfab1431a4895f3c57dcffda5c962aa0f2b01ced5eeed7",
    "L3": "7f79af5f626db9ebdf3c279cf26edd520b688a53c6ad0883b8277dfbbc1ba9de",
}
PLAIN = {**USUAL, **SMOKE_ROW}
LISTS = PLAIN | {"granularity": "token", "sharing": "kv_head"}


def sample(level: str, count: int) -> list[Case]:
    """So many cases of a level's own, evenly taken."""
    cases = frozen_cases(level)
    return list(cases[:: len(cases) // count])


def test_l2_is_a_few_times_l1_and_l3_has_ten_thousand_cases() -> None:
    assert len(frozen_cases("L2")) >= 3 * sum(len(frozen_rows(operation)) for operation in AXES)
    assert len(matrix("L3")) >= 10_000


@pytest.mark.parametrize("level", FROZEN_LEVELS)
def test_ids_are_frozen_and_name_the_content(level: str) -> None:
    ids = sorted(case.id for case in frozen_cases(level))
    assert hashlib.sha256("\n".join(ids).encode()).hexdigest() == IDS_DIGESTS[level]
    for case in frozen_cases(level):
        given, operation, slug, digest = case.id.split(".")
        assert (given, operation, case.level) == (level, case.operation, level)
        assert slug
        assert digest == case_digest(case)


def test_every_level_holds_the_one_below_and_no_id_twice() -> None:
    for below, level in itertools.pairwise(LEVELS):
        ids = [case.id for case in matrix(level)]
        assert len(set(ids)) == len(ids)
        assert {case.id for case in matrix(below)} <= set(ids)


def test_ten_thousand_cases_are_listed_in_seconds() -> None:
    matrix("L1")
    frozen_cases.cache_clear()
    started = time.process_time()
    assert len(select_cases("L3")) >= 10_000
    assert time.process_time() - started < 20


def test_shards_part_the_cases() -> None:
    shards = [{case.id for case in select_cases("L3", "", f"{i}/3") if case.level != "L0"} for i in (1, 2, 3)]
    assert sum(map(len, shards)) == len(set().union(*shards)) == len([c for c in matrix("L3") if c.level != "L0"])


@pytest.mark.parametrize("level", FROZEN_LEVELS)
def test_a_case_is_found_by_its_id_alone(level: str) -> None:
    case = frozen_cases(level)[-1]
    assert case_by_id(case.id) == case


@pytest.mark.parametrize("level", FROZEN_LEVELS)
def test_a_frozen_case_is_what_its_axes_and_seed_give(level: str) -> None:
    for case in sample(level, 40):
        again = wide_case(level, case.operation, case.axes, case.seed)
        assert msgspec.structs.replace(again, clauses=()) == msgspec.structs.replace(case, clauses=())


@pytest.mark.parametrize("level", FROZEN_LEVELS)
def test_frozen_cases_name_clauses_of_the_spec(level: str) -> None:
    assert {clause for case in frozen_cases(level) for clause in case.clauses} <= CLAUSES.keys()


@pytest.mark.parametrize("level", FROZEN_LEVELS)
def test_frozen_cases_are_sound_with_finite_results(level: str) -> None:
    for case in sample(level, 40):
        problem = build_problem(case.structure)
        check_problem(problem)
        assert fault_of(case.structure) is None
        values = build_values(case, problem)
        result = attention(problem, values.q, values.k, values.v)
        assert np.isfinite(result.out).all(), case.id
        empty = effective_sets(problem).counts() == 0
        assert np.array_equal(np.isneginf(result.lse), empty & (problem.sink_logits is None)), case.id


@pytest.mark.parametrize("operation", tuple(AXES))
def test_l3_holds_every_possible_triple_of_core_axes_and_every_pair_of_all(operation: str) -> None:
    cases = [case for case in frozen_cases("L3") if case.operation == operation]
    (found,) = (entry for entry in measure("L3", cases).operations if entry.operation == operation)
    for entries in (found.pairs, found.triples):
        gaps = [entry for entry in entries if entry.covered < entry.possible]
        assert not gaps, f"{total(gaps)}: {gaps[0]}"


def test_l2_has_lengths_around_every_edge_and_requests_of_thousands() -> None:
    cases = [case for case in frozen_cases("L2") if case.operation == "forward"]
    lengths = {t for case in cases for t in case.structure.seqlens_kv}
    for edge in (8, 16, 32, 64, 128):
        assert {edge - 1, edge, edge + 1} <= lengths, edge
    assert max(lengths) >= 2048
    assert {case.axes["heads"] for case in cases} >= {"48/2", "28/4", "8/1", *FORWARD_AXES["heads"]}
    assert {case.axes["head_dim"] for case in cases} >= {"576/512", *FORWARD_AXES["head_dim"]}


@pytest.mark.parametrize("level", FROZEN_LEVELS)
def test_every_value_of_every_axis_has_cases(level: str) -> None:
    for operation in AXES:
        used = [case.axes for case in frozen_cases(level) if case.operation == operation]
        for axis, values in wide_axes(operation).items():
            assert set(values) <= {row[axis] for row in used}, (operation, axis)


@pytest.mark.parametrize("operation", tuple(AXES))
def test_every_row_of_l2_changes_one_of_l1s(operation: str) -> None:
    rows = list(edge_rows(operation))
    before = [{**USUAL, **row} for row in frozen_rows(operation)]
    for row in rows:
        assert is_possible_wide(row)
        changed = [{axis for axis in row if row[axis] != old[axis]} for old in before]
        assert row["lengths"] == "thousands" or any(len(c) == 1 and c <= {axis for axis, _ in EDGES} for c in changed)
    assert rows == list(edge_rows(operation))


def test_a_small_array_of_strength_three_holds_every_possible_triple_and_no_impossible_row() -> None:
    axes = {
        axis: core_axes("backward")[axis] for axis in ("granularity", "sharing", "counts", "local", "mask", "dtype")
    }
    rows = rows_of_strength_three(axes, is_possible_wide)
    left = Wanted(axes, is_possible_wide, itertools.combinations(axes, 3))
    for row in rows:
        assert is_possible_wide(row)
        places = left.places(row)
        assert places is not None
        left.cover(places)
    assert left.remaining == 0
    assert rows == rows_of_strength_three(axes, is_possible_wide)


def test_a_row_that_no_seed_makes_a_case_of_is_named_and_left_out() -> None:
    blind = LISTS | {"counts": "hot", "mask": "window", "lengths": "tile_edge"}
    with pytest.raises(Unsound, match=r"^L3\.forward\.decode-token-window-hot-normal: no row sees a key"):
        sound_case("L3", "forward", blind, 1)
    said: list[str] = []
    assert [case.axes for case in make_cases("L3", [("forward", blind, 1), ("forward", LISTS, 2)], said.append)] == [
        LISTS
    ]
    assert len(said) == 1
    assert "no row sees a key" in said[0]


@pytest.mark.parametrize(
    ("counts", "sizes"), [("one", {1}), ("none", {0}), ("all", {15, 16, 17}), ("hot", {1}), ("half", {8, 9})]
)
def test_counts_says_how_many_ids_a_list_names(counts: str, sizes: set[int]) -> None:
    case = wide_case("L3", "forward", LISTS | {"counts": counts, "local": "window"}, 5)
    assert case.structure.candidates is not None
    assert {len(entries) for entries in case.structure.candidates.lists} == sizes


def test_hot_lists_all_name_the_same_block() -> None:
    case = wide_case("L3", "forward", LISTS | {"granularity": "block", "counts": "hot"}, 5)
    assert case.structure.candidates is not None
    assert set(case.structure.candidates.lists) == {(0,)}


def test_near_ties_weigh_every_key_nearly_the_same() -> None:
    case = wide_case("L3", "forward", PLAIN | {"scale": "near_ties"}, 5)
    problem = build_problem(case.structure)
    values = build_values(case, problem)
    lse = attention(problem, values.q, values.k, values.v).lse
    seen = np.log(effective_sets(problem).counts())
    assert 0 < np.abs(lse - seen).max() < 0.02


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_misaligned_pages_start_at_odd_elements_and_do_not_overlap(layout: str) -> None:
    case = wide_case("L3", "forward", PLAIN | {"base": "misaligned", "head_dim": "64/32", "layout": layout}, 5)
    assert "COORD-STRIDE" in case.clauses
    problem = build_problem(case.structure)
    values = build_values(case, problem)
    tensors, _ = store_inputs(case.structure, problem, values.q, values.k, values.v, device="cpu", poison=float("nan"))
    page_stride = tensors.k_cache.stride(0)
    assert page_stride % 2 == 1
    inner = sum(
        (size - 1) * stride
        for size, stride in zip(tensors.k_cache.shape[1:], tensors.k_cache.stride()[1:], strict=True)
    )
    assert inner < page_stride
    assert judge_case(case, StepsBackend()).state == "PASS"


def test_writing_the_same_cases_gives_the_same_bytes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    few = tuple(sample("L2", 5))
    first = write_frozen(tmp_path, "L2", few).read_bytes()
    assert write_frozen(tmp_path, "L2", few).read_bytes() == first


def test_no_case_of_l1_is_more_than_a_second_in_the_interpreter() -> None:
    steps = {case.id: tile_steps(case) for case in matrix("L1") if case.operation in AXES}
    longest = max(steps, key=lambda case_id: steps[case_id])
    assert steps[longest] <= MAX_TILE_STEPS_L1, f"{longest} takes {steps[longest]} steps"


def test_tile_steps_count_tiles_of_keys_for_every_row_and_kv_head() -> None:
    case = wide_case("L3", "forward", PLAIN | {"lengths": "tile_edge", "splits": "1"}, 5)
    structure = msgspec.structs.replace(
        case.structure, seqlens_q=(1, 1), seqlens_kv=(32, 65), page_table=((0, 1), (2, 3, 4, 5, 6))
    )
    assert tile_steps(msgspec.structs.replace(case, structure=structure)) == 2 * (1 + 3)
    split = msgspec.structs.replace(structure, hints=Hints(num_kv_splits=2, tile_kv=32))
    assert tile_steps(msgspec.structs.replace(case, structure=split)) == 2 * (2 + 3)


@pytest.mark.parametrize("level", FROZEN_LEVELS)
def test_the_reference_conforms_on_a_sample(level: str) -> None:
    for case in sample(level, 12):
        result = judge_case(case, StepsBackend())
        assert result.is_conforming, (case.id, result.findings[:2])


@pytest.mark.parametrize("seed", [0, 1, 0x5EED_0000, (1 << 63) - 1])
@pytest.mark.parametrize("stream", [0, 5, 1 << 32, (1 << 40) + 3])
def test_a_single_draw_is_the_first_of_many(seed: int, stream: int) -> None:
    assert first_word(seed, stream) == philox.words(seed, stream, 1)[0]
    one, many = Draw(seed), Draw(seed)
    one.stream = many.stream = stream
    assert one.integer(-3, 9) == many.integers(4, -3, 9)[0]
    assert one.stream == many.stream


def test_cases_of_one_structure_differ_in_numbers_alone() -> None:
    structure_of: dict[int, list[Case]] = {}
    for case in frozen_cases("L3")[:200]:
        structure_of.setdefault(structure_seed(case.seed), []).append(case)
    assert all(len(cases) == NUMBERS for cases in structure_of.values())
    first, second, *_ = next(iter(structure_of.values()))
    assert first.structure == second.structure
    assert first.id != second.id
    a, b = (build_values(case, build_problem(case.structure)) for case in (first, second))
    assert not np.array_equal(a.v, b.v)


def test_making_frozen_cases_again_gives_them_again() -> None:
    few = [(case.operation, case.axes, case.seed) for case in frozen_cases("L3")[: 3 * NUMBERS]]
    assert [case.id for case in make_cases("L3", few)] == [case.id for case in frozen_cases("L3")[: 3 * NUMBERS]]
