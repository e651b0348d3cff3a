"""Without a GPU, Triton interprets; it decides so when it is imported, which may be by any test."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# the suite runs a process a core already; small arrays only wait for each other's threads
torch.set_num_threads(1)
