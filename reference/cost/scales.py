"""Bytes of the scales of a quantized cache, by what shares one."""

from typing import Literal

from attnconform.reference.cost.positive import check_counts, check_positive
from attnconform.reference.errors import RefusedInput

Granularity = Literal["tensor", "head", "page", "token", "channel", "page_channel"]
GRANULARITIES: tuple[Granularity, ...] = ("tensor", "head", "page", "token", "channel", "page_channel")


def num_scales(granularity: Granularity, *, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> int:
    """Scales of one of K and V. All but "tensor" are per KV head. [COST-SCALES] (article 1, 7.2)

    Raises RefusedInput for another granularity.

    >>> shape = dict(num_pages=264, page_size=16, num_kv_heads=8, head_dim=128)
    >>> [num_scales(granularity, **shape) for granularity in GRANULARITIES]
    [1, 8, 2112, 33792, 1024, 270336]
    """
    check_counts("COST-SCALES", num_pages=num_pages)
    check_positive("COST-SCALES", page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim)
    match granularity:
        case "tensor":
            return 1
        case "head":
            return num_kv_heads
        case "page":
            return num_kv_heads * num_pages
        case "token":
            return num_kv_heads * num_pages * page_size
        case "channel":
            return num_kv_heads * head_dim
        case "page_channel":
            return num_kv_heads * num_pages * head_dim
        case _:
            raise RefusedInput("COST-SCALES", "granularity", granularity, f"must be one of {GRANULARITIES}")


def scale_bytes(
    k_granularity: Granularity,
    v_granularity: Granularity,
    *,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    bytes_each: int = 4,
) -> int:
    """Bytes of the scales of K and of V, which may differ in what shares one. [COST-SCALES]

    With a scale per page and channel, short pages pay: 128 scales of 4 bytes beside 16 or 128 tokens of 128 codes.

    >>> for page_size in (16, 128):
    ...     scales = scale_bytes("page_channel", "page_channel", num_pages=1, page_size=page_size, num_kv_heads=1,
    ...                          head_dim=128)
    ...     print(scales, scales / (2 * page_size * 128))
    1024 0.25
    1024 0.03125
    """
    check_counts("COST-SCALES", bytes_each=bytes_each)
    shape = {"num_pages": num_pages, "page_size": page_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return sum(num_scales(granularity, **shape) for granularity in (k_granularity, v_granularity)) * bytes_each
