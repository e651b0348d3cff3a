"""Triton decides whether to interpret when it is first imported, and Dynamo imports it too."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
