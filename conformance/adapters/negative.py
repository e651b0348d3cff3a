"""Adapters that are wrong on purpose: each keeps a trap in view that a reader of an API falls into."""

from types import FunctionType

import torch
from msgspec.structs import replace
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from attnconform.conformance.adapters.flex import FlexCompiled, FlexEager, call_flex, offset_of
from attnconform.conformance.adapters.torch_rules import lower_mask
from attnconform.conformance.backend import OneOf
from attnconform.conformance.views import ProblemView


class FlexEagerTrustsBlocks(FlexEager):
    """Lists blocks in a BlockMask and leaves membership out of mask_mod: eager FlexAttention then attends every block.

    Breaks BLOCK-BIND and BLOCK-MEMBER. A compiled kernel would skip the blocks that are not listed.
    """

    name = "flex-eager-trusts-blocks"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        # A BlockMask alone can say block-granular lists, one per query row, and nothing finer.
        blocks_alone = {"granularity": OneOf(("block",)), "local": OneOf(("none",))}
        self.capabilities = replace(self.capabilities, supported={**self.capabilities.supported, **blocks_alone})

    def block_mask(
        self, problem: ProblemView, request: int, seqlen_q: int, seqlen_kv: int, first_row: int = 0
    ) -> BlockMask:
        lists = problem.spec.candidates
        assert lists is not None
        listed = problem.candidate_masks[request][:, first_row : first_row + seqlen_q]
        whole = pad(listed, (0, -listed.shape[2] % lists.block_size))
        is_listed = whole.unflatten(2, (-1, lists.block_size)).any(dim=3).int()
        return BlockMask.from_kv_blocks(
            is_listed.sum(dim=2, dtype=torch.int32)[None],
            is_listed.argsort(dim=2, descending=True, stable=True).int()[None],
            BLOCK_SIZE=(1, lists.block_size),
            mask_mod=lower_mask(problem.spec.mask_rule, [request], offset_of(problem, request) + first_row),
            seq_lengths=(seqlen_q, seqlen_kv),
        )


class FlexCompiledSkips(FlexCompiled):
    """FlexAttention compiled without fullgraph: after a compilation that raised, Dynamo runs the function as it is.

    Breaks SAFE-PATH: calls of shapes and rules that were not compiled before are eager, and nothing is raised.
    """

    name = "flex-compiled-skips"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        # Dynamo remembers code objects: this one is the backend's own, and other backends stay compiled.
        code = call_flex.__code__.replace(co_name="call_flex_or_skip")
        own = FunctionType(code, call_flex.__globals__, "call_flex_or_skip", call_flex.__defaults__)
        self.call = torch.compile(own, dynamic=False)
