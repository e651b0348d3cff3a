"""Honest comparisons: they count, they find no false FAIL, and a bound that is too small would show."""

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from attnconform.conformance.bounds.emulate import Schedule
from attnconform.conformance.cases.structure import Dtype
from attnconform.conformance.judge import honest
from attnconform.conformance.judge.honest import (
    COVERED_BY,
    NUM_KEYS,
    Size,
    Usage,
    compare_honest,
    families_for,
    no_comparisons,
)
from attnconform.conformance.judge.honest_cases import FAMILIES, FEATURES, build_case
from attnconform.conformance.judge.honest_classes import HONEST_CLASSES, HonestClass
from attnconform.conformance.judge.honest_outputs import OUTPUTS
from attnconform.conformance.report.honest import honest_command


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, short heads and lists."""
    monkeypatch.setattr(honest, "SHORT", Size(4, 16))
    monkeypatch.setattr(honest, "NUM_KEYS", (1, 3, 33))


@pytest.fixture
def few(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first class alone."""
    first = {dtype: dict(list(classes.items())[:1]) for dtype, classes in HONEST_CLASSES.items()}
    monkeypatch.setattr(honest, "HONEST_CLASSES", first)


@pytest.mark.parametrize("dtype", tuple(HONEST_CLASSES))
@pytest.mark.usefixtures("small")
def test_no_honest_kernel_is_past_either_bound_in_any_class_on_any_family(dtype: Dtype) -> None:
    *_, found = compare_honest(dtype, 1)
    assert found.total.false_fails == found.total.past_probable == 0
    assert found.is_honest
    assert all(found.by_family[family].comparisons for family in FAMILIES)
    assert found.total.comparisons == sum(u.comparisons for by in found.by_keys.values() for u in by.values())
    assert found.total.comparisons == sum(u.comparisons for u in found.by_family.values())
    assert set(found.by_class) == set(HONEST_CLASSES[dtype])
    for by_keys in found.by_class.values():
        assert all(by_keys[keys][output].comparisons for keys in (1, 3, 33) for output in OUTPUTS)
    assert 0.02 < found.by_keys[33]["out"].worst <= 1


@pytest.mark.usefixtures("few")
def test_comparisons_go_on_until_there_are_enough() -> None:
    *_, found = compare_honest("bfloat16", 10_000)
    assert 10_000 <= found.total.comparisons < 20_000


@pytest.mark.usefixtures("few")
def test_a_kernel_less_exact_than_it_declares_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rough = {"rough": HonestClass("fp32", Schedule(tile=16, exp_bias=5e4))}
    monkeypatch.setattr(honest, "HONEST_CLASSES", {"float32": rough})
    *_, found = compare_honest("float32", 1)
    assert found.total.false_fails > 0
    assert not found.is_honest


def test_a_length_is_slack_where_an_output_errs_and_never_by_a_tenth_of_its_bound() -> None:
    found = no_comparisons("float32")
    found.by_keys[64]["lse"].probable, found.by_keys[257]["lse"].probable = 0.09, 0.11
    found.by_class["tf32"][64]["dk"].probable = 0.01
    assert found.slack["lse"] == [64]
    assert found.slack["out"] == []
    assert found.slack_by_class == {name: {"dk": [64]} if name == "tf32" else {} for name in HONEST_CLASSES["float32"]}


def test_an_exact_element_uses_nothing_and_a_missed_bound_of_zero_everything() -> None:
    usage = Usage()
    zero, one = np.zeros(2), np.ones(2)
    usage.add(zero, zero, zero)
    assert (usage.worst, usage.false_fails, usage.comparisons) == (0.0, 0, 2)
    usage.add(one, zero, 2 * one)
    assert (usage.worst, usage.probable, usage.false_fails) == (np.inf, 0.5, 2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("feature", FEATURES)
def test_blocks_of_every_family_are_drawn_alike_from_a_seed(family: str, feature: str) -> None:
    size = {"keys": 17, "rows": 8, "head_dim": 16}
    first, again = (build_case("float16", family, feature, **size, seed=3, kv_dtype="float16") for _ in range(2))
    assert np.array_equal(first.block.k, again.block.k)
    assert np.isfinite(first.block.scores).all()
    assert first.block.mask[0].all()
    assert not first.block.mask.all()
    assert (first.rule is not None) == (feature in ("slope", "table", "cap"))


@pytest.mark.usefixtures("few")
def test_the_command_prints_a_verdict_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "honest.json"
    console = Console(file=(tmp_path / "out.txt").open("w"), width=200)
    assert honest_command(console, dtypes=("bfloat16",), comparisons=1, json_path=path) == 0
    (written,) = json.loads(path.read_text())
    assert written["total"]["false_fails"] == 0
    console.file.close()
    printed = (tmp_path / "out.txt").read_text()
    assert "bfloat16: 0 false FAILs" in printed
    assert all(f"bfloat16: {name} stays under 0.1 of its probable bound at " in printed for name in OUTPUTS)


def test_the_numbers_of_keys_are_around_tiles_and_reach_64k() -> None:
    assert {1, 16, 17} <= set(NUM_KEYS)
    assert max(NUM_KEYS) == 65536


def test_every_length_has_as_many_families_as_features_at_least() -> None:
    assert all(len(families_for(keys)) >= len(FEATURES) for keys in NUM_KEYS)


def test_every_output_names_what_covers_it() -> None:
    assert set(COVERED_BY) == set(OUTPUTS)
