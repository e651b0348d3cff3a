"""A mask rule of a caller's own, as a Triton function. Imported when it is known whether Triton interprets."""

import triton
import triton.language as tl


@triton.jit
def is_even(q_idx, kv_idx, request, data_ptr):  # type: ignore[no-untyped-def]  # Triton compiles annotations too
    """Edges whose two positions have an even sum."""
    return (q_idx + kv_idx) % 2 == tl.zeros([1, 1], tl.int32)
