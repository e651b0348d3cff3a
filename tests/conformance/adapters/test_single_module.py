"""A kernel's module is loaded out of a package that cannot be imported, and leaves nothing behind."""

import sys
from pathlib import Path

import pytest

from attnconform.conformance.adapters.single_module import load_module
from attnconform.conformance.backend import Unavailable

pytest.importorskip("triton")

INSTALL = "pip install --no-deps engine_of_a_test"
KERNELS = """
from engine_of_a_test.platform import answer
from engine_of_a_test.kernels.helpers import ONE
from .helpers import ONE as same_one

def value():
    return answer(ONE + same_one)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose import fails, with a module of kernels that has a neighbour and asks the engine."""
    folder = tmp_path / "engine_of_a_test"
    (folder / "kernels").mkdir(parents=True)
    for init in (folder, folder / "kernels"):
        (init / "__init__.py").write_text("raise RuntimeError('a whole engine')")
    (folder / "platform.py").write_text("raise RuntimeError('no GPU')")
    (folder / "kernels" / "helpers.py").write_text("ONE = 1")
    (folder / "kernels" / "attention.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def answers() -> dict[str, dict[str, object]]:
    return {"engine_of_a_test.platform": {"answer": lambda x: 10 * x}}


def test_a_module_finds_its_neighbours_and_what_answers_for_the_engine(package: Path) -> None:
    assert load_module("engine_of_a_test.kernels.attention", answers, INSTALL).value() == 20


def test_nothing_of_the_package_stays_imported(package: Path) -> None:
    load_module("engine_of_a_test.kernels.attention", answers, INSTALL)
    assert not [name for name in sys.modules if name.startswith("engine_of_a_test")]


def test_a_package_that_is_not_there_is_named() -> None:
    with pytest.raises(Unavailable, match=f"engine_of_a_test is not here: {INSTALL}"):
        load_module("engine_of_a_test.kernels.attention", answers, INSTALL)


def test_a_module_that_the_package_does_not_have_is_named(package: Path) -> None:
    with pytest.raises(Unavailable, match=r"has no engine_of_a_test\.kernels\.moved: pip"):
        load_module("engine_of_a_test.kernels.moved", answers, INSTALL)
