"""`grpo-dist eval RUN_OR_MODEL ...`: models compared on rows with a reward function, with confidence intervals.

The rows are asked and scored as in a run's validation, so a run's own figures come out again (exactly in fp32 and with
the same engine). The first model says what is asked, and how: its run's validation rows, sampling and reward function.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from grpo_dist.algorithms.validation import interval, judged, normal_interval, pred_ids, statistics
from grpo_dist.assets import expanded
from grpo_dist.assets.model_folder import ADAPTER_FOLDER
from grpo_dist.checks.own_answers import scorer_alone
from grpo_dist.cli.arguments import SAMPLING_ARGUMENTS, add_shared, check_output, command_parser
from grpo_dist.cli.trained import AGENT_KEY, Answers, Asker, TrainedModel, asking, base_of, find_trained, sampling_of
from grpo_dist.config.run_code import FLAG
from grpo_dist.data.prompts import Prompt
from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.rewards.contract import Failure, RewardResult
from grpo_dist.rewards.scorer import Scorer
from grpo_dist.terminal import columns, json_line, show
from grpo_dist.trainer.checkpoint.folder import others, own_checkpoints
from grpo_dist.trainer.run_prompts import read_prompts

NOTHING = RewardResult(np.nan, {})  # what a function that failed has said


@dataclass(frozen=True)
class Figures:
    """The results of a model on the rows of one data source.

    Attributes:
        variable: what was measured: `acc` if the reward function returns it, else `reward`.
        rows: which prompts, by their positions in the files.
        values: by statistic, a number for each prompt: mean@n, pass@k (best@k where values are not 0 and 1), maj@n.
        means: of all responses: tokens, the share that was cut off, and of those that could not be scored.
    """

    model: str
    source: str
    variable: str
    rows: np.ndarray
    values: dict[str, np.ndarray]
    means: dict[str, float]


def main(arguments: Sequence[str]) -> int:
    """Evaluate and print."""
    options = _parser().parse_intermixed_args(arguments)
    overrides = [name for name in options.named if "=" in name]
    check_output(options.output)
    with contextlib.ExitStack() as stack:
        names = [name for name in options.named if "=" not in name]
        models = list(_models(names, overrides, options, stack))
        if not models:
            places = "a run (trainer.default_local_dir), a checkpoint, a model folder or hub name"
            raise ConfigError(f"no model: name {places}")
        first, sampling = models[0], sampling_of(models[0], options)
        if first.unscored:
            raise ConfigError(first.unscored)
        scorer = stack.enter_context(scorer_alone(first.config))
        prompts = _rows(first, options, scorer)
        file: TextIO | None = None
        if options.output is not None:
            file = stack.enter_context(expanded(options.output).open("x", encoding="utf-8"))
        reached: list[Figures] = []
        for model in models:
            if model.usage.step is None and model.base is None:  # of no run: asked as the first one
                model = replace(model, usage=first.usage)
            limits = None if options.data else first.config.data  # the first one's rows, as its run asks them
            opened = asking(model, sampling, options.max_model_len, limits)
            answers = asyncio.run(_answers(opened, prompts, scorer))
            reached += figures(model.name, answers)
            if file is not None:
                _write(file, model.name, answers)
    table = compared(reached)
    how = "greedy" if sampling.temperature == 0.0 else f"temperature {sampling.temperature:g}"
    title = f"{len(prompts)} rows with n={sampling.n}, {how}; in brackets 95 % confidence intervals\n"
    show(json.dumps(table, indent=2) + "\n" if options.json else title + _text(table))
    return 0


def figures(model: str, answers: Sequence[Answers]) -> Iterator[Figures]:
    """The figures of each data source, in the order of its first row."""
    for source in dict.fromkeys(answer.prompt.data_source for answer in answers):
        of_source = [answer for answer in answers if answer.prompt.data_source == source]
        said = [result for answer in of_source for result in answer.results]
        failures = [result.text for result in said if isinstance(result, Failure)]
        if len(failures) == len(said):
            raise RewardError(f"the reward function failed on all responses to the rows of {source}: {failures[0]}")
        results = [NOTHING if isinstance(result, Failure) else result for result in said]
        failed, scores = np.array([result is NOTHING for result in results]), [result.score for result in results]
        columns = {
            part: np.array([result.extra.get(part, np.nan) for result in results])
            for part in dict.fromkeys(part for result in results for part in result.extra)
        }
        variables = judged(np.array(scores), failed, columns.pop("acc", None))
        name = "acc" if "acc" in variables else "reward"
        votes = pred_ids([result.pred for result in results])
        measured = _shown(statistics(variables[name].reshape(len(of_source), -1), votes))
        responses = [response for answer in of_source for response in answer.responses]
        means = {part: float(np.nanmean(values)) for part, values in columns.items()}
        means |= {
            "tokens": float(np.mean([len(response.token_ids) for response in responses])),
            "cut off": float(np.mean([response.truncated for response in responses])),
        }
        means |= {"not scored": float(failed.mean())} if failures else {}
        yield Figures(model, source, name, np.array([answer.prompt.index for answer in of_source]), measured, means)


def compared(reached: Sequence[Figures]) -> list[dict[str, Any]]:
    """Rows of the table: each model's means with their intervals, and what separates it from the first one.

    The difference is that of the same prompts, so that the prompts' own difficulty is not in its interval.
    """
    table: list[dict[str, Any]] = []
    for source in dict.fromkeys(result.source for result in reached):
        of_source = [result for result in reached if result.source == source]
        first = of_source[0]
        for result in of_source:
            row: dict[str, Any] = {"source": source, "model": result.model, "prompts": len(result.rows)}
            row |= {f"{result.variable} {name}": _with(interval, values) for name, values in result.values.items()}
            both, mine, theirs = np.intersect1d(result.rows, first.rows, return_indices=True)
            if result is not first and result.variable == first.variable and len(both):
                name = next(iter(result.values))
                row[f"{name} - first"] = _with(normal_interval, result.values[name][mine] - first.values[name][theirs])
            table.append(row | result.means)
    return table


def _models(
    names: Sequence[str], overrides: Sequence[str], options: argparse.Namespace, stack: contextlib.ExitStack
) -> Iterator[TrainedModel]:
    """The models that are named; with --base that of the first run before them, with --all-steps each checkpoint."""
    base = options.base
    for name in names:
        chosen = [name]
        if options.all_steps:
            own = own_checkpoints(expanded(name)) if options.step is None else {}
            chosen = [str(path) for path in own.values()]
            if not chosen:
                raise ConfigError(f"--all-steps: {name} has no checkpoints; name a run's folder, and no --step")
            if left := others(expanded(name)):
                show(f"{name}: {len(chosen)} checkpoints{left}\n", sys.stderr)
        for place in chosen:
            before = set(Path(place).parent.iterdir()) if options.all_steps else set()
            model = find_trained(place, overrides, options.step, trust=options.trust)
            if options.all_steps and model.folder not in before:  # many copies of a model are not to be left
                for folder in (model.folder, model.folder.with_name(f"{model.folder.name}_{ADAPTER_FOLDER}")):
                    stack.callback(shutil.rmtree, folder, ignore_errors=True)
            if base:
                yield base_of(model)
            base = False
            yield model


def _rows(model: TrainedModel, options: argparse.Namespace, scorer: Scorer) -> list[Prompt]:
    config = model.config
    if options.data:
        return read_prompts(config, "--data", options.data, options.limit, scorer.needs)
    if not config.data.val_files:
        raise ConfigError(f"no rows: the run of {model.name} has no data.val_files; give --data FILE")
    if not (agent := config.actor_rollout_ref.rollout.agent).is_single_turn:
        show(
            f"{AGENT_KEY}={agent.default_agent_loop} is not asked: where it put tools into the run's prompts, they are "
            "shorter here, and data.max_prompt_length may leave out or cut fewer of them\n",
            sys.stderr,
        )
    limit = config.data.val_max_samples if options.limit < 0 else options.limit
    return read_prompts(config, "data.val_files", config.data.val_files, limit, scorer.needs)


async def _answers(
    opened: contextlib.AbstractAsyncContextManager[Asker], prompts: Sequence[Prompt], scorer: Scorer
) -> list[Answers]:
    async with opened as asker:
        return [answers async for answers in asker.answers(prompts, scorer)]


def _shown(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of validation's statistics those that the table has, (P,) each; best@k of zeros and ones is pass@k."""
    exact = all(np.isin(value, (0.0, 1.0)).all() for name, value in values.items() if name.startswith("mean@"))
    shown = {name: value for name, value in values.items() if not name.startswith(("std@", "worst@"))}
    rename = "pass@" if exact else "best@"
    return {name.replace("best@", rename): value.reshape(len(value), -1).mean(1) for name, value in shown.items()}


def _with(interval_of: Callable[[np.ndarray], tuple[float, float]], values: np.ndarray) -> list[float]:
    return [float(np.mean(values)), *interval_of(values)]


def _write(file: TextIO, model: str, answers: Sequence[Answers]) -> None:
    for each in answers:
        row = {"model": model, "row": each.prompt.location, "prompt": each.prompt.messages}
        file.write(json_line(row | {"responses": each.texts, "scores": each.scores}))
    file.flush()


def _text(table: Sequence[dict[str, Any]]) -> str:
    lines = []
    for source in dict.fromkeys(row["source"] for row in table):
        rows = [row for row in table if row["source"] == source]
        names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "source"]
        cells: list[list[str]] = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
        lines += ["", source, *columns(cells)]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "{:.3f} [{:.3f}, {:.3f}]".format(*value)
    return f"{value:.3f}" if isinstance(value, float) else "" if value is None else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "eval",
        "Compare models on rows that a reward function scores: runs, checkpoints and model folders. The "
        "first one says which rows, how they are sampled, and what scores them, as its run validates.",
    )
    named = "runs' folders, checkpoints, model folders, hub names or builtin:NAME; and keys of the config to change"
    parser.add_argument("named", nargs="+", metavar="RUN_OR_MODEL | key=value", help=named)
    data = (
        "a file of rows, in the forms of data.val_files, may be repeated, asked whole; default: the first run's "
        "validation rows, within its data.max_prompt_length"
    )
    parser.add_argument("--data", action="append", default=[], metavar="FILE", help=data)
    parser.add_argument("--limit", type=int, default=-1, help="take the first so many rows")
    parser.add_argument("--base", action="store_true", help="begin with the model that the first run began with")
    add_shared(parser, "--step")
    parser.add_argument("--all-steps", action="store_true", help="every checkpoint of the runs, as a curve")
    parser.add_argument("--output", metavar="FILE", help="write all responses and scores as JSON lines")
    parser.add_argument("--json", action="store_true", help="print the table as JSON: numbers with their intervals")
    add_shared(parser, "--n", *SAMPLING_ARGUMENTS, FLAG)
    return parser
