"""Weights & Biases: online if there is an API key, else offline. Never prompts for input."""

from __future__ import annotations

import configparser
import netrc
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import wandb

from grpo_dist.errors import ConfigError
from grpo_dist.tracking.base import WANDB_RUN_ID, RunInfo
from grpo_dist.tracking.samples import SAMPLES, TEXTS, Sample

_DEFAULT_URL = "https://api.wandb.ai"
_INIT_TIMEOUT_S = 30.0  # W&B itself retries for 90 s before it gives up on a server


class WandbTracker:
    """A W&B run with its files in `run_dir/wandb`.

    The mode is `WANDB_MODE` if set, else "online" if an API key is found (`WANDB_API_KEY` or `wandb login`), else
    "offline", which needs neither account nor network: `wandb sync` uploads the run later. The run's id is stored in
    `run_dir/wandb/run_id`, so that a resumed run continues the same W&B run.

    Raises:
        ConfigError: `WANDB_MODE=online` without an API key (W&B itself would prompt for one), or the server cannot be
            reached or refuses the run.
    """

    @staticmethod
    def check() -> None:
        """Check the W&B mode before the run starts.

        Raises:
            ConfigError: `WANDB_MODE=online` without an API key.
        """
        choose_mode()

    def __init__(self, run: RunInfo) -> None:
        mode = choose_mode()
        folder = run.run_dir / "wandb"
        folder.mkdir(exist_ok=True)
        id_file = run.run_dir / WANDB_RUN_ID
        run_id = id_file.read_text().strip() if run.resumed_step is not None and id_file.exists() else None
        try:
            self._run = wandb.init(
                project=run.project_name,
                name=run.experiment_name,
                dir=str(run.run_dir),
                mode=mode,  # type: ignore[arg-type]
                config=run.config,
                id=run_id,
                # Offline, W&B ignores `resume` with a warning; `wandb sync` merges runs with the same id.
                resume="allow" if mode == "online" and run_id else None,
                # silent, console off: W&B must neither write to the terminal, which shows the bar, nor capture it.
                settings=wandb.Settings(silent=True, console="off", init_timeout=_INIT_TIMEOUT_S),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"trainer.logger: 'wandb' cannot start ({mode}): {' '.join(str(error).split())}; check the "
                "network and the API key, set WANDB_MODE=offline, or remove 'wandb' from trainer.logger"
            ) from error
        id_file.write_text(self._run.id + "\n")
        where = (
            self._run.url
            if mode == "online"
            else f"upload later with: wandb sync {shlex.quote(str(folder))}/offline-run-*"
        )
        self.note = f"W&B {mode}: {where}" if mode in ("online", "offline") else f"W&B {mode}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one step; if W&B already has the step, it keeps the first value."""
        self._run.log(dict(metrics), step=step, commit=True)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Log a table with one row per sample; it is sent with the next `log`."""
        if samples:
            columns = dict.fromkeys(name for sample in samples for name in sample)
            # a column has one type, but ground truths may differ in type
            rows = [[str(s.get(name, "")) if name in TEXTS else s.get(name) for name in columns] for s in samples]
            self._run.log({SAMPLES: wandb.Table(columns=[*columns], data=rows)}, step=step, commit=False)

    def close(self) -> None:
        """Finish the W&B run; it is marked as failed if an exception is being handled.

        Offline, W&B's own process may still write for some milliseconds after this returns; a normal exit of the
        interpreter waits for it.
        """
        self._run.finish(exit_code=0 if sys.exc_info()[0] is None else 1)


def choose_mode() -> str:
    """The W&B mode of this environment.

    Raises:
        ConfigError: `WANDB_MODE=online` and no API key.
    """
    asked = os.environ.get("WANDB_MODE", "").strip()
    found = _has_api_key()
    if asked == "online" and not found:
        raise ConfigError(
            "trainer.logger: 'wandb' with WANDB_MODE=online needs an API key: run `wandb login`, "
            "set WANDB_API_KEY, or set WANDB_MODE=offline"
        )
    return asked or ("online" if found else "offline")


def _has_api_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(_base_url()).hostname or ""
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _base_url() -> str:
    """URL of the server: WANDB_BASE_URL, else the one that `wandb login --host` stored, else api.wandb.ai."""
    if url := os.environ.get("WANDB_BASE_URL"):
        return url
    stored = configparser.ConfigParser()
    folder = os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb"
    try:
        stored.read(Path(folder) / "settings")
    except configparser.Error:
        return _DEFAULT_URL
    return stored.get("default", "base_url", fallback=_DEFAULT_URL)
