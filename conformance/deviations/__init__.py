"""Deliberate mistakes that the suite must catch, and faithful variants that it must accept.

Importing this package registers all of them.
"""

from attnconform.conformance.deviations import (
    addresses,
    biases,
    blocks,
    coordinates,
    determinism,
    dropout,
    empty,
    gqa,
    gradient_edges,
    gradients,
    lifecycle,
    lse,
    masks,
    merge,
    placement,
    precision,
    quantization,
    registered_rules,
    rotations,
    rule_gradients,
    safety,
    scores,
    sets,
    shapes,
    structures,
    variants,
)
from attnconform.conformance.deviations.deviation import (
    DEVIATIONS,
    FAULT_CLASSES,
    VARIANTS,
    Deviation,
    FaultClass,
    Variant,
)

AREAS = (
    sets, coordinates, addresses, masks, blocks, scores, biases, empty, lse, merge, gqa, gradients, gradient_edges,
    safety, determinism, precision, structures, variants, quantization, dropout, rotations, registered_rules, placement,
    rule_gradients, lifecycle, shapes,
)  # fmt: skip

__all__ = ["AREAS", "DEVIATIONS", "FAULT_CLASSES", "VARIANTS", "Deviation", "FaultClass", "Variant"]
