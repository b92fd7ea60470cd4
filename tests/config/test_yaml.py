"""YAML files: those of the commands have the keys of their schemas, and what a run writes down comes back."""

import contextlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from grpo_dist.config.command import documented_keys
from grpo_dist.config.keys import is_free_form, leaf_keys
from grpo_dist.config.load import readable_config
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_health import RULES
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT, load_config
from grpo_dist.plugins.names import ADV_ESTIMATORS, KL_LOSS_TYPES, LOSS_AGG_MODES, LOSS_MODES
from tests.config.read_back import read_back

COMMANDS = (GRPO, REWARD_MODEL, SFT)
EACH = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
GROUP_FILES = [
    pytest.param(command, path, id=f"{command.name}-{path.parent.name}/{path.stem}")
    for command in COMMANDS
    for group, options in command.group_options().items()
    for path in (command.file.parent / group / f"{option}.yaml" for option in options)
]


@EACH
def test_root_and_schema_have_the_same_keys(command):
    known = leaf_keys(command.schema)
    of_rules = {key for key in known if key.startswith(tuple(f"trainer.health.{rule}." for rule in RULES))}
    there = [key for file in command.files for key in documented_keys(file, command.schema)]
    assert sorted(key.name for key in there) == sorted(set(known) - of_rules)
    assert [key.name for key in there if not key.comment] == []


@pytest.mark.parametrize(("command", "path"), GROUP_FILES)
def test_groups_set_known_keys_only_each_with_a_comment_above(command, path):
    keys = documented_keys(path, command.schema)
    assert keys or path.stem == "grpo", "only the default method changes nothing"
    unknown = {key.name for key in keys} - {*leaf_keys(command.schema)}
    assert [name for name in unknown if not is_free_form(name, command.schema)] == []
    assert [key.name for key in keys if not (key.comment or isinstance(key.default, dict))] == []
    package, comment, *_ = path.read_text().splitlines()
    assert (package, comment[:2]) == ("# @package _global_", "# ")


def test_every_file_belongs_to_a_command_and_keys_have_comments(tmp_path):
    folder = Path(GRPO.file).parent
    used = {file for command in COMMANDS for file in command.files} | {each.values[1] for each in GROUP_FILES}
    others = {folder / f"{name}.yaml" for name in ("foreign_keys", "verl_defaults", "engine_arguments")}
    assert {file for file in folder.rglob("*.yaml")} - used == others
    (file := tmp_path / "keys.yaml").write_text("trainer:\n  # said\n  seed: 1\n  nnodes: 2\n")
    assert [key.comment for key in documented_keys(file, GRPO.schema)] == ["said", ""]


# --- whatever the schema accepts comes back from the file that a run writes down, and so does the file ----------------
DEFAULT = yaml.safe_load(readable_config(load_config([])[0]))
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 1024, 0.0, 1e-6, 0.1, 0.5, 1.0, 1.7, 3.5, 1e30,
    "text", "1e-6", "null", "it's: {x} # é", "grpo_dist.rewards.format", "my.module:function",
    ["a.jsonl", "b c.parquet"], [0.9, 0.95], ["console", "wandb"], {}, {"name": [1, {"x": None}]},
    "vllm", "fp32", "bf16", "float16", "fixed", "adaptive", "token", "sequence", "cosine", "middle",
    "disable", "reinforce", "warn", "AdamW8bit", "episode", "R3", "docker", "auto",
    *ADV_ESTIMATORS, *KL_LOSS_TYPES, *LOSS_AGG_MODES, *LOSS_MODES,
]  # fmt: skip


def with_value(raw: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    section, _, rest = key.partition(".")
    return raw | {section: with_value(raw[section], rest, value) if rest else value}


@cache
def accepted(key: str) -> list[Any]:
    """Those of `VALUES` that a key may have."""
    found = []
    for value in VALUES:
        with contextlib.suppress(ValidationError):
            RunConfig.model_validate(with_value(DEFAULT, key, value))
            found.append(value)
    return found


@pytest.mark.deep
@given(st.data())
def test_schema_to_yaml_to_schema_is_the_identity(data: st.DataObject) -> None:
    raw = DEFAULT
    for key in data.draw(st.sets(st.sampled_from(leaf_keys()), max_size=30)):
        raw = with_value(raw, key, data.draw(st.sampled_from(accepted(key))))
    config = RunConfig.model_validate(raw)
    text = readable_config(config)
    assert read_back(text) == config
    assert readable_config(read_back(text)) == text


def test_odd_values_come_back() -> None:
    keys = ["actor_rollout_ref.actor.optim.lr=3e-7", "actor_rollout_ref.model.override_config.scale=-inf"]
    config, _ = load_config([*keys, "trainer.logger=[]", "trainer.experiment_name='0123'"])
    text = readable_config(config)
    assert read_back(text) == config
    assert "${" not in text


@pytest.mark.deep
def test_every_key_accepts_some_values_and_refuses_some() -> None:
    assert [key for key in leaf_keys() if not 0 < len(accepted(key)) < len(VALUES)] == []
