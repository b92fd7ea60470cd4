"""Formats validation responses for people (`trainer.log_val_generations`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Sample = Mapping[str, Any]
"""step, uid, input, output, gts (the ground truth) and score (None: it could not be scored) of one response, and the
numbers that the reward function has returned besides the score."""

TEXTS = ("uid", "input", "output", "gts", "failure")
"""The fields of a sample that are no numbers; the ground truth may have any type."""

SAMPLES = "val/generations"
"""The name of the samples in trackers, as in verl."""


def format_samples(samples: Sequence[Sample]) -> str:
    """Format samples for the terminal: a header line per response, then prompt and response, indented."""
    lines = []
    for sample in samples:
        shown = {name: _printable(str(sample[name])) for name in ("input", "output", "gts")}
        lines.append(f"validation, step {sample['step']}, {_head(sample, shown['gts'])}")
        for label in ("input", "output"):
            lines.append(f"  {label}:")
            lines += [f"    {line}" for line in shown[label].splitlines()]
    return "\n".join(lines)


def as_markdown(sample: Sample) -> str:
    """Format a sample as Markdown, for TensorBoard; prompt and response are indented code blocks."""
    blocks = [_head(sample, f"`{sample['gts']}`")]
    for label in ("input", "output"):
        blocks += [label, "\n".join(f"    {line}" for line in sample[label].splitlines())]
    return "\n\n".join(blocks) + "\n"


def _head(sample: Sample, truth: str) -> str:
    score = "none" if sample["score"] is None else f"{sample['score']:.3g}"
    return f"{sample['uid']}: score {score}, gts {truth}"


def _printable(text: str) -> str:
    """Replace control characters, so that a response cannot send escape sequences to the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
