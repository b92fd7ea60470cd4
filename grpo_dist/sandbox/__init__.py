"""Sandboxes for programs that a policy has written: no network, no files of the machine, and limits."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_dist.errors import ConfigError
from grpo_dist.sandbox.base import FOLDER, Outcome, Sandbox, SandboxSettings
from grpo_dist.sandbox.bubblewrap import Bubblewrap
from grpo_dist.sandbox.containers import Container

__all__ = ["Outcome", "Sandbox", "SandboxSettings", "check", "open_sandbox"]


def open_sandbox(
    settings: SandboxSettings | None = None, *, folders: Sequence[str] = (FOLDER,), copy_of: Sandbox | None = None
) -> Sandbox:
    """Open a sandbox, to be closed, by default with the settings of the run that this process belongs to.

    Args:
        folders: what is kept between programs, as they see it; the first one is the working folder.
        copy_of: a sandbox in which nothing runs now: what it has in these folders is there at the beginning.

    Raises:
        ConfigError: the backend does not work here; there is no other one in its place.
    """
    settings = settings or SandboxSettings.of_run()
    backend = Bubblewrap if settings.backend == "bubblewrap" else Container
    sandbox = backend(settings, folders)
    try:
        sandbox.make_folders(copy_of)
    except BaseException:
        sandbox.close()
        raise
    return sandbox


def check(settings: SandboxSettings | None = None) -> None:
    """Run a program that does nothing.

    Raises:
        ConfigError: the backend does not work here.
    """
    with open_sandbox(settings) as sandbox:
        outcome = sandbox.exec(["true"])
    if outcome.exit_code:
        raise ConfigError(f"sandbox: `true` ended with {outcome}")
