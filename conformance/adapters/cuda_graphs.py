"""CUDA graphs of a backend's run, for the optional method `capture`. [PLAN-REPLAY]"""

from collections.abc import Callable

import torch

from attnconform.conformance.backend import Forward

WARM_UP = 2  # runs before the capture: the first compiles, the second finds what was compiled


class CapturedRun:
    """A run recorded as a CUDA graph."""

    def __init__(self, run: Callable[[], Forward], device: str) -> None:
        """Raises NotImplementedError for a device that is no CUDA device."""
        if not device.startswith("cuda"):
            raise NotImplementedError(f"CUDA graphs need a CUDA device, and this is {device}")
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                run()
        torch.cuda.current_stream(device).wait_stream(side)
        self.device, self.graph = device, torch.cuda.CUDAGraph()
        # torch's own stream for captures is on the GPU that captured first: on another, launches would not be captured
        with torch.cuda.device(device), torch.cuda.graph(self.graph, stream=side):
            self.forward = run()

    def replay(self) -> Forward:
        """What the tensors hold after the graph has run."""
        self.graph.replay()
        torch.cuda.synchronize(self.device)
        return self.forward
