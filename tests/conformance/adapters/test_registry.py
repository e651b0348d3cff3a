"""How backends are found by name, and the one line that says why one is not."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from attnconform.conformance.adapters import registry
from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.adapters.registry import BUNDLED, BackendError, load_backend
from attnconform.conformance.backend import Backend, Unavailable

MODULE = """
from attnconform.conformance.backend import Backend, Unavailable

class Good(Backend):
    name = "good"

class Failing(Backend):
    def __init__(self, device):
        raise RuntimeError("no driver\\nat all")

class Missing(Backend):
    def __init__(self, device):
        raise Unavailable("needs a package: pip install a-package")

class Other:
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable module of adapters."""
    (tmp_path / "adapters_under_test.py").write_text(MODULE)
    (tmp_path / "adapters_that_fail.py").write_text("import a_package_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("adapters_under_test", "adapters_that_fail"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "adapters_under_test"


# what needs nothing beside the suite's own requirements
ALWAYS_THERE = (
    "triton",
    "triton-atomic",
    "sdpa",
    "flex-eager",
    "flex-compiled",
    "reference",
    "flex-eager-trusts-blocks",
)


def loaded_or_missing(name: str) -> Backend | Unavailable:
    """The backend, or what is said where something of it is not here."""
    # On a GPU machine Triton is there to compile, and one process cannot do both.
    on_gpu = torch.cuda.is_available() and name != "sdpa-lse"
    try:
        return load_backend(name, "cuda" if on_gpu else "cpu")
    except Unavailable as missing:
        return missing


@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_name_loads_under_its_own_name_or_says_what_it_needs(name: str) -> None:
    found = loaded_or_missing(name)
    if isinstance(found, Unavailable):
        assert name not in ALWAYS_THERE
        assert any(words in str(found) for words in ("pip install", "kernel of the GPU"))
        assert "\n" not in str(found)
        return
    assert found.name == name
    found.close()


def test_module_and_class_load(module: str) -> None:
    assert load_backend(f"{module}:Good", "cpu").name == "good"


def test_an_entry_point_loads_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    value = "attnconform.conformance.adapters.reference_steps:StepsBackend"
    point = EntryPoint(name="announced", value=value, group=registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.ENTRY_POINTS else [])
    assert isinstance(load_backend("announced", "cpu"), StepsBackend)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("tritn", "'tritn', but must be MODULE:CLASS or one of attn-gym, "),
        ("adapters_nowhere:Good", "adapters_nowhere does not import: ModuleNotFoundError"),
        (
            "adapters_that_fail:Good",
            "adapters_that_fail does not import: ModuleNotFoundError: No module named 'a_package",
        ),
        ("adapters_under_test:Bad", "adapters_under_test has no Bad"),
        ("adapters_under_test:Other", "Other in adapters_under_test is not a subclass of Backend"),
        ("adapters_under_test:Failing", "did not start: RuntimeError: no driver at all"),
    ],
)
def test_what_does_not_load_is_said_in_one_line(module: str, spec: str, words: str) -> None:
    with pytest.raises(BackendError) as caught:
        load_backend(spec, "cpu")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_adapter_that_misses_a_package_says_what_to_install(module: str) -> None:
    with pytest.raises(Unavailable, match="pip install a-package"):
        load_backend(f"{module}:Missing", "cpu")


def test_a_kernel_of_another_device_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(Unavailable, match="sdpa-lse is a kernel of the CPU"):
        load_backend("sdpa-lse", "cuda")


@pytest.mark.parametrize(("device", "words"), [("gpu9", "torch does not know"), ("cuda", "torch sees no GPU")])
def test_a_device_that_is_not_there_is_named(device: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match=f"{device!r}.*{words}"):
        load_backend("sdpa", device)


def test_without_a_gpu_triton_is_told_to_interpret_before_any_adapter_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    load_backend("reference", "cpu")
    assert registry.os.environ["TRITON_INTERPRET"] == "1"
