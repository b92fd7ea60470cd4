"""docs/config.md, from the comments of the commands' YAML files, the schemas and foreign_keys.yaml.

python -m scripts.config_reference > docs/config.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from grpo_dist.config.command import AnyCommand, Key, default_options, documented_keys, first_comment, set_by_groups
from grpo_dist.config.keys import ELSEWHERE, FOREIGN_KEYS, RENAMED, UNSET_BY_NULL, VALUES, shown
from grpo_dist.config.schema_health import RULES, rule_defaults
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT

_HEAD = """# Config

Every key of `python -m grpo_dist.main`, its default and its meaning: made from `grpo_dist/config/grpo.yaml` by
`python -m scripts.config_reference`. Those of the other commands are [below](#commands-that-train-one-model).
Names and meanings are verl's wherever verl has the key. A run is these defaults, changed by groups (`model=`, `data=`,
`cluster=`, `recipe=`), changed by single keys (`key=value`, `+key=value` or `++key=value`; lists are `[a,b]`, an empty
value is `null`). Of two options of a group the last counts, and two recipes are refused. `trainer.dry_run=config` shows
the result and starts nothing; `true` checks this machine too.

Unknown keys, wrong types, values out of range and keys that contradict each other are reported together, before
anything is started, with exit code 2.
"""
_SUPERVISED = """
## Commands that train one model

`grpo-dist reward-model` ([reward_models.md](reward_models.md#training-one)) and `grpo-dist sft`
([sft.md](sft.md)) have a config of their own, made from `grpo_dist/config/commands/`; keys, groups and messages work in
the same way. These are the keys that both have.
"""
_MIGRATION = """## Coming from verl

A verl script for FSDP and vLLM starts with `verl.trainer.main_ppo` replaced by `grpo_dist.main`, or says which of its
keys to change ([what was tried](from_verl.md)). A key of verl (of 22 August 2026, 1dda039b9) that is none here is taken
at its default there (`grpo_dist/config/verl_defaults.yaml`), which changes nothing; at another value it is refused, but
where a line below says otherwise. What differs:

- Engines have GPUs of their own, and the reference lies beside the actor's ranks, unless `cluster.colocate` says
  otherwise (`all` is verl's way): `cluster.actor_world_size` and `rollout_world_size` split what `trainer.nnodes *
  trainer.n_gpus_per_node` gives, and have sensible defaults.
- Defaults are those of a GRPO script where verl's are those of PPO: `algorithm.adv_estimator=grpo`, `rollout.n=8`,
  `actor.use_kl_loss=true`. What a script sets counts as in verl.
  Without `actor.ppo_mini_batch_size` a batch is one optimizer step (verl: 256 prompts).
- On CPU, and for the built-in model, batches and lengths are smaller unless they are set (see `cluster=cpu` and
  `model=tiny`); with `trainer.n_gpus_per_node` or a `cluster=` with GPUs they are verl's 1,024, 512 and 1,024.
- `trainer.logger` knows console, jsonl, tensorboard, wandb, mlflow, trackio and prometheus. The console is on
  whatever it lists, unless `trainer.console=false` (not a key of verl).
"""


def reference() -> str:
    """The text of docs/config.md."""
    blocks = [_HEAD, _groups(GRPO)]
    for section, table in _tables(list(documented_keys(GRPO.file, GRPO.schema)), "##"):
        blocks.append(table)
        if section == "trainer.health":
            blocks.append(_health_rules())
    blocks += [_MIGRATION, *_foreign(), _SUPERVISED]
    assert SFT.shared is not None
    blocks += [table for _, table in _tables(list(documented_keys(SFT.shared, SFT.schema)), "###")]
    for command in (REWARD_MODEL, SFT):
        own = "Keys of its own, or with another meaning or default.\n"
        blocks += [f"## `grpo-dist {command.name}`\n\n{own}", _groups(command)]
        blocks += [table for _, table in _tables(list(documented_keys(command.file, command.schema)), "###")]
    return "\n".join(blocks)


def _tables(keys: list[Key], heading: str) -> Iterator[tuple[str, str]]:
    """(section, its table) for the sections of these keys."""
    sections: dict[str, list[Key]] = {}
    for key in keys:
        sections.setdefault(key.name.rpartition(".")[0], []).append(key)
    for section, found in sections.items():
        rows = [
            f"| `{key.name.rpartition('.')[2]}` | {_default(key.default)} | {_cell(key.comment)} |" for key in found
        ]
        lines = [f"{heading} `{section}`\n", "| key | default | meaning |", "|---|---|---|", *rows]
        yield section, "\n".join(lines) + "\n"


def _groups(command: AnyCommand) -> str:
    lines = [f"##{'' if command is GRPO else '#'} Groups\n", "| group | what it is | what it sets |", "|---|---|---|"]
    for (group, option), keys in set_by_groups(command).items():
        used = " (used where none is chosen)" if default_options(command.file)[group] == option else ""
        sets = ", ".join(f"`{key.name}={shown(key.default)}`" for key in keys) or "nothing"
        lines.append(f"| `{group}={option}`{used} | {_cell(first_comment(command, group, option))} | {_cell(sets)} |")
    return "\n".join(lines) + "\n"


def _health_rules() -> str:
    lines = ["Settings of each rule, below `trainer.health.RULE`:\n", "| rule | settings and defaults | metric |"]
    lines.append("|---|---|---|")
    for name, rule in RULES.items():
        settings = ", ".join(f"`{key}={shown(value)}`" for key, value in rule_defaults(name).items())
        metrics = " or ".join(f"`{metric}`" for metric in rule.metrics) or "any"
        lines.append(f"| `{name}` | {settings} | {metrics} |")
    return "\n".join(lines) + "\n"


def _foreign() -> Iterator[str]:
    yield "### Renamed\n\n| verl | here |\n|---|---|"
    yield "\n".join(f"| `{old}` | `{new}` |" for old, new in RENAMED.items()) + "\n"
    yield "### Values by another name\n\n| key | verl | here |\n|---|---|---|"
    for key, values in VALUES.items():
        for theirs, own in values.items():
            yield f"| `{key}` | `{theirs}` | {f'`{own}`' if own else 'left out beside others'} |"
    yield f"\n`null` leaves these as they are: {', '.join(f'`{key}`' for key in UNSET_BY_NULL)}.\n"
    yield "### Accepted, without effect\n\nSaid once at the start of a run.\n\n| key | why |\n|---|---|"
    for key, entry in FOREIGN_KEYS.items():
        if not entry.refused:
            taken = f"the value of `{entry.same_as}`" if entry.same_as else " or ".join(entry.only)
            only = f" (other than {taken}: refused)" if taken else ""
            yield f"| `{key}` | {_cell(entry.why)}{only} |"
    yield "\n### Refused\n\n| key | instead |\n|---|---|"
    for key, entry in FOREIGN_KEYS.items():
        if entry.refused:
            yield f"| `{key}` | {_cell(entry.why)} |"
    yield "\n## Names of other libraries\n"
    yield "What a message advises for the last part of a key that is none here.\n\n| there | here |\n|---|---|"
    for name, other in ELSEWHERE.items():
        here = " or ".join(f"`{written}`" for written in other.write)
        yield f"| `{name}` | {_cell('; '.join(filter(None, (here, other.why))))} |"


def _default(value: object) -> str:
    return "required" if value == "???" else f"`{shown(value)}`".replace("|", "\\|").replace("\n", "\\n")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference() + "\n")
