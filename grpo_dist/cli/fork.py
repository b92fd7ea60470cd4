"""`grpo-dist fork RUN --step K key=value ...`: a run that goes on from a checkpoint of another one (docs/forks.md)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_dist.assets import expanded
from grpo_dist.cli.arguments import MODEL_ARGUMENTS, add_shared, command_parser
from grpo_dist.config.load import read_command_line, with_later_keys, with_overrides
from grpo_dist.config.run_code import TRAINING, code_of_run, hidden, require_trust
from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import GRPO
from grpo_dist.plan.plan import make_plan
from grpo_dist.plan.text import changed_keys
from grpo_dist.runs import named_checkpoint, no_checkpoint
from grpo_dist.terminal import show
from grpo_dist.tracking.jsonl import METRICS, read_metrics
from grpo_dist.trainer.checkpoint.config_changes import Changes, find_changes, read_config
from grpo_dist.trainer.checkpoint.folder import read_state, step_of
from grpo_dist.trainer.checkpoint.manifest import checkpoint_digest
from grpo_dist.trainer.record import RESOLVED_CONFIG

# What a fork shares less with its run, by keys that have changed (KEY:) or are not the defaults.
_LESS = {
    r"rollout\.n:": "only responses of the same number in a group share their noise",
    r"rollout\.(temperature|top_.|min_p):": "the same noise chooses among other probabilities",
    r"rollout\.(name|engine_kwargs\S*|dtype):": "another engine makes other responses of a seed, or rounds otherwise",
    r"data\.(train|gen)_batch_size:": "only the first step has prompts of both",
    r"(data\.(system|prompt|apply)|rollout\.agent)\S*:": "the same rows are asked in another way",
    r"curriculum\.enable|sampler\.class_path|filter_groups\.enable": "scores decide which prompts are drawn",
    r"staleness|over_sample": "not exact: it matters which response is finished when",
}


def fork_overrides(arguments: Sequence[str]) -> list[Any]:
    """Return the overrides by which a command line of `grpo-dist fork` trains, and say what the fork has of its run."""
    parser = command_parser("fork", "Go on from a checkpoint with another config, on the prompts and seeds of the run.")
    parser.add_argument("run", metavar="RUN", help="folder of the run, which is only read, or a checkpoint in it")
    add_shared(parser, *MODEL_ARGUMENTS[1:])
    options = parser.parse_intermixed_args(arguments)
    if (checkpoint := named_checkpoint(expanded(options.run).absolute(), options.step)) is None:
        raise ConfigError(no_checkpoint(expanded(options.run), options.step))
    line, saved = read_command_line(options.overrides, GRPO), dict(read_config(checkpoint))
    if line.groups or "actor_rollout_ref" not in saved:
        raise ConfigError(f"{checkpoint}: only runs of grpo-dist train are forked, by KEY=VALUE, not by groups")
    given, config = (with_overrides(each, options.overrides, GRPO) for each in ({}, saved))
    if not options.trust:  # before the rules, which load the engine's class
        require_trust(checkpoint / RESOLVED_CONFIG, code_of_run(config, TRAINING, given))
    changes = find_changes(checkpoint, config)
    if wrong := "; ".join(changes.refused) or hidden(checkpoint / RESOLVED_CONFIG, config, ("",), given):
        raise ConfigError(f"{checkpoint} cannot be forked like this: {wrong}")
    place = _place(checkpoint, line.values)
    show(_told(checkpoint, place["trainer.default_local_dir"], config, changes))
    return [*with_later_keys(saved, GRPO).items(), *place.items(), *options.overrides]


def _place(checkpoint: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The fork's own name and folder, and where it starts: at the run's checkpoint, or at its own last one."""
    others = ("trainer.", "ray_kwargs.")
    parts = (f"-{key.split('.')[-1]}={value}" for key, value in given.items() if not key.startswith(others))
    own = re.sub(r"[^\w.=-]+", "-", f"{checkpoint.parent.name}-fork-{step_of(checkpoint)}{''.join(parts)}")
    name = given.get("trainer.experiment_name", own)
    folder = Path(given.get("trainer.default_local_dir", checkpoint.parent.with_name(name)))
    rows, last = read_metrics(folder / METRICS) if (folder / METRICS).exists() else [], named_checkpoint(folder, None)
    # a fork of a later step has the digest, too
    begun = last is not None and checkpoint_digest(checkpoint) in read_state(last).history
    goes_on = begun and [row["step"] for row in rows[:1]] == [step_of(checkpoint) + 1]
    if (last or rows) and not goes_on:
        raise ConfigError(f"{folder}: another run is there, or a fork without checkpoint; set trainer.experiment_name")
    return {
        "trainer.experiment_name": name,
        "trainer.default_local_dir": str(folder),
        "trainer.push_to_hub": None,
        "trainer.resume_mode": "auto" if goes_on else "resume_path",
        "trainer.resume_from_path": None if goes_on else str(checkpoint),
    }


def _told(checkpoint: Path, folder: str, config: RunConfig, changes: Changes) -> str:
    changed, seeded = [*changes.experiment, *changes.shown], make_plan(config).sampling.seed is not None
    seeds = "the noise that chooses tokens" if seeded else "no seeds: actor_rollout_ref.rollout.deterministic=false"
    keys = "\n".join([*changed, *changed_keys(config, GRPO)])
    less = [text for key, text in _LESS.items() if re.search(key, keys)]
    compare = f"compare: {shlex.join(['grpo-dist', 'report', str(checkpoint.parent), '--compare', folder])}\n"
    return "\n  ".join([f"fork of {checkpoint}", *changed, f"shared: prompts, and {seeds}", *less, compare])
