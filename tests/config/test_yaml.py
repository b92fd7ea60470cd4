"""grpo.yaml and the groups against the schema: the same keys on both sides, a comment on each."""

import re

import pytest
import yaml

from grpo_dist.config.command import CONFIG_DIR
from grpo_dist.config.grpo import GRPO
from grpo_dist.config.keys import free_form_keys, leaf_keys, section_keys
from grpo_dist.config.schema_health import RULES

ROOT = CONFIG_DIR / "grpo.yaml"
GROUP_FILES = sorted(CONFIG_DIR.glob("*/*.yaml"))


def leaves(tree, prefix=""):
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in free_form_keys():
            yield from leaves(value, f"{key}.")
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


def test_root_and_schema_have_the_same_keys():
    """But the settings of the health rules, whose defaults are in their table."""
    of_rules = {key for key in leaf_keys() if key.startswith(tuple(f"trainer.health.{rule}." for rule in RULES))}
    assert sorted(leaves(read(ROOT))) == sorted(set(leaf_keys()) - of_rules)


def test_there_are_keys_of_all_sections():
    assert len(leaf_keys()) > 80
    assert "actor_rollout_ref.actor.optim" in section_keys()
    assert set(free_form_keys()) == {
        "actor_rollout_ref.model.override_config",
        "critic.model.override_config",
        "actor_rollout_ref.rollout.engine_kwargs.vllm",
        "actor_rollout_ref.rollout.agent.agent_kwargs",
        "data.apply_chat_template_kwargs",
        "custom_reward_function.reward_kwargs",
        "trainer.stage_timeout_s",
    }


@pytest.mark.parametrize("path", GROUP_FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_groups_set_known_keys_only(path):
    keys = list(leaves(read(path)))
    assert keys or path.stem == "grpo", "only the default method changes nothing"
    assert set(keys) <= set(leaf_keys())
    assert path.read_text().splitlines()[0] == "# @package _global_"
    assert path.read_text().splitlines()[1].startswith("# ")


@pytest.mark.parametrize("path", [ROOT, *GROUP_FILES], ids=lambda path: path.stem)
def test_every_key_has_a_comment_above(path):
    assert uncommented(path.read_text().partition("recipe: grpo\n")[2] or path.read_text()) == []


def test_a_key_without_comment_is_seen():
    assert uncommented("a:\n  # said\n  b: 1\n  c: 2\n") == ["c: 2"]


def test_groups_are_found():
    assert set(GRPO.group_options()) == {"model", "data", "cluster", "recipe"}
    assert "qwen3_8b" in GRPO.group_options()["model"]
