"""Sandboxes for programs that a policy has written: no network, no files of the machine, and limits."""

from __future__ import annotations

from grpo_dist.errors import ConfigError
from grpo_dist.sandbox.base import Outcome, Sandbox, SandboxSettings
from grpo_dist.sandbox.bubblewrap import Bubblewrap
from grpo_dist.sandbox.containers import Container

__all__ = ["Outcome", "Sandbox", "SandboxSettings", "check", "open_sandbox"]


def open_sandbox(settings: SandboxSettings | None = None) -> Sandbox:
    """Open a sandbox, to be closed, by default with the settings of the run that this process belongs to.

    Raises:
        ConfigError: the backend does not work here; there is no other one in its place.
    """
    settings = settings or SandboxSettings.of_run()
    return Bubblewrap(settings) if settings.backend == "bubblewrap" else Container(settings)


def check(settings: SandboxSettings | None = None) -> None:
    """Run a program that does nothing.

    Raises:
        ConfigError: the backend does not work here.
    """
    with open_sandbox(settings) as sandbox:
        outcome = sandbox.exec(["true"])
    if outcome.exit_code:
        raise ConfigError(f"sandbox: `true` ended with {outcome}")
