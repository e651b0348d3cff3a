"""CSR lists turned around: for every column the rows that list it."""

import numpy as np

from attnconform.reference.coordinates import IntArray
from attnconform.reference.errors import RefusedInput


def transpose_csr(
    indptr: IntArray,  # (num_rows + 1,)
    indices: IntArray,  # (total,) columns
    num_columns: int,
) -> tuple[IntArray, IntArray]:
    """indptr and row indices of every column, rows ascending: a counting sort by column. [BLOCK-TRANSPOSE]

    Takes O(total + num_rows + num_columns) memory, never num_rows * num_columns. A pair that is listed twice stays
    twice. Raises RefusedInput for a column outside [0, num_columns).

    >>> transpose_csr(np.array([0, 2, 3, 5]), np.array([0, 2, 2, 1, 2]), 3)
    (array([0, 1, 2, 5]), array([0, 2, 0, 1, 2]))
    """
    outside = np.flatnonzero((indices < 0) | (indices >= num_columns))
    if outside.size:
        at = int(outside[0])
        raise RefusedInput("BLOCK-EXTENT", "indices", int(indices[at]), f"there are {num_columns} columns", (at,))
    counts = np.bincount(indices, minlength=num_columns)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    # stable, so that the rows of a column keep their order
    return starts, rows[np.argsort(indices, kind="stable")]
