"""Progress on the terminal: a bar on a TTY, one line per step elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

from grpo_dist.terminal import as_shown
from grpo_dist.tracking import metric_names
from grpo_dist.tracking.summary import format_seconds

_BAR = "{n_fmt}/{total_fmt} |{bar:16}| {desc} [{elapsed}<{remaining}{postfix}]"
_TIMED = {"gen": "timing_s/gen", "update": "timing_s/update_actor"}
_IN_BAR = ("reward", "zero_variance", "loss", "accuracy", "val", "val_clipped", "clipped", "kl", "speed")
_MOST_PARTS = 3  # of the reward
# From these shares on they are shown (docs/metrics.md): responses that are cut off, and groups that teach nothing.
_NOTABLE_CLIPPED, _NOTABLE_ZERO_VARIANCE = 0.1, 0.6


class Progress:
    """Shows the progress of a run.

    On a TTY: a bar with steps done, the current phase, elapsed and remaining time, and the latest reward,
    validation accuracy, KL and tokens/s. Elsewhere (`ray job logs`, CI, a pipe): one line per step, with the time that
    is left if the coming steps take as long as those so far. A closed pipe (`2>&1 | head`), or a terminal that is lost,
    stops no training.

    Args:
        initial_step: last step of the checkpoint that this run resumes from; 0 for a fresh start.
        stream: where to write; None: show nothing (`trainer.console=false`).
    """

    def __init__(self, total_steps: int, initial_step: int, stream: TextIO | None = sys.stderr) -> None:
        self.total_steps = total_steps
        self._initial_step, self._started = initial_step, time.monotonic()
        self._stream = stream
        self._latest: dict[str, str] = {}
        self._bar: tqdm | None = None
        if stream is not None and _can_hold_a_bar(stream):
            self._bar = tqdm(
                total=total_steps,
                initial=initial_step,
                file=stream,
                bar_format=_BAR,
                dynamic_ncols=True,
                desc="start",
            )

    def phase(self, name: str) -> None:
        """Show the current phase ("generate", "update" ...) in the bar."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.set_description_str(name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step and its metrics; step 0 is the validation before training."""
        if self._bar is None:
            self.message("  ".join((format_line(step, self.total_steps, metrics), *self._left(step))))
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

    def _left(self, step: int) -> list[str]:
        """The time that is left, between the first step and the last."""
        done = step - self._initial_step
        if done <= 0 or step >= self.total_steps:
            return []
        seconds = (time.monotonic() - self._started) / done * (self.total_steps - step)
        return [f"left {format_seconds(seconds)}"]

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

    def __enter__(self) -> Progress:
        return self

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
    accuracy = metric_names.validation_accuracy(metrics)
    if accuracy is not None:
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
