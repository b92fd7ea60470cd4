"""What a config is refused with."""

from __future__ import annotations

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import load_config


def refused(*overrides: str) -> str:
    """The only problem of a config: the message's one line below its heading."""
    with pytest.raises(ConfigError) as caught:
        load_config(list(overrides))
    assert caught.value.exit_code == 2
    assert len(str(caught.value).splitlines()) == 2, str(caught.value)
    return str(caught.value).splitlines()[1].strip()
