"""The resolved config of a file, as a run writes it down."""

import yaml

from grpo_dist.config.environment import from_environment
from grpo_dist.config.schema import RunConfig


def read_back(text: str) -> RunConfig:
    """The config; every key is there and checked."""
    return RunConfig.model_validate(from_environment(yaml.safe_load(text)))
