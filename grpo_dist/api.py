"""GRPO called from Python: a script or a notebook, with functions and rows as objects.

    import grpo_dist

    def short(completions, **columns):
        return [-len(text) / 100 for text in completions]

    result = grpo_dist.train("Qwen/Qwen3-0.6B", reward_funcs=[short], train_dataset=[{"prompt": "Name a fruit."}])

The run is that of `python -m grpo_dist.main`: the same checks, workers and files.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from grpo_dist.config.keys import flatten, what_to_write
from grpo_dist.config.load import load_command, run_folder
from grpo_dist.errors import ConfigError, DataError, GrpoDistError, RewardError
from grpo_dist.main import dry_run, push_at_end
from grpo_dist.plan.commands import GRPO
from grpo_dist.plan.text import changed_keys, format_summary
from grpo_dist.plugins.registry import described, function_name, write_function
from grpo_dist.protocol.media import file_of
from grpo_dist.terminal import quiet_libraries
from grpo_dist.tracking.jsonl import METRICS, read_metrics
from grpo_dist.tracking.metric_names import REWARD
from grpo_dist.trainer.record import EXPORTED, say

Rows = str | Path | Iterable[Mapping[str, Any]]
Callback = Callable[[int, dict[str, float]], Any]

_AGENT = "actor_rollout_ref.rollout.agent"
_LOOP, _ENVIRONMENT = f"{_AGENT}.default_agent_loop", f"{_AGENT}.agent_kwargs.environment"


@dataclass(frozen=True)
class TrainingResult:
    """The results of a run.

    Attributes:
        model_path: the trained policy as a Hugging Face folder; None where the config turns it off, and of a dry run.
        metrics: of each step, as in metrics.jsonl, with `step`; 0 is before the first. None of a dry run.
    """

    run_dir: Path
    model_path: Path | None
    metrics: list[dict[str, float]]

    def __repr__(self) -> str:
        rewards = [row[REWARD] for row in self.metrics if REWARD in row]
        steps = f"{len(rewards)} training steps"
        reward = f", reward {rewards[0]:.3g} -> {rewards[-1]:.3g}" if rewards else ""
        return f"TrainingResult: {steps}{reward}\n  run_dir     {self.run_dir}\n  model_path  {self.model_path}"


def train(
    model: str | Path | None = None,
    reward_funcs: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] = (),
    train_dataset: Rows | None = None,
    eval_dataset: Rows | None = None,
    config: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    environment_factory: str | type | None = None,
    rehearse: bool = False,
    **others: Any,
) -> TrainingResult:
    """Train a policy by GRPO, or by whatever the config says, and wait until it is done.

    It may be called in any thread, within a running event loop, and several times in a process, one run after the
    other. Only in the main thread do Ctrl-C and SIGTERM save the run.

    Args:
        model: folder or hub name (`actor_rollout_ref.model.path`), or an option of the config group `model`, such as
            "tiny"; None: what the config says.
        reward_funcs: a reward function or a list, whose scores are added: functions, callable objects, or where they
            are as text (`file.py:function`). In each of the forms of docs/rewards.md. Empty: what the config says.
        train_dataset: rows: dicts, a `datasets.Dataset`, a pandas DataFrame; or what `data.train_files` takes. None:
            what the config says; with a model of your own it must say something.
        eval_dataset: likewise for validation.
        config: keys as on the command line, flat or nested: `{"trainer.total_training_steps": 20, "recipe": "dapo"}`.
            With `trainer.dry_run` the plan is printed and everything is checked, and nothing is trained.
        callbacks: each is called after every training step with its number and metrics. If one returns something
            true, the run ends with this step as with its last.
        environment_factory: a class, or where it is as text (`file.py:Class`): each episode has an object of it, whose
            methods the policy calls (docs/environments.md#a-class). `config` names the model's tool parser,
            `{"actor_rollout_ref.rollout.agent.agent_kwargs": {"tool_parser": "hermes"}}`.
        rehearse: whether the run is rehearsed instead, small and whole, on this machine's CPUs (docs/rehearsal.md).
        others: none is taken; the refusal names what to write in `config`.

    Raises:
        ConfigError: an argument and `config` both set a key, or no rows are given for a model of your own.
        GrpoDistError: of the kinds of errors.py; a ConfigError or DataError before anything starts lists all problems.
        KeyboardInterrupt: the run was interrupted.
    """
    if others or not isinstance(config, Mapping | None):
        hints = [f"{name}: {what_to_write(name)}" for name in others] or [f"config={type(config).__name__}: is no dict"]
        advice = "settings are entries of config={KEY: VALUE} (docs/from_trl.md#arguments)"
        raise ConfigError("\n".join([f"grpo_dist.train: {advice}", *hints]))
    _check_objects(model, environment_factory, callbacks)
    given = dict(config or {}) | ({"trainer.rehearse": True} if rehearse else {})
    is_option = str(model) in GRPO.group_options()["model"] and not Path(str(model)).is_dir()
    model_key = "model" if is_option else "actor_rollout_ref.model.path"
    set_by = {
        "model": (model_key, model),
        "reward_funcs": ("custom_reward_function.path", reward_funcs or None),
        "environment_factory": (_ENVIRONMENT, environment_factory),
        "train_dataset": ("data.train_files", train_dataset),
        "eval_dataset": ("data.val_files", eval_dataset),
    }
    keys_set = {name.lstrip("+") for name, _ in flatten(given)}
    for argument, (key, value) in set_by.items():
        if value is not None and key in keys_set:
            raise ConfigError(f"{argument}=, config={{{key!r}: ...}}: both set {key}; leave one of them out")
    own = "actor_rollout_ref.model.path" in {*keys_set, *([model_key] if model is not None else [])}
    if own and train_dataset is None and not keys_set & {"data", "data.train_files"}:
        raise ConfigError(
            "train_dataset=None: which rows is the model to train on? Give train_dataset=, or say it in config: "
            "{'data.train_files': FILE}, or {'data': OPTION}, of which arithmetic is the built-in sums"
        )
    if model is not None:
        given[model_key] = str(model)
    try:
        folder = run_folder([*given.items()], GRPO)  # and with a typo nothing is written
        given |= _rewards(reward_funcs, folder) | _environment(environment_factory, folder, keys_set)
        for key, rows in (("data.train_files", train_dataset), ("data.val_files", eval_dataset)):
            if rows is not None:
                given[key] = _file(rows, folder, key)
        return _run(given, callbacks)
    except (ConfigError, DataError, RewardError) as error:  # the message is for the caller, not where it was found
        raise error.with_traceback(None) from None


def _check_objects(model: Any, environment_factory: Any, callbacks: Sequence[Any]) -> None:
    if not isinstance(model, str | Path | None):
        what = model.__name__ if isinstance(model, type) else type(model).__name__
        raise ConfigError(
            f"model={what}: a folder, a hub name or an option of the config group model is meant, since the model is "
            "loaded in other processes; write yours with save_pretrained(FOLDER), with its tokenizer, and give FOLDER"
        )
    if not isinstance(environment_factory, str | type | None):
        raise ConfigError(
            f"environment_factory={described(environment_factory)}: a class is meant, of which each episode has an "
            "object; what it needs it opens itself, without arguments"
        )
    for callback in callbacks:
        if not callable(callback):
            raise ConfigError(
                f"callbacks={type(callback).__name__}: a callback is a function of a step's number and metrics that "
                "returns true to end the run with this step; TRL's TrainerCallback is not taken"
            )


def _run(given: Mapping[str, Any], callbacks: Sequence[Callback]) -> TrainingResult:
    quiet_libraries()
    checked, notes = load_command([*given.items()], GRPO)
    run_dir = checked.trainer.record_dir.absolute()
    if checked.trainer.dry_run:
        dry_run(checked, notes, changed_keys(checked, GRPO))
        return TrainingResult(run_dir, None, [])
    if checked.trainer.rehearse:
        from grpo_dist.cli.rehearse import rehearse

        if code := rehearse(checked):
            kind = ConfigError if code == ConfigError.exit_code else GrpoDistError
            raise kind("the rehearsal has failed, as it says above")
        return TrainingResult(run_dir, None, [])
    from grpo_dist.run.run import run  # its imports are slow, so only after the config was checked

    say(checked, format_summary(checked, notes))

    def on_step(step: int, metrics: dict[str, float]) -> bool:
        return any([callback(step, dict(metrics)) for callback in callbacks])  # all are called

    run(checked, on_step)
    push_at_end(checked)
    exported = checked.trainer.export_hf_model and not checked.trainer.val_only
    return TrainingResult(run_dir, run_dir / EXPORTED if exported else None, read_metrics(run_dir / METRICS))


def _rewards(given: str | Callable[..., Any] | Sequence[str | Callable[..., Any]], folder: Path) -> dict[str, Any]:
    """The keys that name these reward functions; objects are written into the run's folder."""
    functions = [given] if isinstance(given, str) or callable(given) else list(given)
    names: list[str] = []
    specs = []
    for function in functions:
        if not isinstance(function, str):
            own = function_name(function)
            numbered = (f"{own}_{number}" for number in itertools.count(2))
            names.append(next(name for name in itertools.chain([own], numbered) if name not in names))
            function = write_function(function, names[-1], folder, "reward_funcs")
        specs.append(function)
    return {"custom_reward_function.path": specs if len(specs) > 1 else specs[0]} if specs else {}


def _environment(given: str | type | None, folder: Path, keys_set: Collection[str]) -> dict[str, Any]:
    """The keys that name a class of environments; a class that is an object is written into the run's folder."""
    if given is None:
        return {}
    named = given if isinstance(given, str) else write_function(given, given.__name__, folder, "environment_factory")
    return ({} if _LOOP in keys_set else {_LOOP: "tool_agent"}) | {_ENVIRONMENT: named}


def _file(rows: Rows, folder: Path, key: str) -> str:
    """Where the rows are: a new file in the run's folder, unless they are in one."""
    if isinstance(rows, str | Path):
        return str(rows)
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # a pandas DataFrame, which iterates over its columns
        rows = rows.to_dict("records")
    if isinstance(rows, Mapping):
        raise DataError(f"{key}: a dict of data sets ({', '.join(map(str, rows))}); give one of them")
    listed = cast(Iterable[Any], rows)
    place, name = folder / "rows", key.removeprefix("data.").removesuffix("_files")
    place.mkdir(parents=True, exist_ok=True)
    temporary, digest = place / f"{name}.tmp", hashlib.sha256()
    with temporary.open("wb") as file:
        for number, row in enumerate(listed):
            try:
                line = (json.dumps(dict(row), default=_plain) + "\n").encode()
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"{key}: row {number} must be a dict of texts, numbers, lists and dicts: {error}"
                ) from None
            file.write(line)
            digest.update(line)
    # Rows of another run in this folder, which is about to refuse these, keep their file.
    path = place / digest.hexdigest()[:12] / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    temporary.replace(path)
    return str(path.absolute())


def _plain(value: Any) -> Any:
    """Numbers and arrays of NumPy, and images, as JSON has them."""
    if (file := file_of(value)) is not None:
        return f"data:;base64,{base64.b64encode(file).decode()}"
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is none of them")
