"""Between what limits the use of touched blocks lies, before it is known which blocks are touched."""

from attnconform.reference.cost.positive import check_counts, check_positive
from attnconform.reference.cost.tiles import block_use, num_blocks
from attnconform.reference.errors import RefusedInput


def least_block_use(num_tokens: int, block_size: int, seqlen_kv: int) -> float:
    """η_blk of k tokens at their most scattered: min(k, blocks of the request) blocks are touched. [COST-USE-BOUND]

    >>> least_block_use(2048, 64, 65536), least_block_use(2048, 64, 2048)
    (0.03125, 1.0)
    """
    return block_use(num_tokens, min(num_tokens, _blocks(num_tokens, block_size, seqlen_kv)), block_size)


def largest_block_use(num_tokens: int, block_size: int, seqlen_kv: int) -> float:
    """η_blk of k tokens at their most clustered: ceil(k / B) blocks are touched. [COST-USE-BOUND]

    >>> largest_block_use(2048, 64, 65536), largest_block_use(6, 64, 128)
    (1.0, 0.09375)
    """
    _blocks(num_tokens, block_size, seqlen_kv)
    return block_use(num_tokens, num_blocks(num_tokens, block_size), block_size)


def _blocks(num_tokens: int, block_size: int, seqlen_kv: int) -> int:
    check_counts("COST-USE-BOUND", num_tokens=num_tokens)
    check_positive("COST-USE-BOUND", block_size=block_size)
    if num_tokens > seqlen_kv:
        raise RefusedInput("COST-USE-BOUND", "num_tokens", num_tokens, f"the request has {seqlen_kv}")
    return num_blocks(seqlen_kv, block_size)
