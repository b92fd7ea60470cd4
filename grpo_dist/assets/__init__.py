"""Finds a model's files: built-in, in a local folder, or on the Hugging Face hub. Imports nothing heavy.

Checks of paths that a user wrote never raise: a path that cannot be accessed counts as missing.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from grpo_dist.errors import ConfigError

BUILTIN = "builtin:"
POLICY_KEY, REWARD_MODEL_KEY = "actor_rollout_ref.model.path", "reward_model.model.path"
POLICY_SECTION = "actor_rollout_ref.model"
TEACHER_KEY, TEACHER_SECTION = "actor_rollout_ref.ref.model.path", "actor_rollout_ref.ref.model"
TRAINED_MODEL_KEY = "model.path"  # of commands that train one model

_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_WEIGHTS = "*.safetensors"
_MODEL_FILES = ["*.json", _WEIGHTS, "*.model", "*.jinja", "*.txt", "*.tiktoken", "*.py"]


def resolve_model_path(path: str, *, weights: bool = True, key: str = POLICY_KEY) -> str:
    """Return the folder here of `builtin:NAME`, a folder, or a name on the hub, downloaded once into its cache."""
    if path.startswith(BUILTIN):
        return _builtin_folder(path, key)
    folder = expanded(path)
    return str(folder) if is_folder(folder) or not _HUB_NAME.fullmatch(path) else _from_hub(path, key, weights=weights)


def is_on_the_hub(path: str) -> bool:
    """Return whether a model must be downloaded, unless it is in the cache."""
    return not (path.startswith(BUILTIN) or is_folder(path))


def _from_hub(name: str, key: str, *, weights: bool) -> str:
    from huggingface_hub import snapshot_download

    try:
        left_out = [] if weights else [_WEIGHTS]
        return snapshot_download(name, allow_patterns=_MODEL_FILES, ignore_patterns=left_out)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{key}={name}: no such folder, and the download from the hub failed: {reason}") from error


def _builtin_folder(path: str, key: str) -> str:
    root = Path(__file__).parent
    names = sorted(folder.name for folder in root.iterdir() if (folder / "config.json").is_file())
    if path.removeprefix(BUILTIN) not in names:
        raise ConfigError(
            f"{key}={path}: no such built-in model. Known: " + ", ".join(BUILTIN + name for name in names)
        )
    return str(root / path.removeprefix(BUILTIN))


def expanded(path: str) -> Path:
    """The path with `~` replaced by the home folder; unchanged if there is no such user."""
    return Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown user


def is_folder(path: str | Path) -> bool:
    """Tell if the folder exists. Path.is_dir would raise for names that are too long, or without permission."""
    return os.path.isdir(expanded(str(path)))


def is_file(path: str | Path) -> bool:
    """Tell if the file exists."""
    return os.path.isfile(expanded(str(path)))
