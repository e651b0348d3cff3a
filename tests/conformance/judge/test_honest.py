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
    CLASS_OF,
    FAMILIES,
    NUM_KEYS,
    Choice,
    Usage,
    build_block,
    compare_honest,
)
from attnconform.conformance.report.honest import honest_command


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, short heads and lists."""
    monkeypatch.setattr(honest, "ROWS", 4)
    monkeypatch.setattr(honest, "HEAD_DIM", 16)
    monkeypatch.setattr(honest, "NUM_KEYS", (1, 3, 33))


@pytest.mark.parametrize("dtype", tuple(CLASS_OF))
@pytest.mark.usefixtures("small")
def test_no_honest_kernel_is_past_its_worst_case_bound_on_any_family(dtype: Dtype) -> None:
    *_, found = compare_honest(dtype, 1)
    assert found.total.false_fails == 0
    assert found.is_honest
    assert all(found.by_family[family].comparisons for family in FAMILIES)
    assert found.total.comparisons == sum(u.comparisons for by in found.by_keys.values() for u in by.values())
    assert found.total.comparisons == sum(u.comparisons for u in found.by_family.values())
    assert 0.02 < found.by_keys[33]["out"].worst <= 1


@pytest.mark.usefixtures("small")
def test_comparisons_go_on_until_there_are_enough() -> None:
    *_, found = compare_honest("bfloat16", 5000)
    assert 5000 <= found.total.comparisons < 5000 + 4 * 17


@pytest.mark.usefixtures("small")
def test_a_kernel_less_exact_than_it_declares_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(honest, "CHOICES", (Choice(Schedule(tile=16, exp_bias=5e4), {}),))
    *_, found = compare_honest("float32", 1)
    assert found.total.false_fails > 0
    assert not found.is_honest


def test_an_exact_element_uses_nothing_and_a_missed_bound_of_zero_everything() -> None:
    usage = Usage()
    zero, one = np.zeros(2), np.ones(2)
    usage.add(zero, zero, zero)
    assert (usage.worst, usage.false_fails, usage.comparisons) == (0.0, 0, 2)
    usage.add(one, zero, 2 * one)
    assert (usage.worst, usage.probable, usage.false_fails) == (np.inf, 0.5, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_every_family_are_drawn_alike_from_a_seed(family: str) -> None:
    first, again = (build_block("float16", family, 17, 3) for _ in range(2))
    assert np.array_equal(first.k, again.k)
    assert np.isfinite(first.scores).all()
    assert first.mask[0].all()
    assert not first.mask.all()


@pytest.mark.usefixtures("small")
def test_the_command_prints_a_verdict_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "honest.json"
    console = Console(file=(tmp_path / "out.txt").open("w"), width=200)
    assert honest_command(console, dtypes=("bfloat16",), comparisons=1, json_path=path) == 0
    (written,) = json.loads(path.read_text())
    assert written["total"]["false_fails"] == 0
    console.file.close()
    assert "bfloat16: 0 false FAILs" in (tmp_path / "out.txt").read_text()


def test_the_numbers_of_keys_are_around_tiles() -> None:
    assert {1, 16, 17} <= set(NUM_KEYS)
    assert max(NUM_KEYS) >= 1024
