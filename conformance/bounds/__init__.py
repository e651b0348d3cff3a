"""How far an honest kernel may be from the exact answer, per element, from the arithmetic it declares. [BOUND-OUT]"""

from attnconform.conformance.bounds.backward import BackwardBounds, backward_bounds
from attnconform.conformance.bounds.block import AttentionBlock
from attnconform.conformance.bounds.forward import ForwardBounds, forward_bounds
from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES, Numerics

__all__ = [
    "NUMERICS_CLASSES",
    "AttentionBlock",
    "BackwardBounds",
    "ForwardBounds",
    "Numerics",
    "backward_bounds",
    "forward_bounds",
]
