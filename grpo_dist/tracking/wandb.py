"""Weights & Biases: online if there is an API key, else offline. Never prompts for input."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb
from pydantic import ValidationError
from wandb.sdk.lib.wbauth import read_netrc_auth

from grpo_dist.errors import ConfigError
from grpo_dist.redact import redact_text
from grpo_dist.tracking.base import SAMPLES, RunInfo, Sample, Tracker, as_html
from grpo_dist.tracking.jsonl import METRICS, read_metrics
from grpo_dist.tracking.metric_names import GLOBAL_STEP

_INIT_TIMEOUT_S = 30.0  # W&B itself retries for 90 s before it gives up on a server
_FINISH_TIMEOUT_S = 30.0  # after SIGTERM it is part of the scheduler's grace period

logger = logging.getLogger(__name__)


class WandbTracker(Tracker):
    """A W&B run with its files in `run_dir/wandb`.

    The mode is `WANDB_MODE` if set, else "online" if an API key is found (`WANDB_API_KEY` or `wandb login`), else
    "offline", which needs neither account nor network: `wandb sync` uploads the run later. So does a run whose server
    cannot be reached when it starts; a server that goes away later is waited for in the background, and at the end for
    30 s. The run's id is stored in `run_dir/wandb/run_id`, so that a resumed run continues the same W&B run.
    """

    @classmethod
    def check(cls, project_name: str) -> None:
        """Have W&B read its environment variables and the project's name, as it does when a run starts."""
        settings = wandb.Settings(silent=True)
        try:
            settings.update_from_env_vars(dict(os.environ))
            settings.project = project_name
        except ValidationError as error:
            wrong = error.errors()[0]
            raise ValueError(f"WANDB_{str(wrong['loc'][0]).upper()}: {wrong['msg']}") from None
        choose_mode()

    def __init__(self, run: RunInfo) -> None:
        mode, folder, away, started = choose_mode(), run.folder("wandb"), "", time.monotonic()
        self._step, self._row = -1, -1  # the training step that was logged last, and W&B's own step of its row
        # A row that is sent takes nothing more. So it waits for the next step where metrics of it may come later.
        self._waits = bool(run.config.get("trainer", {}).get("val_in_background"))
        try:
            self._run = _init(run, mode)
        except wandb.Error as error:
            _end_process()  # it still holds the run's id, and the key
            cause = " ".join(str(error).split())
            if mode != "online" or time.monotonic() - started < _INIT_TIMEOUT_S:
                raise ConfigError(
                    f"trainer.logger: 'wandb' cannot start ({mode}): {cause}; check project and API key, "
                    "set WANDB_MODE=offline, or remove 'wandb' from trainer.logger"
                ) from error
            away, mode = f" (no answer from {_base_url()}: {cause})", "offline"
            self._run = _init(run, mode)
        run.store_id("wandb", self._run.id)
        # The x axis of every chart: W&B's own step cannot go back, as a run does that resumes before its last row.
        self._run.define_metric(GLOBAL_STEP)
        self._run.define_metric("*", step_metric=GLOBAL_STEP)
        if mode == "online":
            self._catch_up(run)
        later = f"{away}: upload later with: wandb sync {shlex.quote(str(folder))}/offline-run-*"
        self.note = f"W&B {mode}" + {"online": f": {self._run.url}", "offline": later}.get(mode, "")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one step."""
        self._run.log({**metrics, GLOBAL_STEP: step}, step=self._row_of(step), commit=not self._waits)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Log a table with one row per sample; it is sent with the next `log`.

        As HTML, since a `wandb.Table` asks the server first: with the server away, training would wait for it.
        """
        self._run.log({SAMPLES: wandb.Html(as_html(samples))}, step=self._row_of(step), commit=False)

    def close(self) -> None:
        """Finish the W&B run; it is marked as failed if an exception is being handled."""
        try:
            self._run.finish(exit_code=0 if sys.exc_info()[0] is None else 1)
        except TimeoutError:
            upload = f"wandb sync --include-online {shlex.quote(str(self._run.settings.sync_dir))}"
            logger.warning("W&B: %s did not take the last metrics in time; upload them with: %s", _base_url(), upload)
        except Exception:
            _end_process()
            raise

    def _catch_up(self, run: RunInfo) -> None:
        """Send the rows of a resumed run that its W&B run lacks: lost with the process before, or logged offline."""
        newest = self._run.summary.get(GLOBAL_STEP, -1)
        # The summary travels apart from the rows and may have come without its row; of the first, W&B does not tell.
        newest -= self._run.summary.get("_step", -1) - (self._run.starting_step - 1)
        rows = read_metrics(run.run_dir / METRICS) if run.known_id("wandb") else []
        for row in rows:
            if (step := int(row["step"])) > newest or newest == rows[0]["step"]:
                self.log({name: value for name, value in row.items() if name != "step"}, step)

    def _row_of(self, step: int) -> int:
        """Return W&B's own step: the training step, or the next that W&B takes, if the run has gone back."""
        if step != self._step:
            self._step, self._row = step, max(step, self._row + 1)
        self._row = max(self._row, self._run.step, self._run.starting_step)
        return self._row


def _init(run: RunInfo, mode: str) -> Any:
    settings = wandb.Settings(
        silent=True,
        console="off",  # the terminal, which shows the bar, is not captured either
        init_timeout=_INIT_TIMEOUT_S,
        finish_timeout=_FINISH_TIMEOUT_S,
        finish_timeout_raises=True,
        disable_code=True,
        save_code=False,
        disable_git=True,  # with uncommitted changes, and a remote's URL, which may hold a token
    )
    run_id = run.known_id("wandb")
    before, sys.argv = sys.argv, [redact_text(argument) for argument in sys.argv]  # W&B uploads it
    try:
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
    finally:
        sys.argv = before


def _end_process() -> None:
    """End W&B's process after a failure, also if it has died: the next tracker gets a new one."""
    with contextlib.suppress(Exception):
        wandb.teardown()


def choose_mode() -> str:
    """Return the W&B mode of this environment."""
    asked = os.environ.get("WANDB_MODE", "").strip()
    try:
        has_key = bool(os.environ.get("WANDB_API_KEY") or read_netrc_auth(host=_base_url()))
    except wandb.Error as error:
        raise ConfigError(f"trainer.logger: 'wandb': {error} Run `wandb login --relogin`") from error
    if asked == "online" and not has_key:
        raise ConfigError(
            "trainer.logger: 'wandb' with WANDB_MODE=online needs an API key: run `wandb login`, "
            "set WANDB_API_KEY, or set WANDB_MODE=offline"
        )
    return asked or ("online" if has_key else "offline")


def _base_url() -> str:
    """Return the server's URL, from W&B's settings files and the environment."""
    folder = os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb"
    settings = wandb.Settings(silent=True, settings_system=str(Path(folder, "settings")))
    settings.update_from_system_settings()  # without the environment: that takes a start of W&B's process
    return os.environ.get("WANDB_BASE_URL") or settings.base_url
