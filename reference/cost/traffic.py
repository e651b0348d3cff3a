"""Bytes that attention moves, and the time that moving them takes at least."""

from attnconform.reference.cost.positive import check_counts, check_positive

BF16 = 2  # bytes an element


def kv_bytes(
    num_tokens: int,
    *,
    head_dim_qk: int,
    head_dim_vo: int | None = None,  # None: head_dim_qk
    num_kv_heads: int = 1,
    k_bytes: float = BF16,  # an element of K, and of V; K and V may be stored differently
    v_bytes: float = BF16,
) -> float:
    """Bytes of K and V of some tokens over all KV heads, scales apart. [COST-BYTES] (article 1, formula 12)

    >>> kv_bytes(1, head_dim_qk=128), kv_bytes(4224, head_dim_qk=128)
    (512, 2162688)
    >>> keys, tiles, dense = (kv_bytes(n, head_dim_qk=128, num_kv_heads=8) for n in (4224, 7424, 65536))
    >>> [n / 2**20 for n in (keys, tiles, dense)]  # MiB: the candidates, whole tiles of 64, everything
    [16.5, 29.0, 256.0]
    >>> round(dense / keys, 1), round(dense / tiles, 2)  # how much less is read
    (15.5, 8.83)
    """
    head_dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
    check_counts("COST-BYTES", num_tokens=num_tokens, num_kv_heads=num_kv_heads, k_bytes=k_bytes, v_bytes=v_bytes)
    check_positive("COST-BYTES", head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo)
    return num_tokens * num_kv_heads * (head_dim_qk * k_bytes + head_dim_vo * v_bytes)


def index_table_bytes(num_entries: int, *, num_lists: int = 1, index_bytes: int = 4) -> int:
    """Bytes of the entries of lists of equal length; row limits are extra. [COST-INDEX-BYTES]

    >>> index_table_bytes(264, num_lists=8)  # the pages of 8 KV heads
    8448
    >>> index_table_bytes(128, num_lists=1024) // 1024  # KiB, 1024 rows of 128 blocks
    512
    """
    check_counts("COST-INDEX-BYTES", num_entries=num_entries, num_lists=num_lists, index_bytes=index_bytes)
    return num_entries * num_lists * index_bytes


def block_mask_bytes(num_indices: int, num_rows: int, *, index_bytes: int = 4) -> int:
    """Bytes of one list of blocks and its row counts, 4 K + 4 N_q. [COST-INDEX-BYTES] (article 2, 6.3)

    Full and partial lists and their transposes are lists of their own.

    >>> block_mask_bytes(9, 4)
    52
    """
    check_counts("COST-INDEX-BYTES", num_indices=num_indices, num_rows=num_rows, index_bytes=index_bytes)
    return (num_indices + num_rows) * index_bytes


def step_bytes(
    kv_read: float,  # bytes of keys and values
    *,
    num_rows: int,  # rows times query heads
    head_dim_qk: int,
    head_dim_vo: int,
    index_read: float = 0,
    element_bytes: float = BF16,
) -> float:
    """All that one step moves: keys and values, queries, indices, outputs and lse in float32. [COST-BYTES]

    >>> step_bytes(2**20, num_rows=32, head_dim_qk=128, head_dim_vo=128, index_read=8448) - 2**20
    24960
    """
    check_counts("COST-BYTES", kv_read=kv_read, index_read=index_read, num_rows=num_rows)
    check_positive("COST-BYTES", head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo, element_bytes=element_bytes)
    return kv_read + index_read + num_rows * ((head_dim_qk + head_dim_vo) * element_bytes + 4)


def transaction_utilization(useful_bytes: float, num_transactions: int, *, transaction_bytes: int = 128) -> float:
    """Wanted part of the bytes that memory transactions carry. [COST-TRANSACTION] (article 1, 2.2)

    A warp that wants 32 elements of 2 bytes, all in one cache line and each in a line of its own:

    >>> transaction_utilization(64, 1), transaction_utilization(64, 32)
    (0.5, 0.015625)
    """
    check_counts("COST-TRANSACTION", useful_bytes=useful_bytes)
    check_positive("COST-TRANSACTION", num_transactions=num_transactions, transaction_bytes=transaction_bytes)
    return useful_bytes / (num_transactions * transaction_bytes)


def memory_time(num_bytes: float, bandwidth: float, *, share: float = 1.0) -> float:
    """Seconds that moving bytes takes at least, at a share of a bandwidth. [COST-TIME] (article 1, formula 8)

    1 MiB of keys and values at 3 TB/s, and at 20 % of it, in microseconds:

    >>> [round(memory_time(2**20, 3e12, share=share) * 1e6, 2) for share in (1.0, 0.2)]
    [0.35, 1.75]
    """
    check_counts("COST-TIME", num_bytes=num_bytes)
    check_positive("COST-TIME", bandwidth=bandwidth, share=share)
    return num_bytes / (bandwidth * share)


def roofline_time(flops: float, num_bytes: float, *, peak_flops: float, bandwidth: float) -> float:
    """Seconds that computing and moving take at least, whichever is longer. [COST-TIME]

    peak_flops and bandwidth are what the machine sustains, measured, not what its maker states.

    >>> roofline_time(1e6, 1e6, peak_flops=1e12, bandwidth=1e11) == memory_time(1e6, 1e11)
    True
    """
    check_counts("COST-TIME", flops=flops)
    check_positive("COST-TIME", peak_flops=peak_flops)
    return max(flops / peak_flops, memory_time(num_bytes, bandwidth))
