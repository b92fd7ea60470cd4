"""Write the case files: `python -m conformance.generate`, from the root of the repository."""

from __future__ import annotations

from pathlib import Path

from conformance.entries import advantages, aggregations, corrections, kl, losses
from conformance.form import CASES, Group, text


def groups() -> list[Group]:
    """All groups of cases."""
    return [group for kind in (advantages, losses, kl, aggregations, corrections) for group in kind.groups()]


def write(folder: Path = CASES) -> None:
    """Write a file for each group, and remove the others."""
    folder.mkdir(exist_ok=True)
    files = {folder / group.file: group for group in groups()}
    for file in set(folder.glob("*.json")) - set(files):
        file.unlink()
    for file, group in files.items():
        file.write_text(text(group.document()) + "\n")


if __name__ == "__main__":
    write()
