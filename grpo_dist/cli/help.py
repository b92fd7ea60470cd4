"""`grpo-dist help [COMMAND] [KEY]`: what a command does, or what a key means, its default, and which groups set it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from grpo_dist.cli.entry import ENTRIES, overview
from grpo_dist.config.command import AnyCommand, Key, all_keys, default_options, group_lines, set_by_groups
from grpo_dist.config.keys import ELSEWHERE, meant_by, nearest_keys, shown, what_to_write
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import COMMANDS
from grpo_dist.plugins.registry import load_attribute
from grpo_dist.terminal import show

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MOST_EXPLAINED = 3
MOST_NAMED = 12
COMMON = frozenset(
    f"""
    actor_rollout_ref.model.path data.train_files data.val_files data.prompt_key data.answer_key data.prompt_template
    data.max_prompt_length data.max_response_length custom_reward_function.path data.train_batch_size
    {_ROLLOUT}.n {_ACTOR}.ppo_mini_batch_size trainer.total_training_steps trainer.total_epochs trainer.test_freq
    trainer.save_freq {_ACTOR}.optim.lr {_ACTOR}.use_kl_loss {_ACTOR}.kl_loss_coef {_ROLLOUT}.temperature
    actor_rollout_ref.model.lora_rank trainer.max_staleness trainer.n_gpus_per_node trainer.nnodes cluster.colocate
    actor_rollout_ref.model.enable_gradient_checkpointing {_ACTOR}.ppo_micro_batch_size_per_gpu
    {_ROLLOUT}.gpu_memory_utilization {_ROLLOUT}.tensor_model_parallel_size trainer.experiment_name
    trainer.project_name trainer.default_local_dir trainer.logger trainer.dry_run trainer.rehearse
    data.curriculum.enable
    """.split()
)
"""The keys of docs/common_keys.md."""


def main(arguments: Sequence[str]) -> int:
    """Explain a command, or a key of one; the keys are those of `train` where no command is named."""
    words = [word for word in arguments if not word.startswith("-")]
    if words in ([], ["help"]):
        show(overview())
    elif len(words) == 1 and words[0] in ENTRIES:
        return int(load_attribute(ENTRIES[words[0]][0], key="command")(["--help"]))
    else:
        command = words.pop(0) if len(words) > 1 and words[0] in COMMANDS else "train"
        show(explain(" ".join(words), command))
    return 0


def explain(word: str, command: str) -> str:
    """Say what is known of a key, or of the keys that the word may mean."""
    config = COMMANDS[command]
    word = word.lstrip("+~").partition("=")[0]
    if word in config.group_options():
        return "\n".join([f"{word}=OPTION is a group: it changes the defaults", *group_lines(config, word), ""])
    keys = all_keys(config)
    names = [*(meant_by(word, config.schema) or ()), *matches(word, config, keys)]
    names = list(dict.fromkeys(name.partition("=")[0] for name in names))
    lines = []
    if word in ELSEWHERE and word not in keys:
        lines = [f"{word} is no key here; {what_to_write(word, config.schema)}\n"]
    is_here = any(name == word or name.endswith(f".{word}") for name in names)
    others = [] if is_here else [name for name, other in COMMANDS.items() if word in all_keys(other)]
    if (others or not names) and not lines:
        hint = f"see grpo-dist help {others[0]} {word}" if others else f"grpo-dist help {command} lists where keys are"
        raise ConfigError(f"{word}: grpo-dist {command} has no such key, and none that resembles it; {hint}")
    lines += [line for name in names[:MOST_EXPLAINED] for line in _entry(keys[name], config)]
    if more := names[MOST_EXPLAINED:]:
        left = f" and {len(more) - MOST_NAMED} more" if len(more) > MOST_NAMED else ""
        lines += [f"see also {', '.join(more[:MOST_NAMED])}{left}", ""]
    return "\n".join(lines)


def matches(text: str, config: AnyCommand, keys: dict[str, Key]) -> list[str]:
    """The names of the keys that a text may mean, the likeliest first; one, if it is the name of a key.

    Names that end in it come before names with all its words, common keys before others, and comments last.
    """
    if text in keys:
        return [text]
    words = re.findall(r"[^\W_]+", text.lower())
    name = re.sub(r"[\s_-]+", "_", text.lower())
    common_first = sorted(keys, key=lambda key: key not in COMMON)
    ending = [key for key in common_first if key.endswith(f".{name}")]
    parts = {key: re.split(r"[._]", key.lower()) for key in keys}
    named = [key for key in common_first if all(any(p.startswith(word) for p in parts[key]) for word in words)]
    suggestions = ([*ending, *named] if words else []) or nearest_keys(name, config.schema)
    in_comments = [key for key in common_first if text.lower() in keys[key].comment.lower()]
    return list(dict.fromkeys(suggestions)) or in_comments


def _entry(key: Key, config: AnyCommand) -> Iterator[str]:
    default = "none: it must be set" if key.default == "???" else shown(key.default)
    yield key.name
    yield f"  {key.comment}"
    yield f"  default: {default}"
    defaults = default_options(config.file)
    for (group, option), settings in set_by_groups(config).items():
        for setting in settings:
            if setting.name == key.name:
                used = "   (the option that is used where none is chosen)" if defaults[group] == option else ""
                yield f"  {group}={option}: {shown(setting.default)}{used}"
    yield ""
