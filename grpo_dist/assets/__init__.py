"""Finds a model's files: built-in, in a local folder, or on the Hugging Face hub. Imports nothing heavy.

Checks of paths that a user wrote never raise: a path that cannot be accessed counts as missing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_dist.errors import ConfigError

BUILTIN = "builtin:"
POLICY_KEY, REWARD_MODEL_KEY = "actor_rollout_ref.model.path", "reward_model.model.path"
POLICY_SECTION = "actor_rollout_ref.model"
TEACHER_KEY, TEACHER_SECTION = "actor_rollout_ref.ref.model.path", "actor_rollout_ref.ref.model"
TRAINED_MODEL_KEY = "model.path"  # of commands that train one model

HUB_NAME = re.compile(r"(\w[\w.-]*/[\w.-]+)(?:@(\w[\w./-]*))?")
_WEIGHTS = "*.safetensors"
MODEL_FILES = ["*.json", _WEIGHTS, "*.model", "*.jinja", "*.txt", "*.tiktoken", "*.py"]


def resolve_model_path(path: str, *, weights: bool = True, key: str = POLICY_KEY) -> str:
    """Return the folder here of `builtin:NAME`, a folder, or OWNER/NAME[@REVISION] on the hub, downloaded once."""
    if path.startswith(BUILTIN):
        return _builtin_folder(path, key)
    folder = expanded(path)
    return str(folder) if is_folder(folder) or not HUB_NAME.fullmatch(path) else _from_hub(path, key, weights=weights)


def is_on_the_hub(path: str) -> bool:
    """Return whether a model must be downloaded, unless it is in the cache."""
    return not (path.startswith(BUILTIN) or is_folder(path))


def _from_hub(path: str, key: str, *, weights: bool) -> str:
    from huggingface_hub import snapshot_download

    (name, _, revision), left_out = path.partition("@"), [] if weights else [_WEIGHTS]
    with asking_hub(f"{key}={path}: no such folder, and no download", "the hub has it not, or not for this account"):
        return snapshot_download(name, revision=revision or None, allow_patterns=MODEL_FILES, ignore_patterns=left_out)


def _builtin_folder(path: str, key: str) -> str:
    root = Path(__file__).parent
    names = sorted(folder.name for folder in root.iterdir() if (folder / "config.json").is_file())
    if path.removeprefix(BUILTIN) not in names:
        raise ConfigError(f"{key}={path}: no such built-in model. Known: {BUILTIN}{f', {BUILTIN}'.join(names)}")
    return str(root / path.removeprefix(BUILTIN))


def check_push(name: str | None, key: str = "trainer.push_to_hub") -> None:
    """Check that the account on the hub, by its login here or HF_TOKEN, owns repositories of such a name, if any."""
    if name is None:
        return
    from huggingface_hub import HfApi, get_token

    with asking_hub(setting := f"{key}={name}", "the hub does not know the token; hf auth login, or set HF_TOKEN"):
        if not re.fullmatch(r"(?!.*(--|\.\.))\w[\w.-]*/\w[\w.-]*", name):
            raise ConfigError(f"{setting}: no name for the hub, which has OWNER/NAME of letters, digits, -, _ and .")
        if not get_token():
            raise ConfigError(f"{setting}: nobody is logged in to the hub here; hf auth login, or set HF_TOKEN")
        account = HfApi().whoami()
        owners = [account["name"], *(each["name"] for each in account.get("orgs", ()))]
        if account.get("type") == "user" and name.partition("/")[0].lower() not in map(str.lower, owners):
            raise ConfigError(f"{setting}: the token's account is none of its owner; it has {', '.join(owners)}")


@contextmanager
def asking_hub(setting: str, refused: str) -> Iterator[None]:
    """Say in a sentence why the hub does not do what is asked in the block."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        why = refused if status in (401, 403, 404) else "the hub was not reached, or the transfer broke off; try again"
        raise ConfigError(f"{setting}: {why} ({' '.join(str(error).split())[:300]})") from error


def expanded(path: str) -> Path:
    """The path with `~` replaced by the home folder; unchanged if there is no such user."""
    return Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown user


def is_folder(path: str | Path) -> bool:
    """Tell if the folder exists. Path.is_dir would raise for names that are too long, or without permission."""
    return os.path.isdir(expanded(str(path)))


def is_file(path: str | Path) -> bool:
    """Tell if the file exists."""
    return os.path.isfile(expanded(str(path)))
