"""Launches that repeat on the same tensors, replayed as one CUDA graph.

A step of a few short kernels takes the host longer than the GPU. From the second call with the same tensors on, all of
its launches are one. Tensors are known by identity, and those of a graph are kept alive with it, so that no other
tensor can be taken for them; their numbers may change, their storage must not be swapped or resized. [PLAN-REPLAY]
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

MAX_GRAPHS = 32

Tensors = tuple[Tensor | None, ...]


class Replayable(Protocol):
    """Captured launches."""

    def replay(self) -> None: ...


def capture_cuda_graph(launch: Callable[[], None]) -> Replayable:
    """The launches of a call on the current GPU, captured and not run."""
    graph = torch.cuda.CUDAGraph()
    # torch's own stream for captures is on the GPU that captured first: launches on another would run, not be captured
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        launch()
    return graph


class GraphCache:
    """Graphs by the tensors of a call; the first call of any tensors launches, and so compiles what must be."""

    def __init__(self, capture: Callable[[Callable[[], None]], Replayable] = capture_cuda_graph) -> None:
        self.capture = capture
        self.seen: dict[tuple[int, ...], Tensors] = {}
        self.replays: dict[tuple[int, ...], Callable[[], None]] = {}  # of those that are captured
        self.num_captures = 0

    def replay(self, key: tuple[int, ...]) -> bool:
        """Launches the graph of the tensors of these ids; False where there is none, or the caller captures one."""
        launch = self.replays.get(key)
        if launch is None or is_capturing():
            return False
        launch()
        return True

    def call(self, tensors: Tensors, launch: Callable[[], None]) -> None:
        """Runs `launch`, which reads and writes no other tensors of the caller's than these."""
        key = tuple(map(id, tensors))
        if key in self.replays:
            self.replays[key]()
        elif key in self.seen:
            # a bound method, which keeps its graph
            self.replays[key] = self.capture(launch).replay
            self.num_captures += 1
            self.replays[key]()
        else:
            launch()
            self._keep(key, tensors)

    def _keep(self, key: tuple[int, ...], tensors: Tensors) -> None:
        """Remembers a call; the one seen first goes where there are too many."""
        if len(self.seen) == MAX_GRAPHS:
            oldest = next(iter(self.seen))
            del self.seen[oldest]
            self.replays.pop(oldest, None)
        self.seen[key] = tensors


def is_capturing() -> bool:
    """Whether the caller captures a graph of its own."""
    return bool(torch.cuda.is_current_stream_capturing())


def call_or_replay(graphs: GraphCache, device: torch.device, tensors: Tensors, launch: Callable[[], None]) -> None:
    """Through the graphs where there is a GPU and no caller captures a graph of its own."""
    with launching_on(device):
        if device.type == "cuda" and not is_capturing():
            graphs.call(tensors, launch)
        else:
            launch()


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one, which takes longer than to see that it is."""
    is_current = device.type != "cuda" or torch.cuda.current_device() == device.index
    return nullcontext() if is_current else torch.cuda.device(device)
