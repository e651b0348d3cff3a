"""What sparse attention costs, before anything is measured: the articles' formulas as functions.

Counts are exact integers; times are seconds, sizes bytes, bandwidths bytes per second.
"""
