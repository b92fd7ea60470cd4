"""The manifest of a checkpoint: sizes and digests of its files, and the check of a folder against it.

    manifest.json   {"format", "step", "written_at", "versions", "git_commit", "files": {PATH: {"bytes", "blake2b"}},
                     "blake2b" of all of that}

It is written last, so a folder with a manifest was once complete. A worker returns the digests of the files that it
wrote; the driver computes the others.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from grpo_dist.engines.base import builtin_backends
from grpo_dist.engines.train.durable_files import FileDigest, digest_file, write_durably
from grpo_dist.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
# Minimum distance of the times of two checkpoints: enough to order them as floats.
CLOCK_STEP_S = 0.001
_THREADS = min(8, os.cpu_count() or 1)
_ENGINES = [package for backend in builtin_backends() for package in backend.packages]
_PACKAGES = ("grpo_dist", "torch", *_ENGINES, "ray", "transformers")


def write_manifest(folder: Path, step: int, digests: Mapping[str, FileDigest], *, written_after: float = 0.0) -> None:
    """Write the manifest of all files in `folder`, of which `digests`, by path in it, are known; other files are read.

    Args:
        written_after: time of the previous checkpoint; this one gets a later time even if the clock was set back.

    Raises:
        CheckpointError: a file in `digests` does not exist.
        OSError: a file cannot be read or written.
    """
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if missing := sorted(set(digests) - set(names)):
        raise CheckpointError(
            f"{folder / missing[0]} was written by a worker, but the driver cannot see it; use a shared file system"
        )
    unknown = [name for name in names if name not in digests]
    with ThreadPoolExecutor(_THREADS) as threads:
        computed = dict(zip(unknown, threads.map(lambda name: digest_file(folder / name), unknown), strict=True))
    files = {name: digests.get(name) or computed[name] for name in names}
    body = {
        "format": FORMAT,
        "step": step,
        "written_at": max(time.time(), written_after + CLOCK_STEP_S),
        "versions": versions(),
        "git_commit": git_commit(),
        "files": {name: {"bytes": file.num_bytes, "blake2b": file.blake2b} for name, file in files.items()},
    }
    write_durably(folder / MANIFEST, _sealed(body))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, or of another format version.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing: the checkpoint is incomplete, or older than manifests") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from None
    try:
        body = json.loads(text)
        digest = body.pop("blake2b")
        whole, known = _sealed(body) == text, body["format"]
    except (ValueError, TypeError, KeyError, AttributeError):
        whole, known = False, FORMAT
    if not whole:
        raise CheckpointError(f"{MANIFEST} is damaged: its digest does not match")
    if known != FORMAT:
        raise CheckpointError(f"{MANIFEST} has format {known}; this version of grpo_dist reads {FORMAT}")
    return {**body, "blake2b": digest}


def checkpoint_digest(folder: Path) -> str:
    """Return the digest by which a checkpoint is known: that of its manifest, which names all files and when it was
    written, so that no other checkpoint has it, not even one of the same step of the same config.

    Raises:
        CheckpointError: the manifest cannot be read.
    """
    try:
        return str(read_manifest(folder)["blake2b"])
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def damage(folder: Path, *, contents: bool = True) -> list[str]:
    """The problems of a checkpoint, one line per file; [] if it is intact. Without `contents` of sizes alone."""
    try:
        files = read_manifest(folder)["files"]
    except CheckpointError as error:
        return [str(error)]
    with ThreadPoolExecutor(_THREADS) as threads:
        problems = threads.map(lambda name: _damage_of_file(folder / name, name, files[name], contents), files)
        return [problem for problem in problems if problem]


def _damage_of_file(path: Path, name: str, expected: Mapping[str, Any], contents: bool) -> str:
    try:
        num_bytes = path.stat().st_size
        if num_bytes != expected["bytes"]:
            return f"{name} has {num_bytes} bytes, {expected['bytes']} were written"
        if contents and digest_file(path).blake2b != expected["blake2b"]:
            return f"{name} is damaged: its contents have changed since it was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error}"
    return ""


def _sealed(body: Mapping[str, Any]) -> str:
    """The manifest as JSON with its own digest at the end. The text is unique, so any other text is damaged."""
    digest = hashlib.blake2b(json.dumps(body).encode(), digest_size=32).hexdigest()
    return json.dumps({**body, "blake2b": digest}, indent=1) + "\n"


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a checkpoint depends on."""
    installed = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


@functools.cache
def git_commit() -> str | None:
    """The git commit of this package's source, with `-dirty` if it has changes; None if it is not in a repository."""
    folder = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # fails if installed inside another repository
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None
