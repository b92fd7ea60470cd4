"""What a run shows on the terminal: progress, and at its end the summary, with who waited for whom."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from grpo_dist.config.schema import RunConfig
from grpo_dist.plan.plan import Plan
from grpo_dist.terminal import as_shown, as_typed
from grpo_dist.tracking import metric_names
from grpo_dist.tracking.metric_names import IDLE, STEP_TIME

_BAR = "{n_fmt}/{total_fmt} |{bar:16}| {desc} [{elapsed}<{remaining}{postfix}]"
_TIMED = {"gen": "timing_s/gen", "update": "timing_s/update_actor"}
_IN_BAR = ("reward", "zero_variance", "loss", "accuracy", "val", "val_clipped", "clipped", "kl", "speed")
_MOST_PARTS = 3  # of the reward
# From these shares on they are shown (docs/metrics.md): responses that are cut off, and groups that teach nothing.
_NOTABLE_CLIPPED, _NOTABLE_ZERO_VARIANCE = 0.1, 0.6


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Shows the progress of a run.

    On a TTY: a bar with steps done, the current phase, elapsed and remaining time, and the latest reward, validation
    accuracy, KL and tokens/s. Elsewhere (`ray job logs`, CI, a pipe): one line per step, with the time that is left if
    the coming steps take as long as those so far. A closed pipe or a lost terminal stops no training.

    `initial_step` is the last one of the checkpoint that is resumed, or 0; `stream` None shows nothing.
    """

    def __init__(self, total_steps: int, initial_step: int, stream: TextIO | None = sys.stderr) -> None:
        self.total_steps = total_steps
        self._initial_step, self._started, self._warming = initial_step, time.monotonic(), 0
        self._stream = stream
        self._latest: dict[str, str] = {}
        self._bar: tqdm | None = None
        if stream is not None and _can_hold_a_bar(stream):
            self._bar = tqdm(
                total=total_steps, initial=initial_step, file=stream, bar_format=_BAR, dynamic_ncols=True, desc="start"
            )

    def phase(self, name: str) -> None:
        """Show the current phase ("generate", "update" ...) in the bar."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.set_description_str(name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step and its metrics; step 0 is the validation before training."""
        if self._bar is None:
            done, left = step - self._initial_step, self.total_steps - step
            line = format_line(step, self.total_steps, metrics)
            if done > 0 and left > 0:  # between the first step and the last
                seconds, steps = time.monotonic() - self._started, max(done - self._warming, 1)
                line += f"  left {format_seconds(seconds / steps * left)}"
            if done == 1:  # the first step compiles: those behind it say more
                self._started, self._warming = time.monotonic(), 1
            self.message(line)
            return
        # Not every step is validated: the last known value stays in the bar.
        pieces = describe(metrics)
        gone = {"clipped", "zero_variance"} | ({"val_clipped"} if "val" in pieces else set())
        self._latest = {key: text for key, text in self._latest.items() if key not in gone} | pieces
        shown = [self._latest[key] for key in _IN_BAR if key in self._latest]
        self._bar.set_postfix_str("  ".join(shown), refresh=False)
        with contextlib.suppress(OSError):
            self._bar.update(step - self._bar.n)
            self._bar.refresh()

    def message(self, text: str) -> None:
        """Print text, above the bar if there is one."""
        if self._stream is None:
            return
        text = as_shown(text, self._stream)
        with contextlib.suppress(OSError):
            if self._bar is not None:
                self._bar.write(text, file=self._stream)
            else:
                self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Stop the bar and leave it on the screen; a second call does nothing."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()
            self._bar = None

    def __exit__(self, *_: object) -> None:
        self.close()


def _can_hold_a_bar(stream: TextIO) -> bool:
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return False
    try:
        # Terminals of `script`, containers or job runners may have size 0, where tqdm draws nothing.
        return all(os.get_terminal_size(stream.fileno()))
    except (OSError, ValueError):  # no file descriptor, but isatty() was true
        return True


def describe(metrics: Mapping[str, float]) -> dict[str, str]:
    """The parts of a step's line, by name, in order; only those in `metrics`.

    They are reward, zero_variance, kl, loss, accuracy, val, val_clipped, length, clipped, speed and time. Shares of
    responses that are cut off and of groups whose responses all score the same are only there where they matter.

    `kl` is the KL to the reference (`actor/kl_loss`); without a KL loss it is the KL to the policy before the update
    (`actor/ppo_kl`), labelled `ppo_kl`.
    """
    pieces: dict[str, str] = {}
    if metric_names.REWARD in metrics:
        told = [f"{name} {value:.3g}" for name, value in metric_names.reward_parts(metrics).items()][:_MOST_PARTS]
        behind = f" ({', '.join(told)})" if told else ""
        pieces["reward"] = f"reward {metrics[metric_names.REWARD]:.3g}{behind}"
    pieces |= _notable("zero_variance", metrics.get(metric_names.ZERO_VARIANCE, 0.0), _NOTABLE_ZERO_VARIANCE)
    if metric_names.KL_LOSS in metrics:
        pieces["kl"] = f"kl {metrics[metric_names.KL_LOSS]:.2g}"
    elif metric_names.PPO_KL in metrics:
        pieces["kl"] = f"ppo_kl {metrics[metric_names.PPO_KL]:.2g}"
    for label, names in metric_names.SUPERVISED.items():
        for name in names:
            if name in metrics:
                pieces[label] = f"{label} {metrics[name]:.3g}"
    if (accuracy := metric_names.validation_accuracy(metrics)) is not None:
        pieces["val"] = f"val {accuracy:.3g}"
    pieces |= _notable("val_clipped", metric_names.validation_clipped(metrics), _NOTABLE_CLIPPED)
    if metric_names.RESPONSE_LENGTH in metrics:
        pieces["length"] = f"length {metrics[metric_names.RESPONSE_LENGTH]:.1f}"
    pieces |= _notable("clipped", metrics.get(metric_names.CLIPPED, 0.0), _NOTABLE_CLIPPED)
    if metric_names.THROUGHPUT in metrics:
        pieces["speed"] = f"{metrics[metric_names.THROUGHPUT]:.0f} tok/s"
    if metric_names.STEP_TIME in metrics:
        parts = ", ".join(f"{label} {metrics[key]:.1f}" for label, key in _TIMED.items() if key in metrics)
        pieces["time"] = f"{metrics[metric_names.STEP_TIME]:.1f} s" + (f" ({parts})" if parts else "")
    return pieces


def _notable(name: str, share: float, limit: float) -> dict[str, str]:
    label = {"zero_variance": "zero-variance", "val_clipped": "val clipped"}.get(name, name)
    return {name: f"{label} {share:.0%}"} if share > limit else {}


def format_line(step: int, total_steps: int, metrics: Mapping[str, float]) -> str:
    """One line per step: `step 3/40  reward 0.41  kl 0.0012  val 0.35  length 31.2  1834 tok/s  4.1 s (gen 1.9)`."""
    head = f"step {step}/{total_steps}{' (before training)' if step == 0 else ''}"
    return "  ".join((head, *describe(metrics).values()))


# --- the summary --------------------------------------------------------------------------------------------------
_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARKLINE_WIDTH = 40
_LABEL_WIDTH = 22
# Time outside of all phases, or overlap of phases, is shown from this share of the step on.
_NOTABLE_SHARE = 0.005

Row = Mapping[str, float]


def format_summary(
    history: Sequence[Row],
    *,
    run_dir: Path,
    first_step: int = 0,
    seconds: float,
    why: str,
    hf_model: Path | None,
    flags: Mapping[str, str],
    job: Plan[RunConfig] | None,
) -> str:
    """The summary: results, time per phase, and where the files are.

    Args:
        history: one row per step, with "step" and metrics under verl's names (`jsonl.read_metrics`).
        first_step: of this process; those before were trained before it resumed.
        seconds: wall time of this run, start-up included.
        why: it ended before its last step; "": it did not.
        hf_model: folder of the exported policy; None if there is none.
        flags: the commands that can use the model, by name: text to put behind them.
        job: the run's plan; None: it has one role, which waits for no other.
    """
    trained = [row for row in history if metric_names.STEP_TIME in row or metric_names.REWARD in row]
    steps = f"{len(trained)} training step{'' if len(trained) == 1 else 's'}"
    now = sum(row["step"] >= first_step for row in trained)
    when = f"{f', the last {now} of them' if now < len(trained) else ''} in {format_seconds(seconds)}"
    lines = [f"Run finished: {steps}{when}{f'; {why}' if why else ''}"]
    lines += [*_validation_lines(history), *_training_lines(trained), *_equal_lines(trained), *_timing_lines(trained)]
    if job is not None and (sentence := who_waited(trained, job)):
        lines.append(f"  {sentence}")
    lines.append(_entry("metrics", str(run_dir / "metrics.jsonl")))
    if hf_model is not None:
        lines.append(_entry("model (Hugging Face)", str(hf_model)))
    if (events := run_dir / "tensorboard").is_dir():
        lines.append(_entry("curves", f"{as_typed('tensorboard')} --logdir {shlex.quote(str(events))}"))
    folder, program = shlex.quote(str(run_dir)), as_typed("grpo-dist")
    if history:
        lines.append(_entry("look at it", f"{program} report {folder}"))
    if hf_model is not None and any(metric_names.REWARD in row for row in trained):
        commands = {"eval": ("compare it", " --base"), "generate": ("chat with it", ""), "serve": ("serve it", "")}
        for name, (label, rest) in commands.items():
            if name in flags:
                lines.append(_entry(label, f"{program} {name} {folder}{rest}{flags[name]}"))
    return "\n".join(lines)


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve of at most `width` block characters, each the mean of consecutive values.

    The lowest mean is the lowest block and the highest mean the full block. Non-finite values are ignored; a character
    without any finite value is a space.
    """
    count = min(width, len(values))
    bounds = [round(index * len(values) / count) for index in range(count + 1)] if count else []
    parts = ([value for value in values[start:end] if math.isfinite(value)] for start, end in pairwise(bounds))
    means = [sum(part) / len(part) if part else None for part in parts]
    finite = [value for value in means if value is not None]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(_BLOCKS) - 1
    return "".join(
        " " if value is None else _BLOCKS[round((value - low) / span * top) if span > 0 else 0] for value in means
    )


def format_seconds(seconds: float) -> str:
    """Format a duration: `8.3 s`, `3 min 12 s` or `2 h 05 min`."""
    if seconds < 60 or not math.isfinite(seconds):
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _validation_lines(history: Sequence[Row]) -> list[str]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in history:
        for name, value in metric_names.validation_metrics(row).items():
            curves.setdefault(name, []).append((int(row["step"]), value))
    lines = []
    for name, curve in curves.items():
        kind = "loss" if metric_names.is_loss(name) else "accuracy" if "/acc" in name else "reward"
        label = f"validation {kind}" if len(curves) == 1 else name.removeprefix(metric_names.VALIDATION)
        sign = -1 if metric_names.is_loss(name) else 1
        best_step, best = max(curve, key=lambda point: -math.inf if math.isnan(point[1]) else sign * point[1])
        change = f" -> {curve[-1][1]:.3g}  (best {best:.3g} at step {best_step})" if len(curve) > 1 else ""
        lines.append(_entry(label, f"{curve[0][1]:.3g}{change}"))
    return lines


def _training_lines(trained: Sequence[Row]) -> list[str]:
    lines = []
    shown = {"reward": (metric_names.REWARD,), "response length": (metric_names.RESPONSE_LENGTH,)}
    for label, names in (shown | metric_names.SUPERVISED).items():
        values = [row[name] for row in trained for name in names if name in row]
        if values:
            drawn = label != "response length" and len(values) > 1
            curve = f"  {sparkline(values, _SPARKLINE_WIDTH)}" if drawn else ""
            lines.append(_entry(label, f"{values[0]:.3g} -> {values[-1]:.3g}{curve}"))
        if label == "reward":
            lines += _part_lines(trained)
    timed = [row for row in trained if metric_names.THROUGHPUT in row and metric_names.STEP_TIME in row]
    total = sum(row[metric_names.STEP_TIME] for row in timed)
    if total > 0:
        # Weighted by time: all tokens over all seconds, not a mean of rates.
        tokens = sum(row[metric_names.THROUGHPUT] * row[metric_names.STEP_TIME] for row in timed)
        lines.append(_entry("tokens/s", f"{tokens / total:.0f}"))
    return lines


def _part_lines(trained: Sequence[Row]) -> list[str]:
    """The parts of the reward; and which of them stood still while the whole rose."""
    curves: dict[str, list[float]] = {}
    for row in trained:
        for name, value in metric_names.reward_parts(row).items():
            curves.setdefault(name, []).append(value)
    lines = [_entry(f"  {name}", f"{curve[0]:.3g} -> {curve[-1]:.3g}") for name, curve in curves.items()]
    rewards = [row[metric_names.REWARD] for row in trained if metric_names.REWARD in row]
    still = [f"{name} at {curve[-1]:.3g}" for name, curve in curves.items() if len(curve) > 1 and len({*curve}) == 1]
    if len(rewards) > 1 and rewards[-1] > rewards[0] and still and len(still) < len(curves):
        lines.append(f"  the reward rose by its other parts alone: {', '.join(still)} has not moved")
    return lines


def _equal_lines(trained: Sequence[Row]) -> list[str]:
    """Tell where there was nothing to learn from."""
    shares = [row[metric_names.ZERO_VARIANCE] for row in trained if metric_names.ZERO_VARIANCE in row]
    if not shares or statistics.median(shares) < NOTHING_TO_LEARN:
        return []
    return [
        f"  in {statistics.mean(shares):.0%} of the groups all responses scored the same, which trains nothing: "
        "prompts that it answers rightly now and then, a larger rollout.n, or a reward for partial success would help"
    ]


def _timing_lines(trained: Sequence[Row]) -> list[str]:
    timed = [row for row in trained if metric_names.STEP_TIME in row]
    total = sum(row[metric_names.STEP_TIME] for row in timed)
    if total <= 0:
        return []
    sums: dict[str, float] = {}
    for row in timed:
        for name, value in row.items():
            if name.startswith(metric_names.TIMING) and name != metric_names.STEP_TIME:
                phase = name.removeprefix(metric_names.TIMING)
                sums[phase] = sums.get(phase, 0.0) + value
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    rest = total - sum(seconds for phase, seconds in sums.items() if phase not in metric_names.BESIDE_STEPS)
    if ordered and rest / total > _NOTABLE_SHARE:
        ordered.append(("other", rest))
    rows = [
        f"    {phase:<{_LABEL_WIDTH - 2}}{value / len(timed):>8.2f} s{value / total:>7.0%}"
        for phase, value in [*ordered, ("step", total)]
    ]
    overlap = "; their sum is more, since phases overlap" if rest / total < -_NOTABLE_SHARE else ""
    return [f"  time per step (mean of {len(timed)}{overlap})", *rows]


def _entry(label: str, value: str) -> str:
    return f"  {label:<{_LABEL_WIDTH}}{value}" if len(label) < _LABEL_WIDTH else f"  {label}  {value}"


WARM_UP = 2  # steps with compilation and first allocations, which are not judged
NOTHING_TO_LEARN = 0.9  # from this share of groups with equal scores on
NOTABLE = 0.2  # from this share on a role waits, and from this difference on a split is uneven


def who_waited(rows: Sequence[Mapping[str, float]], plan: Plan[RunConfig]) -> str:
    """Return one sentence: the idle shares from the third step on, and what would shorten the step.

    GPUs of the actor are idle while none of the roles that share them computes. "" with less than three measured steps.
    """
    timed = [row for row in rows if row.get(STEP_TIME, 0.0) > 0 and f"{IDLE}actor" in row and f"{IDLE}rollout" in row]
    judged = timed[WARM_UP:]
    if not judged:
        return ""
    place = plan.place
    seconds = sum(row[STEP_TIME] for row in judged)
    idle = {
        role: sum(row[IDLE + role] * row[STEP_TIME] for row in judged) / seconds
        for role in place.world_sizes
        if all(IDLE + role in row for row in judged)
    }
    names = {"actor": "actor ranks", "rollout": "rollout engines"}
    if place.sharing and not place.shares_gpu:
        names["actor"] = f"GPUs of {' and '.join(place.sharing)}"
        busy = sum(1 - idle.pop(role, 1.0) for role in place.sharing)
        idle = {"actor": max(0.0, 1 - busy), **idle}
    shares = ", ".join(f"{names.get(role, f'{role} ranks')} {share:.0%}" for role, share in idle.items())
    start = f"Idle from step {int(judged[0]['step'])} on: {shares} of the time"
    if place.device == "cpu":
        return f"{start}; they share the processor's cores, so no split of them would shorten the step."
    if place.shares_gpu:
        return f"{start}; they take turns on the same GPUs (cluster.colocate=all), so no split would help."
    return f"{start}; {_advice(plan, idle['actor'], idle['rollout'])}."


def _advice(plan: Plan[RunConfig], actor: float, rollout: float) -> str:
    """Return what would shorten the step, for actor and engines on GPUs of their own."""
    place, ahead = plan.place, plan.config.trainer.max_staleness
    if min(actor, rollout) >= NOTABLE:
        return (
            f"both waited for each other: sampling further ahead would shorten the step (trainer.max_staleness={ahead} "
            f"-> {ahead + 1})"
        )
    if abs(actor - rollout) < NOTABLE:
        return "the split of the GPUs is balanced"
    sizes = f"cluster.actor_world_size={place.actor_world_size}, cluster.rollout_world_size={place.rollout_world_size}"
    if rollout > actor:
        fewer = "fewer engines and more" if place.num_engines > 1 else "more GPUs, for more"
        return f"{fewer} actor ranks would shorten the step ({sizes})"
    fewer = "fewer actor ranks and more" if place.actor_world_size > 1 else "more GPUs, for more"
    return f"{fewer} engines would shorten the step ({sizes})"
