"""Mistakes in the structures that a backend builds; importing this module registers all of them.

They are backends like any other deviation, and show in structure cases alone: their attention is the reference's.
"""

from attnconform.conformance.deviations import block_structures, cost_figures, list_structures

AREAS = (block_structures, list_structures, cost_figures)

__all__ = ["AREAS"]
