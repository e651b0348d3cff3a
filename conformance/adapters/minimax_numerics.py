"""How MiniMax's decode kernels compute, in vLLM and in SGLang alike: parts of a row's list, merged afterwards."""

from collections.abc import Mapping

from msgspec.structs import replace

from attnconform.conformance.bounds.numerics import Numerics

PARTS = 256  # the programs that both aim at; a row has no more


def merged_in_parts(numerics: Mapping[str, Numerics]) -> dict[str, Numerics]:
    """The same arithmetic, each part's output stored in the inputs' dtype and its lse in float32. [BOUND-OUT]"""
    return {
        dtype: replace(each, partial_storage=each.out_dtype, num_splits=PARTS, min_tile=16)
        for dtype, each in numerics.items()
    }
