"""The YAML files of the commands against their schemas: the same keys on both sides, a comment on each."""

import re
from pathlib import Path

import pytest
import yaml

from grpo_dist.config.command import default_options
from grpo_dist.config.keys import free_form_keys, leaf_keys, section_keys
from grpo_dist.config.load import load_command
from grpo_dist.config.schema_health import RULES
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT

COMMANDS = (GRPO, REWARD_MODEL, SFT)
EACH = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
GROUP_FILES = [
    pytest.param(command, path, id=f"{command.name}-{path.parent.name}/{path.stem}")
    for command in COMMANDS
    for group, options in command.group_options().items()
    for path in (command.file.parent / group / f"{option}.yaml" for option in options)
]


def leaves(tree, schema, prefix=""):
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in free_form_keys(schema):
            yield from leaves(value, schema, f"{key}.")
        else:
            yield key


def read(path):
    tree = yaml.safe_load(path.read_text()) or {}
    tree.pop("defaults", None)
    return tree


def uncommented(text):
    """Keys with a value on their line and no comment on the line above."""
    lines = text.splitlines()
    return [
        line.strip()
        for above, line in zip(["", *lines], lines, strict=False)
        if re.match(r"\s*\w+: \S", line) and not above.strip().startswith("#")
    ]


@EACH
def test_root_and_schema_have_the_same_keys(command):
    """Each in one file; but the settings of the health rules, whose defaults are in their table."""
    known = leaf_keys(command.schema)
    of_rules = {key for key in known if key.startswith(tuple(f"trainer.health.{rule}." for rule in RULES))}
    there = [key for file in command.files for key in leaves(read(file), command.schema)]
    assert sorted(there) == sorted(set(known) - of_rules)


def test_there_are_keys_of_all_sections():
    assert len(leaf_keys()) > 80
    assert "actor_rollout_ref.actor.optim" in section_keys()
    assert set(free_form_keys()) == {
        "actor_rollout_ref.model.override_config",
        "actor_rollout_ref.ref.model.override_config",
        "critic.model.override_config",
        "actor_rollout_ref.rollout.engine_kwargs",
        "actor_rollout_ref.rollout.agent.agent_kwargs",
        "actor_rollout_ref.rollout.agent.endpoint_kwargs",
        "data.apply_chat_template_kwargs",
        "custom_reward_function.reward_kwargs",
        "trainer.stage_timeout_s",
        "actor_rollout_ref.actor.optim.override_optimizer_config",
        "critic.optim.override_optimizer_config",
        "reward_model.retrain.optim.override_optimizer_config",
    }
    assert free_form_keys(REWARD_MODEL.schema) == ("model.override_config", "optim.override_optimizer_config")
    assert set(free_form_keys(SFT.schema)) == {
        "optim.override_optimizer_config",
        "model.override_config",
        "data.apply_chat_template_kwargs",
    }


@EACH
def test_the_types_hold_for_the_defaults_and_another_model(command):
    """What the groups leave unset, a user sets."""
    path = next(iter(command.chosen))
    config, _ = load_command([f"{path}=Qwen/Qwen3-0.6B", "trainer.dry_run=config"], command)
    assert config.model_path == "Qwen/Qwen3-0.6B"
    assert load_command([], command)[0].has_builtin_model


@pytest.mark.parametrize(("command", "path"), GROUP_FILES)
def test_groups_set_known_keys_only(command, path):
    keys = list(leaves(read(path), command.schema))
    assert keys or path.stem == "grpo", "only the default method changes nothing"
    assert set(keys) <= set(leaf_keys(command.schema))
    assert path.read_text().splitlines()[0] == "# @package _global_"
    assert path.read_text().splitlines()[1].startswith("# ")


@pytest.mark.parametrize("path", [each.values[1] for each in GROUP_FILES])
def test_every_key_of_a_group_has_a_comment_above(path):
    assert uncommented(path.read_text()) == []


@EACH
def test_every_key_has_a_comment_above(command):
    for file in command.files:
        text = file.read_text()
        defaults = re.search(r"^defaults:\n(?:  - .*\n)+", text, re.MULTILINE)
        assert uncommented(text.replace(defaults[0], "") if defaults else text) == [], file


def test_a_key_without_comment_is_seen():
    assert uncommented("a:\n  # said\n  b: 1\n  c: 2\n") == ["c: 2"]


def test_groups_are_found():
    assert set(GRPO.group_options()) == {"model", "data", "cluster", "recipe"}
    assert "qwen3_8b" in GRPO.group_options()["model"]
    judged = ["arithmetic_outcomes", "arithmetic_steps"]
    for command, more in ((REWARD_MODEL, judged), (SFT, [])):
        assert command.group_options() == {"data": ["arithmetic", *more, "files"], "model": ["hf", "tiny"]}


@EACH
def test_the_options_that_are_used_by_themselves_are_there(command):
    options = command.group_options()
    chosen = [*default_options(command.file).items(), *command.chosen.values()]
    assert all(option in options[group] for group, option in chosen)
    assert set(command.chosen) | set(command.needed) <= set(leaf_keys(command.schema))


def test_every_file_belongs_to_a_command():
    folder = Path(GRPO.file).parent
    used = {file for command in COMMANDS for file in command.files} | {each.values[1] for each in GROUP_FILES}
    others = {folder / f"{name}.yaml" for name in ("foreign_keys", "verl_defaults", "engine_arguments")}
    assert {file for file in folder.rglob("*.yaml")} - used == others
