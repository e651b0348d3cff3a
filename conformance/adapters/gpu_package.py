"""What an adapter of a GPU's kernels needs before it can say what they do: a GPU, and mostly a package."""

import importlib
import importlib.util
from typing import Any

from attnconform.conformance.backend import Unavailable


def require_gpu(name: str, device: str) -> None:
    """Raises Unavailable for a device that is no GPU."""
    if not device.startswith("cuda"):
        raise Unavailable(f"{name} is a kernel of the GPU, but device is {device!r}")


def load_gpu_package(name: str, device: str, module: str, package: str, install: str) -> Any:
    """A package's module for the backend `name`. Raises Unavailable where the package, or a GPU, is missing."""
    if importlib.util.find_spec(module) is None:
        raise Unavailable(f"{name} needs the package {package}: {install}")
    require_gpu(name, device)
    return importlib.import_module(module)
