"""Without a GPU, Triton interprets; it decides so when it is imported, which may be by any test."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# the suite runs a process a core already; small arrays only wait for each other's threads
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def modules_of_one_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Modules that a test wrote into its own folder are no other test's, which may have some of the same name."""
    yield
    folder: Path | None = request.node.funcargs.get("tmp_path")
    if folder is None:
        return
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(f"{folder}{os.sep}"):
            del sys.modules[name]
    sys.path[:] = [entry for entry in sys.path if not Path(entry).is_relative_to(folder)]
