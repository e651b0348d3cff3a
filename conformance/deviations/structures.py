"""Mistakes in the structures that a backend builds; importing this module registers all of them.

They are backends like any other deviation, and show in structure cases alone: their attention is the reference's.
"""

from attnconform.conformance.adapters.reference_structures import ReferenceStructures
from attnconform.conformance.deviations import (
    block_structures,
    canonical_structures,
    cost_figures,
    fallback_structures,
    list_structures,
    plan_structures,
    pool_structures,
    structure_ranges,
)
from attnconform.conformance.deviations.deviation import Deviation

AREAS = (
    block_structures, list_structures, cost_figures, canonical_structures, pool_structures, plan_structures,
    fallback_structures, structure_ranges,
)  # fmt: skip

__all__ = ["AREAS", "is_structural"]


def is_structural(deviation: Deviation) -> bool:
    """Whether a deviation shows in structure cases alone."""
    return isinstance(deviation.build(), ReferenceStructures)
