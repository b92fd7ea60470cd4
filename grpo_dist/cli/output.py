"""The files that `--output` names."""

from __future__ import annotations

from pathlib import Path

from grpo_dist.assets import expanded
from grpo_dist.errors import ConfigError


def check_output(output: str | None, *, replaces: bool = False) -> None:
    """Check before the work that the file of --output, if it is given, can be written after it.

    Raises:
        ConfigError: its folder is missing, or a file is there that it does not replace.
    """
    if output is None:
        return
    path = expanded(output)
    if not path.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {path.parent}; make it, or name another file")
    if path.exists() and not (replaces and path.is_file()):
        raise ConfigError(f"--output {output} exists; remove it, or name another file")


def write_output(path: Path, text: str) -> None:
    """Write the file of --output so that it has the whole text, or is as it was.

    Raises:
        ConfigError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.tmp")
    try:
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"--output {path}: {error}") from None
