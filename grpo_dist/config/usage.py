"""The text of --help."""

from __future__ import annotations

import yaml

from grpo_dist.config.overrides import CONFIG_DIR, group_options

_COMMAND = "python -m grpo_dist.main"
_EXAMPLES = (
    ("train the built-in tiny model on arithmetic, on CPU", "algorithm.adv_estimator=grpo"),
    ("check before you start: the plan, and all that would make a run on this machine fail", "trainer.dry_run=true"),
    ("your model on your data", "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B data.train_files=my.parquet"),
    ("Qwen3-8B on GSM8K with 8 GPUs", "model=qwen3_8b data=gsm8k cluster=node8"),
    ("your reward", "custom_reward_function.path=reward.py custom_reward_function.name=compute_score"),
    ("no KL term, another group size, log to W&B", "actor_rollout_ref.actor.use_kl_loss=false "
     "actor_rollout_ref.rollout.n=16 'trainer.logger=[console,wandb]'"),
)  # fmt: skip


def usage() -> str:
    """The help text: the command, its groups, examples, and where the keys are explained."""
    lines = [f"usage: {_COMMAND} [GROUP=OPTION ...] [KEY=VALUE ...]", ""]
    lines += [
        "Distributed GRPO for language models. Groups change the defaults, and keys change both.",
        "",
    ]
    lines.append("groups (the default is marked *):")
    defaults = _default_options()
    for group, options in group_options().items():
        for option in options:
            mark = "*" if defaults[group] == option else " "
            lines.append(f" {mark} {f'{group}={option}':<22} {first_comment(group, option)}")
    lines += ["", "examples:"]
    for what, overrides in _EXAMPLES:
        lines += [f"  # {what}", f"  {_COMMAND} {overrides}"]
    lines += ["", f"every key, with its meaning and default: {CONFIG_DIR / 'grpo.yaml'}"]
    lines.append("lists are written [a,b], an empty value null, text with = , : [ ] { } as \"key='...'\"")
    return "\n".join(lines)


def _default_options() -> dict[str, str]:
    entries = yaml.safe_load((CONFIG_DIR / "grpo.yaml").read_text(encoding="utf-8"))["defaults"]
    return {group: option for entry in entries if isinstance(entry, dict) for group, option in entry.items()}


def first_comment(group: str, option: str) -> str:
    """The description of a group's option: the first comment of its file."""
    lines = (CONFIG_DIR / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("#").strip() for line in lines if line.startswith("# ") and "@package" not in line)
