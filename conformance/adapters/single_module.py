"""Modules with kernels of packages that import a whole serving engine, loaded without it.

The package is found where it is installed or unpacked, and never imported. Its folders stand for themselves, and what
the module asks of the engine is answered by stand-ins.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from attnconform.conformance.backend import Unavailable

Answers = Mapping[str, Mapping[str, Any]]  # module of the engine -> what a kernel's module imports from it


def load_module(name: str, engine: Callable[[], Answers], install: str) -> Any:
    """A module by its full name, its kernels as the package has them. Raises Unavailable where it is not there."""
    package = name.partition(".")[0]
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise Unavailable(f"{package} is not here: {install}")
    folder = Path(found.submodule_search_locations[0])
    if not folder.joinpath(*name.split(".")[1:]).with_suffix(".py").exists():
        raise Unavailable(f"{package} has no {name}: {install}")
    importlib.import_module("triton")  # what is first imported under the patch is forgotten after it
    with mock.patch.dict(sys.modules, dict(stand_ins(name, folder, engine()))):
        return importlib.import_module(name)


def stand_ins(name: str, folder: Path, answers: Answers) -> Iterator[tuple[str, ModuleType]]:
    """The packages around a module, empty but for their folders, and the modules of the engine that answer for it."""
    parts = name.split(".")[:-1]
    for depth in range(1, len(parts) + 1):
        yield stand_in(parts[:depth], folder)
    for engine, given in answers.items():
        module = stand_in(engine.split("."), folder)
        module[1].__dict__.update(given)
        yield module


def stand_in(parts: list[str], folder: Path) -> tuple[str, ModuleType]:
    """An empty package whose modules are those of the folder it stands for."""
    module = ModuleType(".".join(parts))
    module.__path__ = [str(folder.joinpath(*parts[1:]))]
    return module.__name__, module
