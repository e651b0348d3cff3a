"""Memory that a run needs beside its inputs and outputs, and what a backward pass writes where rows collide."""

from attnconform.reference.cost.positive import check_counts, check_positive

FP32 = 4  # bytes


def partial_state_bytes(
    num_splits: int,
    *,
    num_qo_heads: int,
    head_dim_vo: int,
    num_rows: int = 1,
    with_sums: bool = True,  # m and l beside the unnormalized output
) -> int:
    """Bytes of the partial states (m, l, o) of split rows, in float32. [COST-PARTIALS] (article 1, 5.1, formula 13)

    >>> partial_state_bytes(4, num_qo_heads=32, head_dim_vo=128, with_sums=False)
    65536
    >>> one = partial_state_bytes(4, num_qo_heads=32, head_dim_vo=128)
    >>> one / 2**10, one * 64 / 2**20  # KiB of one request, MiB of 64
    (65.0, 4.0625)
    >>> partial_state_bytes(8, num_qo_heads=32, head_dim_vo=128, num_rows=1024, with_sums=False) / 2**20
    128.0
    """
    check_counts("COST-PARTIALS", num_splits=num_splits, num_rows=num_rows)
    check_positive("COST-PARTIALS", num_qo_heads=num_qo_heads, head_dim_vo=head_dim_vo)
    return num_splits * num_rows * num_qo_heads * (head_dim_vo + 2 * with_sums) * FP32


def hot_atomics(num_q_tiles: int, *, page_size: int, head_dim: int) -> int:
    """Atomic additions into one page of dK, or of dV, that every query tile selected. [COST-ATOMICS] (article 1, 7.1)

    >>> hot_atomics(64, page_size=16, head_dim=128)
    131072
    """
    check_counts("COST-ATOMICS", num_q_tiles=num_q_tiles)
    check_positive("COST-ATOMICS", page_size=page_size, head_dim=head_dim)
    return num_q_tiles * page_size * head_dim


def gradient_partial_bytes(num_q_tiles: int, num_pages: int, *, page_size: int, head_dim: int) -> int:
    """Bytes of float32 dK and dV of one head, where every query tile keeps its own. [COST-GRADIENTS] (formula 15)

    >>> gradient_partial_bytes(64, 264, page_size=16, head_dim=128) / 2**20  # MiB a head
    264.0
    """
    check_counts("COST-GRADIENTS", num_q_tiles=num_q_tiles, num_pages=num_pages)
    check_positive("COST-GRADIENTS", page_size=page_size, head_dim=head_dim)
    return num_q_tiles * num_pages * page_size * head_dim * 2 * FP32
