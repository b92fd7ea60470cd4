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
LINES = next(block.text for block in blocks((ROOT / "README.md").read_text()) if block.language == "bash")


@pytest.fixture
def files() -> Iterator[str]:
    """The address at which the files of the repository are."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=ROOT)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_the_first_lines_install_and_train(tmp_path: Path, files: str) -> None:
    """A built wheel takes the place of the repository. A machine that offers wheels of its own has torch among them."""
    uv = ROOT / ".venv/bin/uv"
    subprocess.run([uv, "build", "--quiet", "--wheel", "--out-dir", tmp_path / "dist", ROOT], check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    lines = LINES.replace(ADDRESS, f"file://{wheel}").replace(RAW, files)
    assert lines.count("://127.0.0.1") == lines.count("file://") == 1
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if links := os.environ.get("PIP_FIND_LINKS"):
        env["UV_FIND_LINKS"], lines = links, lines.replace("--torch-backend cpu ", "")
    command = ["bash", "-euxc", lines]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    says(done.stdout + done.stderr, "report.html")
    packages = [uv, "pip", "list", "--python", tmp_path / "grpo/bin/python"]
    listed = subprocess.run(packages, capture_output=True, text=True, check=True).stdout
    pins = dict(line.split("==") for line in (ROOT / "constraints/cpu.txt").read_text().splitlines() if "==" in line)
    assert f"ray {pins['ray']}" in re.sub(" +", " ", listed)
    assert "torchvision" not in listed
