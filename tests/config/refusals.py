"""What a config is refused with."""

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import load_config


def problems(*overrides: str) -> list[str]:
    """The lines of the message below its heading."""
    with pytest.raises(ConfigError) as caught:
        load_config(list(overrides))
    assert caught.value.exit_code == 2
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def refused(*overrides: str) -> str:
    """The only problem of a config."""
    (problem,) = problems(*overrides)
    return problem
