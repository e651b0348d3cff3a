"""One healthy way to use the bundled kernels and three slow ones, for the decision tree to tell apart.

No product path uses any of them. The slow ones give right answers.
"""
