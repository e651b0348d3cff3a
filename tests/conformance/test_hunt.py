"""The hunt: it finds what is wrong, accuses nothing that is right, and keeps to what a backend declares."""

import ast
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.adapters.sdpa import EXPRESSIBLE
from attnconform.conformance.backend import Capabilities, OneOf
from attnconform.conformance.cases import profiles, row_draws
from attnconform.conformance.cases.row_draws import declared_rows, hunted_cases
from attnconform.conformance.cases.structure import Case, build_problem, decode_case, encode_case
from attnconform.conformance.cases.wide_axes import is_possible_wide, wide_axes
from attnconform.conformance.deviations import DEVIATIONS, VARIANTS
from attnconform.conformance.hunt import CURRENT, NEAREST, Bag, hunt, hunt_command
from attnconform.conformance.judge.judge import judge_case, undeclared
from attnconform.reference.problem import check_problem

profiles.load_profile()
ENOUGH = 60  # cases in which each of the mistakes below is met
NARROW = Capabilities(
    supported={**EXPRESSIBLE, "page_size": OneOf(("16", "32")), "granularity": OneOf(("dense", "token"))}
)
RULES = DEVIATIONS["caps-before-the-bias"].build


class DeclaresNothing(StepsBackend):
    """A backend that runs no dtype at all."""

    capabilities: ClassVar[Capabilities] = Capabilities(supported={"dtype": OneOf(())})


@pytest.fixture(autouse=True)
def _own_database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """Failures of one test are not drawn again in another."""
    monkeypatch.setenv(profiles.DATABASE_VARIABLE, str(tmp_path / "examples"))
    with np.errstate(all="ignore"):  # mistakes overflow and divide by 0
        yield


@pytest.mark.parametrize(
    "mistake",
    ["counts-a-duplicate-twice", "caps-before-the-bias", "masks-by-physical-order", "stops-at-an-empty-row"],
)
def test_a_mistake_is_found_and_its_case_fails_again(mistake: str) -> None:
    bag = hunt(DEVIATIONS[mistake].build, examples=ENOUGH, seed=1)
    assert bag.failed is not None
    case, result = bag.failed
    assert result.is_failing
    assert judge_case(case, DEVIATIONS[mistake].build()).state == result.state


@pytest.mark.parametrize("right", [StepsBackend, VARIANTS["eight-splits-by-state"].build])
def test_nothing_right_is_accused(right: type[StepsBackend]) -> None:
    bag = hunt(right, examples=25, seed=2)
    assert bag.failed is None
    assert bag.judged == 25
    assert {"out", "lse", "dq", "dk", "dv"} <= bag.nearest.keys()
    assert all(near.ratio <= 1 for near in bag.nearest.values())


def test_what_failed_is_drawn_first_the_next_time() -> None:
    first = hunt(RULES, examples=5 * ENOUGH)  # what a seed draws is not kept
    again = hunt(RULES, examples=ENOUGH)
    assert first.failed is not None
    assert again.failed is not None
    assert again.failed[0].id == first.failed[0].id
    assert again.judged == 1


def test_a_seed_draws_the_same_cases_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def drawn(seed: int) -> list[str]:
        monkeypatch.setenv(profiles.DATABASE_VARIABLE, str(tmp_path / f"of its own {len(list(tmp_path.iterdir()))}"))
        ids: list[str] = []
        hunt(StepsBackend, examples=3, seed=seed, operations=("forward",), before=lambda case: ids.append(case.id))
        return ids

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


def test_a_hunt_ends_when_its_time_is_up() -> None:
    bag = hunt(StepsBackend, examples=10_000, seconds=1.0)
    assert bag.failed is None
    assert 0 < bag.judged < 10_000


def test_the_nearest_case_of_an_output_is_the_one_with_the_largest_ratio() -> None:
    case = next(iter(cases_met(1)))
    bag = Bag()
    for ratio in (0.25, 0.75, 0.5):
        bag.take(case, verdict(case, ratio))
    assert (bag.judged, bag.nearest["out"].ratio) == (3, 0.75)


def cases_met(count: int) -> list[Case]:
    """Cases that a hunt draws."""
    met: list[Case] = []
    hunt(StepsBackend, examples=count, seed=3, operations=("forward",), before=met.append)
    return met


def verdict(case: Case, ratio: float) -> object:
    """A verdict with another ratio of out."""
    return msgspec.structs.replace(judge_case(case, StepsBackend()), usage={"out": ratio})


def test_the_command_writes_the_smallest_case_and_the_nearest_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend = "my_package:MyKernel"
    monkeypatch.setattr("attnconform.conformance.hunt.load_backend", lambda spec, device: RULES())
    assert run_command(tmp_path, backend) == 1
    text = (tmp_path / "printed").read_text()
    [written] = [path for path in (tmp_path / "out").iterdir() if path.name != NEAREST]
    small = decode_case(written.read_bytes(), written.name)
    assert not judge_case(small, RULES()).is_conforming
    assert len(small.structure.seqlens_q) == 1
    assert len(small.structure.score_rules) == 2  # the order of rules needs two of them
    assert "smallest failing case: 1 request(s)" in text
    assert f"go on with attnconform explain {written} -b {backend}" in " ".join(text.split())
    assert decode_case((tmp_path / "out" / NEAREST).read_bytes(), NEAREST).id


def run_command(tmp_path: Path, backend: str) -> int:
    with (tmp_path / "printed").open("w") as file:
        console = Console(file=file, width=2000)
        return hunt_command(
            console, backend=backend, device="cpu", examples=ENOUGH, seconds=None, seed=1, operations=("forward",),
            out=tmp_path / "out",
        )  # fmt: skip


def test_a_backend_that_declares_nothing_has_run_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("attnconform.conformance.hunt.load_backend", lambda spec, device: DeclaresNothing())
    assert run_command(tmp_path, "nothing") == 3
    assert "nothing: 0 cases judged, 60 more that nothing does not declare" in (tmp_path / "printed").read_text()


def test_a_case_that_took_the_process_with_it_is_named_the_next_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("attnconform.conformance.hunt.load_backend", lambda spec, device: DeclaresNothing())
    out = tmp_path / "out"
    out.mkdir()
    (out / CURRENT).write_bytes(encode_case(cases_met(1)[0]))
    run_command(tmp_path, "nothing")
    assert f"an earlier hunt ended in the middle of {out / 'ended_in.json'}" in (tmp_path / "printed").read_text()
    assert not (out / CURRENT).exists()


@settings(max_examples=profiles.examples(40))
@given(st.data(), st.sampled_from(("forward", "backward")))
def test_drawn_rows_hold_declared_values_that_can_stand_together(data: st.DataObject, operation: str) -> None:
    row = data.draw(declared_rows(operation, NARROW))
    assert row.keys() == wide_axes(operation).keys()
    assert is_possible_wide(row)
    assert [axis for axis, value in row.items() if not NARROW.declares(axis, value)] == []


@settings(max_examples=profiles.examples(40))
@given(st.data(), st.sampled_from((NARROW, StepsBackend.capabilities)))
def test_hunted_cases_are_sound_and_declared(data: st.DataObject, capabilities: Capabilities) -> None:
    case = data.draw(hunted_cases(capabilities, ("forward", "backward")))
    check_problem(build_problem(case.structure))
    assert decode_case(encode_case(case), "hunted") == case
    backend = StepsBackend()
    backend.capabilities = capabilities  # type: ignore[misc]  # of this one instance
    if capabilities is NARROW:
        assert undeclared(case, backend) is None
        assert case.structure.page_size in (16, 32)


def test_rows_are_drawn_without_throwing_any_away() -> None:
    tree = ast.parse(Path(row_draws.__file__).read_text())
    words = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not words & {"filter", "assume", "reject"}
