"""The contract of a tracker, the trackers that there are, starting those of a run, and logging to all of them."""

from __future__ import annotations

import contextlib
import importlib
import logging
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from grpo_dist.errors import BatchError, ConfigError
from grpo_dist.plugins.registry import load_attribute, traceback_tail
from grpo_dist.redact import redact, redact_text
from grpo_dist.terminal import printable

TRACKER_IS_OFF = "is off for the rest of the run"

logger = logging.getLogger(__name__)

KEY = "trainer.logger"

TRACKERS = {
    "jsonl": "grpo_dist.tracking.jsonl:JsonlTracker",
    "tensorboard": "grpo_dist.tracking.tensorboard:TensorBoardTracker",
    "wandb": "grpo_dist.tracking.wandb:WandbTracker",
    "mlflow": "grpo_dist.tracking.mlflow:MlflowTracker",
    "trackio": "grpo_dist.tracking.trackio:TrackioTracker",
    "prometheus": "grpo_dist.trainer.record:PrometheusTracker",
}
"""The built-in values of `trainer.logger` -> class, which is imported on demand. Others are `path/to/file.py:Class`."""

ALWAYS_ON = "jsonl"
CONSOLE = "console"
"""A value of `trainer.logger` that is not a tracker: `trainer.console` decides about it (`summary.Progress`)."""

EXTRAS = ("mlflow", "trackio")
"""Trackers whose package comes with the extra of their name."""

RUN_ID = "run_id"
"""File in the folder `run_dir/TRACKER` with what a tracker calls the run; see `RunInfo.store_id`."""

Sample = Mapping[str, Any]
"""step, uid, input, output, gts (the ground truth) and score (None: it could not be scored) of one response, and the
numbers that the reward function has returned besides the score."""

SAMPLES = "val/generations"
"""The name of the samples in trackers, as in verl."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Information about the run, for trackers.

    Attributes:
        run_dir: the run directory; for trackers it is absolute, and exists.
        config: the resolved config; secrets are removed before any tracker sees it.
        resumed_step: last step of the checkpoint that this run resumes from; None for a fresh start.
    """

    run_dir: Path
    project_name: str
    experiment_name: str
    config: dict[str, Any]
    resumed_step: int | None

    def folder(self, tracker: str) -> Path:
        """Return the folder of a tracker in the run directory, and make it if it does not exist."""
        folder = self.run_dir / tracker
        folder.mkdir(exist_ok=True)
        return folder

    def known_id(self, tracker: str) -> str | None:
        """Return the id that the tracker has stored for the run that this one resumes; None if there is none."""
        return None if self.resumed_step is None else tracker_ids(self.run_dir).get(tracker)

    def store_id(self, tracker: str, run_id: str) -> None:
        """Store the tracker's id of this run, also in checkpoints, so that a resumed run can continue it."""
        (self.folder(tracker) / RUN_ID).write_text(run_id + "\n")


class Tracker:
    """A destination for metrics.

    It is made once, in the driver, before training; an exception there stops the run. An exception of a later method
    is shown as a warning, and the run goes on without the tracker. No method may wait long: training waits for it.
    """

    note: str = ""
    """One line for the user that says where the metrics are ("W&B offline: wandb sync DIR"); "": none."""

    def __init__(self, run: RunInfo) -> None:
        """Open the destination: begin a run there, or continue the one of `run.known_id`."""

    @classmethod
    def check(cls, project_name: str) -> None:
        """Check before Ray starts what can be checked then: the project's name, and the environment.

        Raises:
            Exception: the tracker cannot start; the text says why.
        """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of one step, under verl's names; steps come in increasing order.

        The last step may come once more, with other names: of a validation that ended while the next step was trained.
        """
        raise NotImplementedError

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Record responses of one step, at least one, before the `log` with their metrics. Trackers may ignore it."""

    def close(self) -> None:
        """Flush buffers and finish; called once. While the run fails, `sys.exc_info()` has the exception."""


class Trackers(contextlib.AbstractContextManager["Trackers"]):
    """All trackers of a run as one.

    A tracker that fails during the run is reported once and dropped, because logging must not stop training. Only
    invalid arguments of `log`, which are a bug of the caller, raise.
    """

    def __init__(self, trackers: Mapping[str, Tracker], *, resumed_step: int | None) -> None:
        self._active = dict(trackers)
        self._last_step = -1 if resumed_step is None else resumed_step
        self._known: set[str] = set()  # names that were logged of that step

    @property
    def notes(self) -> list[str]:
        """One line per tracker: where its metrics go."""
        return [tracker.note for tracker in self._active.values() if tracker.note]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record all numbers of one step.

        Args:
            metrics: name -> int or float, including numpy scalars, NaN and infinities.
            step: the training step; 0 for metrics from before the first step. Each step is logged once, and the last
                one once more if other metrics of it come later.
        """
        clean = check_metrics(metrics)
        known = self._known & clean.keys() if step == self._last_step else set()
        if step < self._last_step or known:
            raise BatchError(
                f"metrics of step {step} were logged after step {self._last_step}: log each step once, in order, and "
                f"the last one again only with other names than {', '.join(sorted(known)) or 'before'}"
            )
        self._known = clean.keys() | (self._known if step == self._last_step else set())
        self._last_step = step
        self._each(f"step {step}", lambda tracker: tracker.log(clean, step))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Send responses to the trackers; call it before `log` of the same step, or before its second one."""
        if samples:
            self._each(f"samples of step {step}", lambda tracker: tracker.log_samples(samples, step))

    def close(self) -> None:
        """Close every tracker; a second call does nothing."""
        self._each("close", lambda tracker: tracker.close())
        self._active.clear()

    def _each(self, when: str, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._active.items()):
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001 - no error of a tracker may stop training or the other trackers
                del self._active[name]
                logger.warning(
                    f"tracker %r failed at %s and {TRACKER_IS_OFF}; training continues. %s: %s",
                    *(name, when, type(error).__name__, redact_text(str(error))),
                )
                if when != "close":
                    with contextlib.suppress(Exception):
                        tracker.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def build_trackers(loggers: Sequence[str], run: RunInfo) -> Trackers:
    """Start the trackers of a run: always `jsonl`, then those in `loggers` (`trainer.logger`)."""
    run = replace(run, run_dir=run.run_dir.absolute(), config=redact(run.config))
    started: dict[str, Tracker] = {}
    try:
        for name in _names(loggers):
            started[name] = _start(name, run)
    except BaseException:
        Trackers(started, resumed_step=None).close()
        raise
    return Trackers(started, resumed_step=run.resumed_step)


def check_trackers(loggers: Sequence[str], project_name: str) -> None:
    """Import the trackers and their packages, and run the checks that they offer, without starting them."""
    for name in _names(loggers):
        tracker_class = _tracker_class(name)
        try:
            tracker_class.check(project_name)
        except ConfigError:
            raise
        except Exception as error:
            where = f"trainer.project_name={project_name} and this environment"
            raise ConfigError(f"{KEY}: {name!r} with {where}: {redact_text(' '.join(str(error).split()))}") from error


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Convert metrics to plain ints and floats."""
    clean: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or name in ("", "step"):
            raise BatchError(f'metric name {name!r}: must be a non-empty string other than "step"')
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise BatchError(
                f"metric {name!r} is a {type(value).__module__}.{type(value).__name__}, not a number: "
                "pass an int or a float (use .item() on a tensor)"
            )
        clean[name] = int(value) if isinstance(value, numbers.Integral) else float(value)
    return clean


def _names(loggers: Sequence[str]) -> list[str]:
    return [name for name in dict.fromkeys((ALWAYS_ON, *loggers)) if name != CONSOLE]


def _start(name: str, run: RunInfo) -> Tracker:
    tracker_class = _tracker_class(name)
    try:
        run.run_dir.mkdir(parents=True, exist_ok=True)
        return tracker_class(run)
    except ConfigError:
        raise
    except Exception as error:
        # some packages raise messages of many lines
        cause = redact_text(" ".join(f"{type(error).__name__}: {error}".split()))
        hint = f"fix this, or remove {name!r} from {KEY}"
        if name == ALWAYS_ON:
            hint = f"make {run.run_dir} writable or set trainer.default_local_dir"
        frames = "" if name in TRACKERS else f"\n{redact_text(traceback_tail(error))}"
        raise ConfigError(f"{KEY}: {name!r} cannot start: {cause}; {hint}{frames}") from error


def _tracker_class(name: str) -> type[Tracker]:
    if name not in TRACKERS:
        own = load_attribute(name, key=KEY)
        if not (isinstance(own, type) and issubclass(own, Tracker)):
            raise ConfigError(
                f"{KEY}={name}: must be a subclass of {Tracker.__module__}.Tracker; see docs/extending.md#a-tracker"
            )
        if own.log is Tracker.log:
            raise ConfigError(f"{KEY}={name}: the class has no method log(metrics, step)")
        return own
    module, _, attribute = TRACKERS[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        install = f"pip install 'grpo_dist[{name}]'" if name in EXTRAS else "install it"
        raise ConfigError(
            f"{KEY}: {name!r} needs a package that cannot be imported ({error}): "
            f"{install}, or remove {name!r} from {KEY}"
        ) from error


def tracker_ids(run_dir: Path) -> dict[str, str]:
    """Return the run's ids in the trackers, by tracker; {} if none has one."""
    return {file.parent.name: file.read_text().strip() for file in sorted(run_dir.glob(f"*/{RUN_ID}"))}


def restore_tracker_ids(run_dir: Path, ids: Mapping[str, str]) -> None:
    """Store the ids of the run that is resumed, so that trackers started later continue it."""
    for name, run_id in ids.items():
        folder = run_dir / Path(name).name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RUN_ID).write_text(run_id + "\n")


# --- responses as people read them (`trainer.log_val_generations`) ----------------------------------------------------
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
