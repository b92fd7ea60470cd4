"""docs/config.md is what grpo.yaml and the tables say."""

from pathlib import Path

from grpo_dist.config.command import documented_keys
from grpo_dist.config.keys import leaf_keys
from grpo_dist.config.schema_health import RULES, rule_defaults
from grpo_dist.plan.commands import GRPO
from scripts.config_reference import reference

DOCS = Path(__file__).parents[2] / "docs/config.md"


def test_the_page_is_fresh() -> None:
    assert DOCS.read_text() == reference() + "\n", "run: python -m scripts.config_reference > docs/config.md"


def test_every_key_is_there_with_its_comment() -> None:
    keys = {key.name: key for key in documented_keys(GRPO.file, GRPO.schema)}
    of_rules = {f"trainer.health.{rule}.{name}" for rule in RULES for name in rule_defaults(rule)}
    assert sorted({*keys, *of_rules}) == sorted(leaf_keys())
    lines = [f"| `{rule}` | `action={rule_defaults(rule)['action']}`, `steps=" for rule in RULES]
    assert [line for line in lines if line not in reference()] == []
    assert not [name for name, key in keys.items() if not key.comment]
    assert keys["data.train_files"].default == "???"
    assert keys["actor_rollout_ref.actor.clip_ratio_c"].default == 3.0
    assert keys["actor_rollout_ref.actor.clip_ratio_c"].comment.startswith("Dual clip:")
    assert keys["data.apply_chat_template_kwargs"].default == {}


def test_cells_survive_a_table() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| ")]
    assert all(line.replace("\\|", "").count("|") in (3, 4) for line in rows)
