"""Floating point operations of attention, forward, without softmax."""

from attnconform.reference.cost.positive import check_counts, check_positive


def attention_flops(
    num_keys: int,  # that each row computes with, padding of tiles included where it is computed
    *,
    head_dim_qk: int,
    head_dim_vo: int | None = None,  # None: head_dim_qk
    num_rows: int = 1,  # rows times query heads
) -> int:
    """Operations of q·k and p·v: 2 k (d_qk + d_vo) a row, 4 k d where they are equal. [COST-FLOPS] (article 1, 4.1)

    >>> attention_flops(2048, head_dim_qk=128), attention_flops(2560, head_dim_qk=128)  # candidates; whole blocks
    (1048576, 1310720)
    >>> [round(attention_flops(n, head_dim_qk=128, num_rows=32) / 1e6, 1) for n in (4224, 7424)]  # MFLOP, 32 heads
    [69.2, 121.6]
    """
    check_counts("COST-FLOPS", num_keys=num_keys, num_rows=num_rows)
    check_positive(
        "COST-FLOPS", head_dim_qk=head_dim_qk, head_dim_vo=head_dim_qk if head_dim_vo is None else head_dim_vo
    )
    return 2 * num_keys * (head_dim_qk + (head_dim_qk if head_dim_vo is None else head_dim_vo)) * num_rows


def block_flops(num_blocks: int, *, q_block_size: int, kv_block_size: int, head_dim: int) -> int:
    """Operations of a block mask's listed blocks, each computed whole: 4 K B_q B_k d. [COST-FLOPS] (article 2, 6.3)

    >>> block_flops(9, q_block_size=2, kv_block_size=2, head_dim=128) / attention_flops(26, head_dim_qk=128) * 26
    36.0
    """
    check_counts("COST-FLOPS", num_blocks=num_blocks)
    check_positive("COST-FLOPS", q_block_size=q_block_size, kv_block_size=kv_block_size)
    return attention_flops(kv_block_size, head_dim_qk=head_dim, num_rows=num_blocks * q_block_size)


def arithmetic_intensity(flops: float, num_bytes: float) -> float:
    """Operations per byte. [COST-INTENSITY]

    For one decode row in a storage of s bytes an element it is 4 k d / (2 k d s) = 2 / s (article 1, formula 9).

    >>> from attnconform.reference.cost.traffic import kv_bytes
    >>> arithmetic_intensity(attention_flops(2048, head_dim_qk=128), kv_bytes(2048, head_dim_qk=128))
    1.0
    """
    check_counts("COST-INTENSITY", flops=flops)
    check_positive("COST-INTENSITY", num_bytes=num_bytes)
    return flops / num_bytes
