"""From a failed case to the clause that explains it."""

from attnconform.conformance.explain.explain import explain_case

__all__ = ["explain_case"]
