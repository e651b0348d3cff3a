"""A declaration whose words mean nothing is refused, with the nearest word that there is."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from attnconform.conformance.adapters.declaration import AXES, check_declaration, faults_of
from attnconform.conformance.adapters.registry import BackendError, load_backend
from attnconform.conformance.backend import Capabilities, Domain, OneOf, Span, Whole
from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.command_line import main
from attnconform.conformance.deviations import DEVIATIONS, VARIANTS

FAULTS: dict[str, tuple[Mapping[str, object], str]] = {
    "axis": ({"supported": {"maks": OneOf(("none",))}}, "supported names the axis 'maks'.*did you mean 'mask'"),
    "axis of a fallback": ({"fallback": {"page-size": OneOf(("8",))}}, "fallback names .*did you mean 'page_size'"),
    "axis like no other": ({"supported": {"xyz": Whole()}}, "the axis 'xyz', which nothing has; there are dtype, "),
    "value": ({"supported": {"mask": OneOf(("none", "casual"))}}, r"supported\['mask'\] lists .*mean 'causal'"),
    "value of a fallback": ({"fallback": {"score": OneOf(("allibi",))}}, r"fallback\['score'\] lists .*mean 'alibi'"),
    "number": ({"supported": {"head_dim": OneOf(("64",))}}, "head_dim = '64', but the form is OF_QK/OF_VO"),
    "span of pairs": ({"supported": {"heads": Span(1, 8)}}, r"supported\['heads'\] is a Span, but only .*page_size"),
    "no domain": ({"supported": {"mask": ("none",)}}, "but must be a OneOf, a Span or Whole"),
    "text for a tuple": ({"supported": {"mask": OneOf("none")}}, r"must hold a tuple: OneOf\(\('none',\)\)"),  # type: ignore[arg-type]
    "dtype": ({"numerics": {"bf16": NUMERICS_CLASSES["bf16"]}}, "the dtype 'bf16'.*did you mean 'bfloat16'"),
    "dtype of codes": ({"numerics": {"float16/code": NUMERICS_CLASSES["fp16"]}}, "did you mean 'float16/codes'"),
    "arithmetic": ({"numerics": {"float16": "fp16"}}, r"numerics\['float16'\] is 'fp16', but must be a Numerics"),
    "choice": ({"determinism": "run-to-run"}, "determinism is 'run-to-run', but must be 'none' or 'run_to_run'"),
    "number for a choice": ({"lse_base": 2}, "lse_base is 2, but must be 'e' or '2'"),
    "yes or no": ({"has_backward": "no"}, "has_backward is 'no', but must be True or False"),
}
ADAPTER = """
from attnconform.conformance import Backend, Capabilities, OneOf

class Misspelled(Backend):
    name = "misspelled"
    capabilities = Capabilities(supported={"pagesize": OneOf(("16",))})
"""


@pytest.mark.parametrize("name", FAULTS)
def test_a_word_that_nothing_has_is_refused_in_one_line(name: str) -> None:
    fields, words = FAULTS[name]
    with pytest.raises(ValueError, match=words) as caught:
        check_declaration(Capabilities(**fields))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_numbers_and_spans_of_an_axis_form_may_be_any() -> None:
    domains: dict[str, Domain] = {
        "heads": OneOf(("32/8",)),
        "page_size": Span(1, 1024),
        "head_dim": OneOf(("576/512",)),
    }
    check_declaration(Capabilities(supported=domains, fallback={"splits": OneOf((5,)), "refusal": OneOf(())}))


@pytest.mark.parametrize("level", ["L0", "L1"])
def test_every_axis_value_of_a_case_may_be_declared(level: str) -> None:
    for case in matrix(level):
        for axis, value in case.axes.items():
            assert axis in AXES, case.id
            assert list(faults_of(Capabilities(supported={axis: OneOf((value,))}))) == [], case.id


def test_deviations_and_variants_declare_what_there_is() -> None:
    built = {entry.id: entry.build() for entry in DEVIATIONS.values()}
    built |= {entry.id: entry.build() for entry in VARIANTS.values()}
    assert {name: faults for name, backend in built.items() if (faults := list(faults_of(backend.capabilities)))} == {}


def test_a_misspelled_backend_does_not_load_and_ends_the_command_with_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "misspelled_adapter.py").write_text(ADAPTER)
    monkeypatch.syspath_prepend(tmp_path)
    spec = "misspelled_adapter:Misspelled"
    with pytest.raises(BackendError, match="'pagesize', which nothing has; did you mean 'page_size'"):
        load_backend(spec, "cpu")
    result = CliRunner().invoke(main, ["smoke", "-b", spec, "--device", "cpu"])
    assert result.exit_code == 2
    assert "did you mean 'page_size'?" in result.output
