"""Whatever the schema accepts comes back from the file that a run writes down, and so does the file."""

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from grpo_dist.config.keys import leaf_keys
from grpo_dist.config.load import readable_config
from grpo_dist.config.schema import RunConfig
from grpo_dist.plan.commands import load_config
from grpo_dist.plugins.names import ADV_ESTIMATORS, KL_LOSS_TYPES, LOSS_AGG_MODES, LOSS_MODES
from tests.config.read_back import read_back

DEFAULT = yaml.safe_load(readable_config(load_config([])[0]))
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 1024, 0.0, 1e-6, 0.1, 0.5, 1.0, 1.7, 3.5, 1e30,
    "text", "1e-6", "null", "it's: {x} # é", "grpo_dist.rewards.format", "my.module:function",
    ["a.jsonl", "b c.parquet"], [0.9, 0.95], ["console", "wandb"], {}, {"name": [1, {"x": None}]},
    "vllm", "fp32", "bf16", "float16", "fixed", "adaptive", "token", "sequence", "cosine", "middle",
    "disable", "reinforce", "warn", "AdamW8bit", "episode", "R3",
    *ADV_ESTIMATORS, *KL_LOSS_TYPES, *LOSS_AGG_MODES, *LOSS_MODES,
]  # fmt: skip


def with_value(raw: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of `raw` with one key changed."""
    section, _, rest = key.partition(".")
    return raw | {section: with_value(raw[section], rest, value) if rest else value}


def is_accepted(key: str, value: Any) -> bool:
    try:
        RunConfig.model_validate(with_value(DEFAULT, key, value))
    except ValidationError:
        return False
    return True


ACCEPTED = {key: [value for value in VALUES if is_accepted(key, value)] for key in leaf_keys()}


@pytest.mark.deep
@given(st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_schema_to_yaml_to_schema_is_the_identity(data: st.DataObject) -> None:
    raw = DEFAULT
    for key in data.draw(st.sets(st.sampled_from(leaf_keys()), max_size=30)):
        raw = with_value(raw, key, data.draw(st.sampled_from(ACCEPTED[key])))
    config = RunConfig.model_validate(raw)
    text = readable_config(config)
    assert read_back(text) == config
    assert readable_config(read_back(text)) == text


def test_every_key_accepts_some_value_and_most_refuse_some() -> None:
    assert not [key for key, values in ACCEPTED.items() if not values]
    assert sum(len(values) < len(VALUES) for values in ACCEPTED.values()) == len(ACCEPTED)
