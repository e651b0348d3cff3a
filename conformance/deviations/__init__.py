"""Deliberate mistakes that the suite must catch, and faithful variants that it must accept.

Importing this package registers all of them.
"""

from attnconform.conformance.deviations import (
    addresses,
    batches,
    biases,
    blocks,
    coordinates,
    determinism,
    dropout,
    empty,
    feature_paths,
    gqa,
    gradient_edges,
    gradient_features,
    gradient_ranges,
    gradients,
    later_calls,
    lifecycle,
    lse,
    masks,
    merge,
    number_ranges,
    output_strides,
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
    sizes,
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
    rule_gradients, lifecycle, shapes, output_strides, later_calls, gradient_features,
    gradient_ranges, number_ranges, feature_paths,
    sizes, batches,
)  # fmt: skip

__all__ = ["AREAS", "DEVIATIONS", "FAULT_CLASSES", "VARIANTS", "Deviation", "FaultClass", "Variant"]
