"""Without a GPU, Triton interprets; it decides so when it is imported, which may be by any test."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
