"""The cases, before they are files: one entry for each objective, in the table of its kind.

Expected numbers come from the papers' formulas in `tests/fuzz/papers`, never from grpo_dist.
"""
