"""The implementations that the cases can be checked against: one module each, with `version()` and a function
for each kind of objective.

The function, such as `policy_loss(name, case)`, calls the implementation and returns the outputs it gives, by the names
of `case.expected`; those it lacks, such as a clip fraction that it does not report, are left out.
"""

from __future__ import annotations

IMPLEMENTATIONS = ("grpo_dist", "verl", "trl")


class NotOffered(Exception):
    """The implementation has no such objective, or no such setting of it; the message says which."""
