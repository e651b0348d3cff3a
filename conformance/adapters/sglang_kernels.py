"""SGLang's Triton decode and merge kernels, each of an installed or unpacked package's own module.

To decode, a row is a request of its own with a list of slots, shared by its heads; masked entries are struck, which is
the caller's part.
"""

import importlib.metadata
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attnconform.conformance.adapters.attn_gym import listed
from attnconform.conformance.adapters.merged_parts import MergedParts
from attnconform.conformance.adapters.single_module import load_module
from attnconform.conformance.adapters.third_party_interpreter import third_party_kernels
from attnconform.conformance.adapters.triton_kernels import interpreting, sink_tensor
from attnconform.conformance.backend import Backend, Capabilities, Forward, OneOf, Tensors
from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES
from attnconform.conformance.cases.axes import FORWARD_AXES
from attnconform.conformance.views import ProblemView
from attnconform.reference.rules import SoftCap

INSTALL = "pip install --no-deps sglang==0.5.23"
SPLITS = 8  # at most; a split has at least 32 keys
BY_HEAD = ("head_window", "custom")  # masks that differ by head, where a row has one list for all


class Switches:
    """Environment variables of the engine, none of them set."""

    def __getattr__(self, name: str) -> "Switches":
        return self

    def get(self) -> bool:
        return False


def engine() -> dict[str, dict[str, Any]]:
    """What the modules ask of SGLang: which GPU this is, switches, and a rule for scores that none of them is given."""
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    not_amd = dict.fromkeys(("is_hip", "is_gfx95_supported", "is_gfx1250_supported"), lambda: False)
    return {
        "sglang.srt.environ": {"envs": Switches()},
        "sglang.srt.runtime_context": {"get_platform": lambda: SimpleNamespace(is_sm90=on_hopper)},
        "sglang.srt.utils": {**not_amd, "get_device_core_count": lambda _: 1},
        "sglang.kernels.ops.attention.score_mod": {"unpack_aux_tensors": lambda *_: (None, 0, 0, 0)},
    }


def load_kernels(name: str) -> Any:
    """A module of SGLang's attention kernels. Raises Unavailable where the package is not installed."""
    return load_module(f"sglang.kernels.ops.attention.{name}", engine, INSTALL)


class SglangDecode(Backend):
    """decode_attention_fwd."""

    name = "sglang-decode"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        interpreted = interpreting(device)
        self.context = third_party_kernels if interpreted else nullcontext
        self.kernels = load_kernels("decode_attention")
        low = "" if interpreted else "-hopper"
        self.capabilities = Capabilities(
            supported={
                "dtype": OneOf(FORWARD_AXES["dtype"] if interpreted else ("bfloat16", "float16")),
                "sharing": OneOf(("shared",)),
                # a list of slots cannot tell a position listed twice from two positions of one slot
                "listing": OneOf(("sorted", "shuffled", "holes")),
                "local": OneOf(("none",)),
                "mask": OneOf(tuple(value for value in FORWARD_AXES["mask"] if value not in BY_HEAD)),
                "score": OneOf(("none", "softcap")),
                "refusal": OneOf(()),
            },
            numerics={
                "float32": NUMERICS_CLASSES["fp32"],
                "bfloat16": NUMERICS_CLASSES[f"bf16{low}"],
                "float16": NUMERICS_CLASSES[f"fp16{low}"],
            },
            returns_lse=False,
            has_backward=False,
            gradient_of_lse=False,
        )

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        spec, q = problem.spec, tensors.q
        slots = [problem.slots(n)[row[row >= 0]] for n in range(spec.batch_size) for row in listed(problem, n, 0)]
        lengths = torch.tensor([0, *(len(row) for row in slots)], device=q.device)
        states = q.new_empty((*q.shape[:2], SPLITS, spec.head_dim_vo), dtype=torch.float32)
        cap = next((rule.cap for rule in spec.score_rules if isinstance(rule, SoftCap)), 0.0)
        with self.context():
            self.kernels.decode_attention_fwd(
                q,
                problem.by_slot(tensors.k_cache),
                problem.by_slot(tensors.v_cache),
                tensors.out,
                kv_indptr=lengths.cumsum(0).int(),
                kv_indices=joined(slots, q),
                attn_logits=states,
                attn_lse=states.new_empty(states.shape[:3]),
                num_kv_splits=torch.full((len(q),), problem.hints.num_kv_splits or 1, device=q.device).int(),
                max_kv_splits=SPLITS,
                sm_scale=spec.sm_scale,
                k_scale=1.0,
                v_scale=1.0,
                logit_cap=cap,
                sinks=sink_tensor(spec, self.device),
            )
        return Forward(tensors.out, None, path="decode")

    def versions(self) -> dict[str, str]:
        return super().versions() | {"sglang": importlib.metadata.version("sglang")}


class SglangMerge(MergedParts):
    """merge_state_triton, pair after pair; natural logarithms."""

    name = "sglang-merge"
    unit = 1.0

    def load(self) -> Any:
        return load_kernels("merge_state")

    def merge(self, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = v[:, 0].contiguous(), s[:, 0].contiguous()
        for i in range(1, v.shape[1]):
            out, lse = self.kernels.merge_state_triton(out, lse, v[:, i].contiguous(), s[:, i].contiguous())
        return out, lse

    def versions(self) -> dict[str, str]:
        return super().versions() | {"sglang": importlib.metadata.version("sglang")}


def joined(slots: list[Tensor], like: Tensor) -> Tensor:
    """All rows' slots one after the other; an entry more than there are, so that no pointer is null."""
    return torch.cat([*slots, torch.zeros(1, dtype=torch.int64, device=like.device)])
