"""Trackers without accounts and servers, and a database of trackio for these tests alone."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

DATABASE = tempfile.mkdtemp()
os.environ["TRACKIO_DIR"] = DATABASE  # read when trackio is imported


@pytest.fixture(scope="session", autouse=True)
def database_removed() -> Iterator[None]:
    yield
    shutil.rmtree(DATABASE)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_TRACKING_", "NETRC", "TRACKIO_S"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(folder := tmp_path_factory.mktemp("home")))
    return folder
