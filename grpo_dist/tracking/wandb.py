"""Weights & Biases: online with an API key, else offline; never a prompt."""

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
from grpo_dist.tracking.samples import NUMBERS, SAMPLES, Sample

_DEFAULT_URL = "https://api.wandb.ai"
_INIT_TIMEOUT_S = 30.0  # W&B itself retries for 90 s before it gives up on a server


class WandbTracker:
    """A W&B run with its files in `run_dir/wandb`.

    The mode is `WANDB_MODE` if set, else "online" when an API key is found (`WANDB_API_KEY` or
    `wandb login`), else "offline", which needs neither account nor network: `wandb sync` uploads it later.
    The run's id is kept in `run_dir/wandb/run_id`, so a resumed run goes on in the same W&B run.

    Raises:
        ConfigError: `WANDB_MODE=online` without an API key (W&B itself would prompt and block), or the server
            cannot be reached or refuses.
    """

    @staticmethod
    def check() -> None:
        """Check what is known before the run starts.

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
                # Offline, W&B ignores `resume` with a warning; the same id joins the pieces at `wandb sync`.
                resume="allow" if mode == "online" and run_id else None,
                # silent: the bar owns the terminal. console off: W&B must not capture it.
                settings=wandb.Settings(silent=True, console="off", init_timeout=_INIT_TIMEOUT_S),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"trainer.logger: 'wandb' cannot start ({mode}): {' '.join(str(error).split())}; check the "
                "network and the API key, set WANDB_MODE=offline, or take 'wandb' out of trainer.logger"
            ) from error
        id_file.write_text(self._run.id + "\n")
        where = (
            self._run.url
            if mode == "online"
            else f"upload later with: wandb sync {shlex.quote(str(folder))}/offline-run-*"
        )
        self.note = f"W&B {mode}: {where}" if mode in ("online", "offline") else f"W&B {mode}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one step; W&B keeps the first value of a step that it already has."""
        self._run.log(dict(metrics), step=step, commit=True)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Log a table with a row per sample; `log` of the same step sends it off."""
        if samples:
            # a ground truth may be anything, and a column has one type
            rows = [[value if name in NUMBERS else str(value) for name, value in s.items()] for s in samples]
            self._run.log({SAMPLES: wandb.Table(columns=[*samples[0]], data=rows)}, step=step, commit=False)

    def close(self) -> None:
        """Finish the W&B run; it counts as failed when closed while an exception is on its way out.

        Offline, W&B's own process may write the last bytes some milliseconds after this returns; the normal
        exit of the interpreter waits for it.
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
            "trainer.logger: 'wandb' with WANDB_MODE=online finds no API key: run `wandb login`, "
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
    """The server: WANDB_BASE_URL, else the one that `wandb login --host` stored, else W&B's own."""
    if url := os.environ.get("WANDB_BASE_URL"):
        return url
    stored = configparser.ConfigParser()
    folder = os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb"
    try:
        stored.read(Path(folder) / "settings")
    except configparser.Error:
        return _DEFAULT_URL
    return stored.get("default", "base_url", fallback=_DEFAULT_URL)
