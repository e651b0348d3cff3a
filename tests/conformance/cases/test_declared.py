"""Cases of a backend's own domain: they hold what its declaration leaves of the common matrix to be held."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import OPTIONAL_AXES, Capabilities, OneOf, Span, Whole
from attnconform.conformance.cases import declared, detectability
from attnconform.conformance.cases.axes import FORWARD_AXES, is_possible
from attnconform.conformance.cases.declared import declared_cases, fewer_lengths, own_domain, row_seed
from attnconform.conformance.cases.domain import declared_axes
from attnconform.conformance.cases.draw import Draw
from attnconform.conformance.cases.greedy import Wanted, complete, next_row
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix
from attnconform.conformance.cases.structure import Case, case_digest, is_own
from attnconform.conformance.cases.work import MAX_TILE_STEPS_L1, tile_steps
from attnconform.conformance.clauses import CLAUSES
from attnconform.conformance.command_line import main
from attnconform.conformance.judge.judge import judge_case, undeclared

# a decode kernel of one geometry that is written for sinks and two layouts
NARROW = Capabilities(
    supported={
        "dtype": OneOf(("float32",)), "heads": OneOf(("4/2",)), "head_dim": OneOf(("64/64",)),
        "page_size": OneOf(("16",)), "phase": OneOf(("decode",)), "lengths": OneOf(("page_edge", "tile_edge")),
        "granularity": OneOf(("dense", "token")), "sharing": OneOf(("shared",)), "q_block": OneOf(("1",)),
        "listing": OneOf(("sorted", "shuffled")), "local": OneOf(("none",)), "empty": OneOf(("none",)),
        "pages": OneOf(("shuffled",)), "strides": OneOf(("dense",)), "mask": OneOf(("none", "causal")),
        "score": OneOf(("none",)), "splits": OneOf(("1", "3")), "values": OneOf(("normal", "half_mass")),
        "refusal": OneOf(()),
    },
    has_backward=False,
)  # fmt: skip


def declaring(**supported: OneOf | Span | Whole) -> Capabilities:
    """NARROW with other domains."""
    return msgspec.structs.replace(NARROW, supported={**NARROW.supported, **supported})


def declared_common(capabilities: Capabilities) -> list[Case]:
    """The common cases of L1 that run attention and that a declaration holds."""
    backend = StepsBackend()
    backend.capabilities = capabilities
    return [c for c in matrix("L1") if c.operation in ("forward", "backward") and undeclared(c, backend) is None]


def pairs_held(cases: list[Case]) -> set[tuple[str, str, str, str]]:
    """Every pair of values that some case has."""
    return {(a, c.axes[a], b, c.axes[b]) for c in cases for a, b in combinations(FORWARD_AXES, 2)}


def pairs_declared(capabilities: Capabilities) -> Iterator[tuple[str, str, str, str]]:
    """Every pair of declared values that can stand together, one or both of them no feature."""
    axes = declared_axes("forward", capabilities)
    for a, b in combinations(axes, 2):
        for x, y in product(axes[a], axes[b]):
            if is_possible({**OPTIONAL_AXES, "granularity": "token", a: x, b: y}):
                yield a, x, b, y


def test_a_backend_that_declares_everything_gets_no_case_of_its_own() -> None:
    found = own_domain("L1", StepsBackend.capabilities)
    assert found.cases == []
    assert found.tally["L1d"].common == found.tally["L1d"].possible > 7000


def test_common_and_own_cases_together_hold_every_pair_of_declared_values() -> None:
    common, own = declared_common(NARROW), list(declared_cases("L1", NARROW))
    wanted = set(pairs_declared(NARROW))
    assert not wanted <= pairs_held(common)
    assert wanted <= pairs_held([*common, *own])
    assert len(own) < 30


def test_own_cases_are_named_declared_bounded_and_of_clauses_of_the_spec() -> None:
    backend = StepsBackend()
    backend.capabilities = NARROW
    own = declared_cases("L1", NARROW)
    assert own
    for case in own:
        level, operation, _, digest = case.id.split(".")
        assert (level, operation, digest) == ("L1d", "forward", case_digest(case))
        assert is_own(case.id)
        assert undeclared(case, backend) is None
        assert tile_steps(case) <= MAX_TILE_STEPS_L1
        assert set(case.clauses) <= CLAUSES.keys()
    assert len({case.id for case in own}) == len(own)
    assert not any(is_own(case.id) for case in matrix("L1"))


def test_own_cases_are_cases_that_something_can_fail_and_the_reference_does_not() -> None:
    for case in declared_cases("L1", NARROW)[::3]:
        assert detectability.is_detectable(case), case.id
        assert judge_case(case, StepsBackend()).is_conforming, case.id


def test_a_case_that_nothing_can_fail_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detectability, "is_detectable", lambda case: False)
    declared.generated.cache_clear()
    found = own_domain("L1", NARROW)
    declared.generated.cache_clear()
    tally = found.tally["L1d"]
    assert found.cases == []
    assert tally.given_up == tally.possible - tally.common > 0


IDS = """
import sys, msgspec
from attnconform.conformance.backend import Capabilities
from attnconform.conformance.cases.declared import declared_cases
print(*(case.id for case in declared_cases("L1", msgspec.json.decode(sys.argv[1], type=Capabilities))))
"""


def test_the_same_declaration_gives_the_same_cases_whatever_the_order_and_the_hash_seed() -> None:
    turned = {
        axis: OneOf(domain.values[::-1]) if isinstance(domain, OneOf) else domain
        for axis, domain in reversed(NARROW.supported.items())
    }
    again = msgspec.json.encode(msgspec.structs.replace(NARROW, supported=turned)).decode()
    environment = os.environ | {"PYTHONHASHSEED": "77"}
    done = subprocess.run([sys.executable, "-c", IDS, again], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [case.id for case in declared_cases("L1", NARROW)]


def test_a_row_is_the_same_case_in_every_declaration() -> None:
    wider = declaring(values=OneOf(("normal", "half_mass", "peaked")))
    by_axes = {json.dumps(case.axes): case.id for case in declared_cases("L1", wider)}
    for case in declared_cases("L1", NARROW):
        assert by_axes.get(json.dumps(case.axes), case.id) == case.id
    assert row_seed("forward", {"a": "1", "b": "2"}) == row_seed("forward", {"b": "2", "a": "1"})


def test_numbers_that_the_matrix_does_not_have_are_generated_as_they_are_listed() -> None:
    listed = declaring(heads=OneOf(("32/8",)), head_dim=OneOf(("48/48",)), page_size=OneOf((24, "16")))
    own = declared_cases("L1", listed)
    assert {case.axes["page_size"] for case in own} == {"16", "24"}
    assert {(c.structure.num_qo_heads, c.structure.num_kv_heads, c.structure.head_dim_qk) for c in own} == {(32, 8, 48)}
    assert {level.split(".")[0] for level in (case.id for case in own)} == {"L0d", "L1d"}


def test_a_span_stands_for_the_values_of_the_matrix_within_and_its_ends() -> None:
    assert declared_axes("forward", declaring(page_size=Span(8, 200, 8)))["page_size"] == ("8", "16", "32", "200")
    assert declared_axes("forward", declaring(page_size=Span(16, 40, 16)))["page_size"] == ("16", "32")


def test_whole_and_absent_domains_are_the_values_of_the_matrix() -> None:
    axes = declared_axes("forward", declaring(mask=Whole(), quant=Whole()))
    assert (axes["mask"], axes["quant"]) == (FORWARD_AXES["mask"], FORWARD_AXES["quant"])
    assert axes["dropout"] == ("none",)
    assert axes["layout"] == FORWARD_AXES["layout"]


def test_a_backward_without_quantized_caches_gets_none_and_listed_values_stand_in_for_missing_ones() -> None:
    both = msgspec.structs.replace(declaring(quant=Whole(), mask=OneOf(("prefix",))), has_backward=True)
    axes = declared_axes("backward", both)
    assert axes["quant"] == ("none",)
    assert axes["mask"] == ("prefix",)  # a mask that backward cases of the common matrix do not have


@pytest.mark.parametrize(
    ("axis", "value", "says"),
    [
        ("heads", "32:8", r"heads = '32:8', but the form is QUERY_HEADS/KV_HEADS"),
        ("heads", "6/4", r"heads = '6/4', but 4 does not divide 6"),
        ("page_size", "0", r"page_size = '0', but the form is N"),
        ("head_dim", "128", r"head_dim = '128', but the form is OF_QK/OF_VO"),
        ("splits", True, r"splits = 'True', but the form is N"),
    ],
)
def test_a_listed_number_that_is_none_is_refused_in_one_line(axis: str, value: str | bool, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        declared_cases("L1", declaring(**{axis: OneOf((value,))}))
    assert "\n" not in str(refused.value)


def test_an_axis_without_a_declared_value_gives_no_case() -> None:
    assert declared_cases("L1", declaring(dtype=OneOf(()))) == ()


def test_combinations_that_no_row_can_hold_are_no_gaps() -> None:
    windowed = declaring(local=OneOf(("window",)), empty=OneOf(("none", "first")), granularity=OneOf(("token",)))
    found = own_domain("L1", windowed)
    assert {case.axes["empty"] for case in found.cases} == {"none"}  # a list with a window is never empty
    assert found.tally["L1d"].given_up == 0


def test_features_are_met_apart_and_together() -> None:
    own = declared_cases("L1", declaring(dropout=Whole(), epilogue=OneOf(("none", "relu"))))
    features = {(case.axes["dropout"], case.axes["epilogue"]) for case in own}
    assert features >= {("quarter", "none"), ("none", "relu"), ("quarter", "relu")}


def test_a_feature_that_is_always_on_is_an_axis_like_others() -> None:
    own = declared_cases("L1", declaring(quant=OneOf(("int8_tensor", "int8_channel")), values=OneOf(("normal",))))
    assert {case.axes["quant"] for case in own} == {"int8_tensor", "int8_channel"}


def test_steps_are_bounded_by_fewer_rows_and_then_fewer_requests() -> None:
    many = declaring(heads=OneOf(("64/64",)), phase=OneOf(("prefill",)), granularity=OneOf(("dense",)))
    for case in declared_cases("L1", many):
        assert tile_steps(case) <= MAX_TILE_STEPS_L1 or len(case.structure.seqlens_q) == 1, case.id
    structure = declared_cases("L1", NARROW)[0].structure
    shorter = fewer_lengths(msgspec.structs.replace(structure, seqlens_q=(5, 2), seqlens_kv=(9, 9)))
    assert shorter is not None
    assert shorter.q == (3, 1)
    assert fewer_lengths(msgspec.structs.replace(structure, seqlens_q=(1,), seqlens_kv=(9,))) is None


def test_l3_has_every_triple_of_declared_core_values() -> None:
    small = declaring(
        lengths=OneOf(("page_edge",)), mask=OneOf(("none",)), counts=OneOf(("half",)), scale=OneOf(("usual",)),
        base=OneOf(("aligned", "misaligned")), granularity=OneOf(("dense",)), listing=OneOf(("sorted",)),
    )  # fmt: skip
    backend = StepsBackend()
    backend.capabilities = small
    every = [c for c in (*matrix("L3"), *declared_cases("L3", small)) if c.operation == "forward"]
    rows = [{"base": "aligned", **case.axes} for case in every if undeclared(case, backend) is None]
    free = {axis: values for axis, values in declared_axes("forward", small, wide=True).items() if len(values) > 1}
    assert set(free) == {"layout", "sink", "splits", "values", "base"}
    for names in combinations(free, 3):
        for values in product(*(free[name] for name in names)):
            assert any(all(row[n] == v for n, v in zip(names, values, strict=True)) for row in rows), (names, values)


def test_smoke_cases_take_declared_values_where_the_common_ones_are_not_declared() -> None:
    assert declared_cases("L0", NARROW) == ()  # the plain ones are declared, and chunks have nothing in their place
    half = declaring(dtype=OneOf(("bfloat16",)))
    smoke = declared_cases("L0", half)
    assert {case.id.split(".")[0] for case in smoke} == {"L0d"}
    assert {case.structure.dtype for case in smoke} == {"bfloat16"}
    assert all(case.axes["phase"] == "decode" for case in smoke)


# -- the generator -----------------------------------------------------------------------------------------------------


def test_a_search_finds_the_one_row_that_greed_misses_and_none_where_there_is_none() -> None:
    axes = {"a": ("0", "1"), "b": ("0", "1"), "c": ("0", "1")}

    def differ(row: dict[str, str]) -> bool:  # of three values out of two, two are the same
        return len(set(row.values())) == len(row)

    wanted = Wanted(axes, differ, combinations(axes, 2))  # type: ignore[arg-type]
    assert complete(wanted, {0: 0, 1: 1}) is None
    assert next_row(wanted, Draw(1))[1] is None
    wanted = Wanted(axes, lambda row: row.get("a") != "0" or row.get("c", "1") == "1", combinations(axes, 2))
    assert complete(wanted, {0: 0}) in ([0, 0, 1], [0, 1, 1])


# -- what the common matrix misses -------------------------------------------------------------------------------------


class ForgetsSinksWithHeadsFirst(StepsBackend):
    """Right, but where pages are HND and there are sink logits: those it leaves out. [LSE-SINK]"""

    name = "forgets-sinks"
    capabilities = NARROW

    def forward(self, problem, tensors):  # type: ignore[no-untyped-def]
        if problem.spec.cache.layout == "HND":
            problem = replace(problem, spec=replace(problem.spec, sink_logits=None))
        return super().forward(problem, tensors)


def test_a_fault_of_a_narrow_backend_that_the_common_matrix_misses_is_caught_in_its_own_domain() -> None:
    subject = ForgetsSinksWithHeadsFirst()
    common = [judge_case(case, subject) for case in declared_common(NARROW)]
    assert common
    assert all(result.is_conforming for result in common)
    own = {case.id: case for case in declared_cases("L1", NARROW)}
    failing = [result for result in (judge_case(case, subject) for case in own.values()) if result.is_failing]
    assert failing
    for result in failing:
        assert (own[result.case_id].axes["layout"], own[result.case_id].axes["sink"]) == ("HND", "logits")
        assert any("LSE-SINK" in finding.clauses for finding in result.findings)


def test_the_command_says_what_the_own_domain_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "narrow.py").write_text(
        "from attnconform.conformance import Capabilities, OneOf\n"
        "from attnconform.conformance.adapters.reference_steps import StepsBackend\n"
        "class Narrow(StepsBackend):\n"
        f"    capabilities = Capabilities(supported={{axis: OneOf((value,)) for axis, value in {SMOKE_ROW!r}.items()}},"
        " has_backward=False)\n"
    )
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "coverage.json"
    done = CliRunner().invoke(main, ["cases", "-b", "narrow:Narrow", "--device", "cpu", "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert "L1d: of 26 combinations of declared values 26 are held by common cases, 0 more by 0 cases" in done.output
    assert json.loads(path.read_text())["own"][0]["common"] == 26
