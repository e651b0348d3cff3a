"""FlashMLA's sparse prefill for SM90, as the sgl-flash-mla wheel carries it: a list of tokens a row, one KV head.

One query head at a time, so that heads may have lists of their own; it is filled up with heads of zeros.
"""

import importlib.metadata

from torch.nn.functional import pad

from attnconform.conformance.adapters.gpu_package import load_gpu_package
from attnconform.conformance.adapters.latent_keys import latent_queries_and_keys, slot_lists
from attnconform.conformance.backend import Backend, Capabilities, Forward, OneOf, Tensors
from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES
from attnconform.conformance.views import ProblemView

INSTALL = "pip install 'attnconform[flash-mla]'"
POSITION_DIM = 64  # of a key, past its values
HEADS = 64  # that a call needs
LIST_STEP = 128  # a list's length is a multiple of it


class FlashMla(Backend):
    """flash_mla_sparse_fwd of the kernels that the package calls legacy: they alone run on SM90."""

    name = "flash-mla-sparse"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.package = load_gpu_package(self.name, device, "flash_mla", "sgl-flash-mla", INSTALL)
        self.capabilities = Capabilities(
            supported={
                "dtype": OneOf(("bfloat16",)),
                "head_dim": OneOf(("64/64", "64/32")),  # what fits beside the values
                # a list of slots cannot tell a position listed twice from two positions of one slot
                "listing": OneOf(("sorted", "shuffled", "holes")),
                "local": OneOf(("none",)),
                "score": OneOf(("none",)),
                "sink": OneOf(("none",)),  # its lse is documented to leave the sink out
                "refusal": OneOf(()),  # it documents that it ignores what is out of range
            },
            numerics={"bfloat16": NUMERICS_CLASSES["bf16-hopper"]},
            has_backward=False,
            gradient_of_lse=False,
        )

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        spec = problem.spec
        q, keys = latent_queries_and_keys(problem, tensors, POSITION_DIM)
        for head in range(spec.num_qo_heads):
            kv_head = head // spec.group_size
            out, _, lse = self.package.flash_mla_sparse_fwd(
                pad(q[:, head : head + 1], (0, 0, 0, HEADS - 1)),
                keys[:, kv_head : kv_head + 1].contiguous(),
                slot_lists(problem, head, LIST_STEP),
                spec.sm_scale,
                use_legacy=True,
            )
            tensors.out[:, head], tensors.lse[:, head] = out[:, 0, : spec.head_dim_vo], lse[:, 0]
        return Forward(tensors.out, tensors.lse, path="sparse-prefill")

    def versions(self) -> dict[str, str]:
        return super().versions() | {"sgl-flash-mla": importlib.metadata.version("sgl-flash-mla")}
