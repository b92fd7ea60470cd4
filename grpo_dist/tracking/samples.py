"""Formats validation responses for people (`trainer.log_val_generations`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from grpo_dist.terminal import printable

Sample = Mapping[str, Any]
"""step, uid, input, output, gts (the ground truth) and score (None: it could not be scored) of one response, and the
numbers that the reward function has returned besides the score."""

SAMPLES = "val/generations"
"""The name of the samples in trackers, as in verl."""


def format_samples(samples: Sequence[Sample]) -> str:
    """Format samples for the terminal: a header line per response, then prompt and response, indented."""
    lines = []
    for sample in samples:
        lines.append(f"validation, step {sample['step']}, {_head(sample, sample['gts'])}")
        for label in ("input", "output"):
            lines += [f"  {label}:", *(f"    {line}" for line in sample[label].splitlines())]
    return printable("\n".join(lines))


def as_markdown(sample: Sample) -> str:
    """Format a sample as Markdown, for TensorBoard; prompt and response are indented code blocks."""
    blocks = [_head(sample, f"`{sample['gts']}`")]
    for label in ("input", "output"):
        blocks += [label, "\n".join(f"    {line}" for line in sample[label].splitlines())]
    return "\n\n".join(blocks) + "\n"


def as_rows(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The samples as rows of a table, all with the same columns; what is neither number nor text becomes text."""
    columns = dict.fromkeys(name for sample in samples for name in sample)
    return [{name: _cell(sample.get(name)) for name in columns} for sample in samples]


def as_html(samples: Sequence[Sample]) -> str:
    """Format samples as an HTML table with a row for each; what a model has written stays text."""
    columns = dict.fromkeys(name for sample in samples for name in sample)
    rows = ["".join(f"<th>{escape(name)}</th>" for name in columns)]
    rows += ["".join(f"<td>{escape(str(s.get(name, '')))}</td>" for name in columns) for s in samples]
    style = "<style>td {white-space: pre-wrap; vertical-align: top; border-top: 1px solid}</style>"
    return f"{style}<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _head(sample: Sample, truth: str) -> str:
    score = "none" if sample["score"] is None else f"{sample['score']:.3g}"
    return f"{sample['uid']}: score {score}, gts {truth}"
