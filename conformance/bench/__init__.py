"""Timings of the bundled kernels beside their peers: one process, equal inputs, ratios."""
