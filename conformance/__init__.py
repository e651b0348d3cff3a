"""How a backend is judged. An adapter needs nothing beyond these names."""

from attnconform.conformance.backend import (
    Backend,
    Backward,
    Capabilities,
    Forward,
    OneOf,
    Span,
    Tensors,
    Unavailable,
)
from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES, Numerics
from attnconform.conformance.views import Hints, ProblemView
from attnconform.reference.errors import RefusedInput

__all__ = [
    "NUMERICS_CLASSES",
    "Backend",
    "Backward",
    "Capabilities",
    "Forward",
    "Hints",
    "Numerics",
    "OneOf",
    "ProblemView",
    "RefusedInput",
    "Span",
    "Tensors",
    "Unavailable",
]
