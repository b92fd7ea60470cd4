"""What gdpo compares: the components that a reward declares, or those that the config names."""

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.rewards.components import KEYS, WEIGHTS, chosen_components
from tests.messages import refuses

DECLARED = {"right": 1.0, "short": 0.5}


def test_those_declared_with_their_weights() -> None:
    assert chosen_components(None, None, declared=DECLARED, overlong_penalty=False) == DECLARED
    assert chosen_components(None, [2.0, 3.0], declared=DECLARED, overlong_penalty=False) == {"right": 2, "short": 3}


def test_the_overlong_penalty_is_one_more() -> None:
    found = chosen_components(None, None, declared=DECLARED, overlong_penalty=True)
    assert found == {"right": 1, "short": 0.5, "overlong_penalty": 1}


def test_those_named() -> None:
    """A weight that is not set is the declared one, and 1 for a value that is no component of its own."""
    keys = ["short", "right.acc"]
    assert chosen_components(keys, None, declared=DECLARED, overlong_penalty=False) == {"short": 0.5, "right.acc": 1}
    keys = ["style", "overlong_penalty"]
    assert chosen_components(keys, None, declared={}, overlong_penalty=True) == {"style": 1, "overlong_penalty": 1}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((None, None, {}), (KEYS, "grpo_dist.rewards.weighted", "length, style")),
        ((["shrot"], None, DECLARED), (f"{KEYS}=shrot", "right, short")),
        ((["right"], [1.0, 2.0], DECLARED), (WEIGHTS, "2 weights", "right")),
        ((None, [1.0], DECLARED), (WEIGHTS, "right, short")),
    ],
)
def test_mistakes_are_named(arguments: tuple, parts: tuple[str, ...]) -> None:
    """The values that a function returns are told, and not taken: a length is a diagnostic."""
    keys, weights, declared = arguments
    with refuses(ConfigError, *parts):
        chosen_components(
            keys, weights, declared=declared, overlong_penalty=False, returned=["style", "overlong_penalty", "length"]
        )
