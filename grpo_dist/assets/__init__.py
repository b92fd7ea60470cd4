"""Models that ship with the package. Loads nothing heavy."""

from __future__ import annotations

from pathlib import Path

from grpo_dist.errors import ConfigError

BUILTIN = "builtin:"


def resolve_model_path(path: str) -> str:
    """`builtin:NAME` -> its folder in the installed package; anything else unchanged, with ~ expanded.

    Raises:
        ConfigError: no such built-in model.
    """
    if not path.startswith(BUILTIN):
        return str(Path(path).expanduser()) if path.startswith("~") else path
    root = Path(__file__).parent
    names = sorted(folder.name for folder in root.iterdir() if (folder / "config.json").is_file())
    if path.removeprefix(BUILTIN) not in names:
        raise ConfigError(
            f"actor_rollout_ref.model.path={path}: no such built-in model. Known: "
            + ", ".join(BUILTIN + name for name in names)
        )
    return str(root / path.removeprefix(BUILTIN))
