"""Products of parameters in two tiers: every value once in the first one, the other rows in the deep one."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def covering(*choices: Iterable[Any]) -> list[Any]:
    """Every row of the product of some parameters' values.

    In the first tier are the rows of the i-th value of each parameter, round and round, so that every value stands
    there, in company.
    """
    lists = [list(values) for values in choices]
    first = {tuple(values[i % len(values)] for values in lists) for i in range(max(map(len, lists)))}
    return [row if row in first else pytest.param(*row, marks=pytest.mark.deep) for row in product(*lists)]


def first(values: Iterable[Any], *kept: Any) -> list[Any]:
    """The values of one parameter; those that are not kept are in the deep tier."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.deep) for value in values]
