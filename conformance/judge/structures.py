"""Step 0: the structures that a backend builds, compared item by item, before any attention hides a mistake in them.

A backend is judged by the optional methods that it writes (`attnconform.conformance.structures`), and by no others.
"""

from collections.abc import Callable

from attnconform.conformance.judge.block_structures import (
    check_algebra,
    check_batch_masks,
    check_block_masks,
    check_classification,
    check_decoding,
    check_interval_masks,
    check_transpose,
)
from attnconform.conformance.judge.canonical_structures import (
    check_branches,
    check_canonical_rows,
    check_gates,
    check_group_merges,
    check_validation,
)
from attnconform.conformance.judge.cost_structures import check_costs
from attnconform.conformance.judge.fallback_structures import check_fallbacks
from attnconform.conformance.judge.list_structures import (
    check_block_tables,
    check_canonical,
    check_expansion,
    check_late_tasks,
    check_list_forms,
    check_tasks,
    check_tiers,
)
from attnconform.conformance.judge.plan_structures import (
    check_capacities,
    check_counts,
    check_keys,
    check_replanning,
    check_storage,
)
from attnconform.conformance.judge.pool_structures import check_page_pool
from attnconform.conformance.judge.reuse_structures import (
    check_admission,
    check_crops,
    check_physical,
    check_slices,
    check_statistics,
)
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.verdict import Finding

STRUCTURE_CHECKS: tuple[Callable[[Trial], list[Finding]], ...] = (
    check_canonical,
    check_canonical_rows,
    check_validation,
    check_branches,
    check_gates,
    check_group_merges,
    check_page_pool,
    check_expansion,
    check_list_forms,
    check_block_tables,
    check_block_masks,
    check_batch_masks,
    check_interval_masks,
    check_classification,
    check_decoding,
    check_transpose,
    check_algebra,
    check_slices,
    check_crops,
    check_admission,
    check_physical,
    check_statistics,
    check_tasks,
    check_late_tasks,
    check_tiers,
    check_keys,
    check_counts,
    check_capacities,
    check_replanning,
    check_storage,
    check_fallbacks,
    check_costs,
)
