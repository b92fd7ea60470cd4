"""What engine settings advise where a GPU is full: keys that are there, of the command whose role it is."""

from __future__ import annotations

import re

import pytest

from grpo_dist.config.keys import leaf_keys
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SupervisedConfig
from grpo_dist.engines import settings


@pytest.mark.parametrize(
    ("advice", "schema"),
    [
        (settings.ACTOR_ROOM, RunConfig),
        (settings.REF_ROOM, RunConfig),
        (settings.REWARD_MODEL_ROOM, RunConfig),
        (settings.SUPERVISED_ROOM, SupervisedConfig),
    ],
)
def test_every_key_is_one_of_the_command(advice: str, schema: type[JobConfig]) -> None:
    keys = re.findall(r"\w+(?:\.\w+)+", advice)
    assert len(keys) >= 2
    assert set(keys) <= set(leaf_keys(schema))
