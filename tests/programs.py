"""Scripts that stand in for programs."""

from pathlib import Path


def program(path: Path, text: str, shell: str = "bash") -> Path:
    """Write an executable script, and the folders that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/{shell}\n{text}\n")
    path.chmod(0o755)
    return path
