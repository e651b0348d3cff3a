"""The kill matrix catches, tells accidents from catches and cannot pass by doing nothing; and the judge's power."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case, Structure, ValueKind, named
from attnconform.conformance.deviations import DEVIATIONS, VARIANTS, Deviation, Variant
from attnconform.conformance.deviations import seeds as seeds_module
from attnconform.conformance.deviations.deviation import build_backend
from attnconform.conformance.deviations.judging import rejecting
from attnconform.conformance.deviations.long_cases import long_cases
from attnconform.conformance.deviations.records import KillMatrix
from attnconform.conformance.deviations.seeds import reseed
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.membership import check_membership
from attnconform.conformance.judge.values import check_values
from attnconform.conformance.kill_matrix import kill_matrix_command, run
from attnconform.conformance.policies import POLICIES, Policy, Sample
from attnconform.conformance.report.kill_html import write_kill_html
from attnconform.reference.coordinates import Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.steps import Steps

CASES = tuple(c for c in matrix("L1") if "listing" in c.axes and c.axes["listing"] == "duplicates")[:6]
HARMLESS = Deviation("harmless", "SET-DUPLICATE", "Nothing is wrong.", "none", "K", StepsBackend)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other's cores cost more than these small tensors do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def result_of(deviation: Deviation) -> KillMatrix:
    """The matrix of one deviation on a few cases."""
    return run([deviation], [], CASES)


def test_a_deviation_is_killed_by_a_check_of_its_clause() -> None:
    (score,) = result_of(DEVIATIONS["counts-a-duplicate-twice"]).deviations
    assert score.outcome == "killed"
    assert any(kill.check == "check_membership" and "SET-DUPLICATE" in kill.clauses for kill in score.kills)


def test_a_deviation_that_changes_nothing_survives() -> None:
    result = result_of(HARMLESS)
    assert result.survivors == ("harmless",)
    assert not result.is_ok


def test_a_deviation_caught_by_checks_of_other_areas_alone_is_told_apart() -> None:
    mutating = DEVIATIONS["scales-q-in-place"].build
    result = result_of(replace(HARMLESS, id="mistagged", clause="DETERMINISM-RUN", build=mutating))
    assert result.unrelated_only == ("mistagged",)
    assert not result.is_ok


def test_a_crash_counts_for_the_clauses_it_names_alone() -> None:
    class Crashes(StepsBackend):
        def inputs(self, problem, tensors):  # type: ignore[no-untyped-def]
            raise RuntimeError("no such page")

    (score,) = result_of(replace(HARMLESS, id="crashes", build=Crashes)).deviations
    assert score.outcome == "unrelated_only"
    assert {kill.state for kill in score.kills} == {"CRASH"}


def test_a_faithful_variant_that_is_wrong_is_rejected() -> None:
    wrong = Variant("wrong", "Not faithful.", DEVIATIONS["forgets-the-scale"].build)
    result = run([], [wrong], CASES)
    assert result.rejected_variants == ("wrong",)
    assert not result.is_ok


@pytest.mark.parametrize("name", ["eight-splits-by-output", "stores-weights-in-the-problems-dtype", "returns-no-lse"])
def test_a_faithful_variant_is_accepted(name: str) -> None:
    assert run([], [VARIANTS[name]], CASES).is_ok


def test_an_empty_matrix_is_an_error() -> None:
    with pytest.raises(ValueError, match="cases is empty"):
        run([HARMLESS], [], [])


def test_a_seed_gives_other_cases_with_ids_of_their_own() -> None:
    case = CASES[0]
    other = reseed(case, 1)
    assert other.seed != case.seed
    assert other.id != case.id
    assert other.id.rpartition(".")[0] == case.id.rpartition(".")[0]


def test_two_processes_give_what_one_gives() -> None:
    entries = [
        DEVIATIONS[name] for name in ("stops-at-the-first-hole", "drops-the-last-entry", "returns-lse-in-base-two")
    ]
    assert run(entries, [], CASES, processes=2) == run(entries, [], CASES)


def test_the_command_writes_json_and_says_by_its_exit_code_whether_all_is_well(tmp_path: Path) -> None:
    path = tmp_path / "kill.json"
    console = Console(file=(tmp_path / "out.txt").open("w"), width=200)
    assert kill_matrix_command(path, select="SET-FORM", processes=1, console=console) == 0
    written = json.loads(path.read_text())
    assert {"deviations", "variants", "survivors"} <= written.keys()
    assert [d["id"] for d in written["deviations"]] == ["accepts-a-multiset"]
    with pytest.raises(ValueError, match="select is 'no-such-thing'"):
        kill_matrix_command(select="no-such-thing", console=console)


def test_under_several_seeds_a_variant_sees_another_sample_under_each() -> None:
    variant = VARIANTS["returns-no-lse"]
    once, twice = (run([], [variant], CASES[:2], seeds=seeds).variants[0] for seeds in (1, 2))
    assert (once.judged, twice.judged) == (2, 4)
    assert run([DEVIATIONS["counts-a-duplicate-twice"]], [variant], CASES[:2], seeds=3).is_ok


def test_a_deviation_that_escapes_under_some_seed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {"times": 0}

    def reseeding(case: Case, times: int) -> Case:
        drawn["times"] = times
        return reseed(case, times)

    def build() -> Backend:
        return StepsBackend() if drawn["times"] == 2 else DEVIATIONS["counts-a-duplicate-twice"].build()

    monkeypatch.setattr(seeds_module, "reseed", reseeding)
    result = run([replace(HARMLESS, id="fickle", build=build)], [], CASES[:2], seeds=3)
    assert result.deviations[0].outcome == "killed"
    assert result.deviations[0].escaped_seeds == (2,)
    assert result.escaped == ("fickle",)
    assert not result.is_ok


def test_the_command_judges_under_several_seeds_and_writes_a_page(tmp_path: Path) -> None:
    path = tmp_path / "kill.html"
    with (tmp_path / "out.txt").open("w") as file:
        console = Console(file=file, width=200)
        options = {"html_path": path, "select": "SET-FORM", "processes": 1, "console": console}
        assert kill_matrix_command(seeds=2, **options) == 0  # type: ignore[arg-type]
    assert "accepts-a-multiset" in path.read_text()


def test_the_page_shows_deviations_by_area_policies_and_variants_and_needs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "kill.html"
    hostile = replace(HARMLESS, id="hostile", idea="<script>alert(1)</script>")
    killed = DEVIATIONS["counts-a-duplicate-twice"]
    result = run([killed, hostile], [VARIANTS["returns-no-lse"]], CASES[:2])
    write_kill_html(result, path)
    page = path.read_text()
    assert '<h3 id="SET">' in page
    for shown in (killed.id, "check_membership", killed.clause, "survived", "returns-no-lse", "NOT OK"):
        assert shown in page, shown
    assert all(policy.name.replace(">", "&gt;").replace("<", "&lt;") in page for policy in POLICIES)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert not any(outside in page for outside in (' src="', "<link", "@import"))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_a_policy_accepts_the_oracle_and_rejects_a_gross_mistake(policy: Policy) -> None:
    oracle = np.linspace(-2, 2, 64)
    right = Sample(oracle, oracle, oracle, "bfloat16")
    assert policy.accepts(right)
    assert not policy.accepts(replace(right, observed=-oracle))


def test_a_mistake_of_lse_alone_is_invisible_to_every_policy() -> None:
    case = long_cases()[0]
    assert rejecting(case, DEVIATIONS["returns-lse-in-base-two"].build()) == frozenset()


def test_zeros_pass_for_attention_where_outputs_are_small() -> None:
    oracle = np.full(64, 0.009)
    zeros = Sample(0 * oracle, oracle, oracle, "bfloat16")
    accepted = {policy.name for policy in POLICIES if policy.accepts(zeros)}
    assert accepted == {"allclose 1e-2", "RMS ratio 0.005, CI switch", "abs and rel > 1e-2"}


NUM_KEYS = 512


class LosesOneKey(Steps):
    """A single key of every row is never attended."""

    def __init__(self, position: int) -> None:
        self.position = position

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = super().effective(problem, where, qo_head).values
        return Positions(kept[kept != self.position])


class DoublesOneKey(LosesOneKey):
    """A single key of every row is attended twice."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = Steps.effective(self, problem, where, qo_head).values
        return Positions(np.append(kept, self.position))


def long_case(seed: int, values: ValueKind) -> Case:
    """One row and two heads over 512 keys."""
    structure = Structure(
        dtype="bfloat16",
        seqlens_q=(1,),
        seqlens_kv=(NUM_KEYS,),
        num_qo_heads=2,
        num_kv_heads=1,
        head_dim_qk=32,
        head_dim_vo=128,
        page_size=16,
        num_pages=NUM_KEYS // 16,
        page_table=(tuple(range(NUM_KEYS // 16)),),
        sm_scale=0.125,
    )
    return named(
        Case(id="", level="L1", operation="forward", structure=structure, values=values, seed=seed, clauses=()), "power"
    )


def with_steps(steps: Steps) -> Backend:
    """A backend of steps that take arguments."""
    backend = build_backend(Steps)
    type(backend).steps = steps  # type: ignore[attr-defined]
    return backend


@pytest.mark.parametrize("mistake", [LosesOneKey, DoublesOneKey])
def test_one_key_among_512_is_caught_in_100_of_100_random_cases(mistake: type[LosesOneKey]) -> None:
    states = []
    for seed in range(100):
        position = int(np.random.default_rng(seed).integers(NUM_KEYS))
        case = long_case(seed, "peaked" if seed % 2 else "normal")
        result = judge_case(case, with_steps(mistake(position)), checks=(check_membership,))
        named_positions = [f"position {position}," in finding.message for finding in result.findings]
        states.append((result.state, any(named_positions)))
    assert states == [("FAIL_membership", True)] * 100


def test_the_same_512_keys_pass_where_nothing_is_lost() -> None:
    results = [
        judge_case(
            long_case(seed, "peaked" if seed % 2 else "normal"),
            with_steps(Steps()),
            checks=(check_membership, check_values),
        )
        for seed in range(6)
    ]
    assert {result.state for result in results} == {"PASS"}
