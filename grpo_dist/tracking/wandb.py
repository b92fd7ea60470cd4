"""Weights & Biases: online if there is an API key, else offline. Never prompts for input."""

from __future__ import annotations

import configparser
import contextlib
import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import wandb
from wandb.sdk.lib.wbauth import read_netrc_auth

from grpo_dist.errors import ConfigError
from grpo_dist.redact import redact_text
from grpo_dist.tracking.base import RUN_IDS, RunInfo
from grpo_dist.tracking.jsonl import FILE_NAME as METRICS
from grpo_dist.tracking.jsonl import read_metrics
from grpo_dist.tracking.metric_names import GLOBAL_STEP
from grpo_dist.tracking.samples import SAMPLES, Sample, as_html

_CHECK_TIMEOUT_S = 10.0
_INIT_TIMEOUT_S = 30.0  # W&B itself retries for 90 s before it gives up on a server
_FINISH_TIMEOUT_S = 30.0  # after SIGTERM it is part of the scheduler's grace period

logger = logging.getLogger(__name__)


class WandbTracker:
    """A W&B run with its files in `run_dir/wandb`.

    The mode is `WANDB_MODE` if set, else "online" if an API key is found (`WANDB_API_KEY` or `wandb login`), else
    "offline", which needs neither account nor network: `wandb sync` uploads the run later. So does a run whose server
    cannot be reached when it starts; a server that goes away later is waited for in the background, and at the end for
    30 s. The run's id is stored in `run_dir/wandb/run_id`, so that a resumed run continues the same W&B run. It first
    sends the rows of metrics.jsonl that the server has not got.

    Raises:
        ConfigError: `WANDB_MODE=online` without an API key (W&B itself would prompt for one), or the server refuses
            the run.
    """

    @staticmethod
    def check() -> None:
        """Check the W&B mode, and the API key with its server if that can be reached, before the run starts.

        Raises:
            ConfigError: `WANDB_MODE=online` without an API key, or the server refuses the key.
        """
        if choose_mode() == "online":
            _check_key()

    def __init__(self, run: RunInfo) -> None:
        mode = choose_mode()
        folder = run.run_dir / "wandb"
        folder.mkdir(exist_ok=True)
        id_file = run.run_dir / RUN_IDS["wandb"]
        run_id = run.known_id("wandb")
        away = ""
        try:
            self._run = _start(run, mode, run_id)
        except _ServerAway as error:
            away, mode = f" (no answer from {_base_url()}: {error})", "offline"
            self._run = _start(run, mode, run_id)
        id_file.write_text(self._run.id + "\n")
        # The x axis of every chart: W&B's own step cannot go back, as a run does that resumes before its last row.
        self._run.define_metric(GLOBAL_STEP)
        self._run.define_metric("*", step_metric=GLOBAL_STEP)
        caught_up = self._catch_up(run) if mode == "online" and run_id else 0
        self.note = f"W&B {mode}"
        if mode == "online":
            self.note += f": {self._run.url}" + (f" ({caught_up} steps of before sent now)" if caught_up else "")
        elif mode == "offline":
            self.note += f"{away}: upload later with: wandb sync {shlex.quote(str(folder))}/offline-run-*"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one step."""
        self._run.log({**metrics, GLOBAL_STEP: step}, step=self._row(step), commit=True)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Log a table with one row per sample; it is sent with the next `log`.

        As HTML, since a `wandb.Table` asks the server first: with the server away, training would wait for it.
        """
        if samples:
            self._run.log({SAMPLES: wandb.Html(as_html(samples))}, step=self._row(step), commit=False)

    def close(self) -> None:
        """Finish the W&B run; it is marked as failed if an exception is being handled.

        Offline, W&B's own process may still write for some milliseconds after this returns; a normal exit of the
        interpreter waits for it.
        """
        try:
            self._run.finish(exit_code=0 if sys.exc_info()[0] is None else 1)
        except TimeoutError:
            logger.warning(
                "W&B: %s did not take the last metrics within %.0f s; upload them with: wandb sync --include-online %s",
                *(_base_url(), _FINISH_TIMEOUT_S, shlex.quote(str(self._run.settings.sync_dir))),
            )
        except Exception:
            _end_process()
            raise

    def _row(self, step: int) -> int:
        """W&B's own step: the training step, or the next that W&B takes, if the run has gone back."""
        return max(step, self._run.step, self._run.starting_step)

    def _catch_up(self, run: RunInfo) -> int:
        """Send the rows up to the checkpoint that were lost on their way, or logged offline; returns how many."""
        summary = self._run.summary
        # the summary travels apart from the rows, and may have come without its row
        lost = summary.get("_step", -1) - (self._run.starting_step - 1)
        newest = summary.get(GLOBAL_STEP, -1) - lost
        missing = [row for row in read_metrics(run.run_dir / METRICS) if row["step"] > newest]
        for row in missing:
            step = int(row.pop("step"))
            self.log(row, step)
        return len(missing)


class _ServerAway(Exception):
    """W&B has retried until its time was up."""


def _start(run: RunInfo, mode: str, run_id: str | None) -> Any:
    """Start or continue the W&B run.

    Raises:
        ConfigError: W&B refuses the run.
        _ServerAway: the server does not answer, or only with errors of its own.
    """
    settings = wandb.Settings(
        # W&B must neither write to the terminal, which shows the bar, nor capture it
        silent=True,
        console="off",
        init_timeout=_INIT_TIMEOUT_S,
        finish_timeout=_FINISH_TIMEOUT_S,
        finish_timeout_raises=True,
        # code, uncommitted changes, and a remote's URL, which may hold a token, stay here
        disable_code=True,
        save_code=False,
        disable_git=True,
    )
    started = time.monotonic()
    try:
        with _redacted_command_line():
            return wandb.init(
                project=run.project_name,
                name=run.experiment_name,
                dir=str(run.run_dir),
                mode=mode,  # type: ignore[arg-type]
                config=run.config,
                id=run_id,
                # Offline, W&B ignores `resume` with a warning; `wandb sync` merges runs with the same id.
                resume="allow" if mode == "online" and run_id else None,
                settings=settings,
            )
    except wandb.Error as error:
        _end_process()  # it still holds the run's id, and the key
        cause = " ".join(str(error).split())
        if mode == "online" and time.monotonic() - started >= _INIT_TIMEOUT_S:
            raise _ServerAway(cause) from error
        raise ConfigError(
            f"trainer.logger: 'wandb' cannot start ({mode}): {cause}; check project and API key, "
            "set WANDB_MODE=offline, or remove 'wandb' from trainer.logger"
        ) from error


def _end_process() -> None:
    """End W&B's process after a failure, also if it has died: the next tracker gets a new one."""
    with contextlib.suppress(Exception):
        wandb.teardown()


@contextlib.contextmanager
def _redacted_command_line() -> Iterator[None]:
    """Without secrets in `sys.argv`, which W&B uploads."""
    before, sys.argv = sys.argv, [redact_text(argument) for argument in sys.argv]
    try:
        yield
    finally:
        sys.argv = before


def choose_mode() -> str:
    """The W&B mode of this environment.

    Raises:
        ConfigError: `WANDB_MODE=online` and no API key.
    """
    asked = os.environ.get("WANDB_MODE", "").strip()
    found = _api_key() is not None
    if asked == "online" and not found:
        raise ConfigError(
            "trainer.logger: 'wandb' with WANDB_MODE=online needs an API key: run `wandb login`, "
            "set WANDB_API_KEY, or set WANDB_MODE=offline"
        )
    return asked or ("online" if found else "offline")


def _check_key() -> None:
    """Ask the server for the key's owner. One that does not answer says nothing against the key.

    Raises:
        ConfigError: the server refuses the key.
    """
    url = _base_url().rstrip("/") + "/graphql"
    query = {"query": "query Viewer { viewer { username } }"}
    try:
        answer = httpx.post(url, json=query, auth=("api", _api_key() or ""), timeout=_CHECK_TIMEOUT_S)
        refused = answer.status_code in (401, 403)
        if answer.is_success:
            refused = answer.json()["data"]["viewer"] is None
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return
    if refused:
        raise ConfigError(
            f"trainer.logger: 'wandb': {_base_url()} refuses the API key (HTTP {answer.status_code}): "
            "correct WANDB_API_KEY, run `wandb login --relogin`, set WANDB_MODE=offline, or remove 'wandb' from "
            "trainer.logger"
        )


def _api_key() -> str | None:
    """The key that W&B would find.

    Raises:
        ConfigError: the stored one has no form of a key.
    """
    try:
        return os.environ.get("WANDB_API_KEY") or read_netrc_auth(host=_base_url())
    except wandb.Error as error:
        raise ConfigError(f"trainer.logger: 'wandb': {error} Run `wandb login --relogin`") from error


def _base_url() -> str:
    """URL of the server: WANDB_BASE_URL, else the one that `wandb login --host` stored, else W&B's own."""
    if url := os.environ.get("WANDB_BASE_URL"):
        return url
    default = wandb.Settings().base_url  # without the environment: that takes a start of W&B's process
    stored = configparser.ConfigParser()
    folder = os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb"
    try:
        stored.read(Path(folder) / "settings")
    except configparser.Error:
        return default
    return stored.get("default", "base_url", fallback=default)
