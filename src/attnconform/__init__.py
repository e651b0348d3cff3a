"""attnconform: decides whether a sparse attention kernel is right."""

__version__ = "0.1.0"
