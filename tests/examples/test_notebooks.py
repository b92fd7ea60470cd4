"""The notebooks, run by Jupyter's own client: they train, they learn, and they show a curve."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

from scripts.notebooks import FOLDER, as_kept, executed


def outputs(notebook: Any, kind: str) -> list[Any]:
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output["data"][kind] for output in shown if kind in output.get("data", {})]


def printed(notebook: Any) -> str:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return "".join(output.get("text", "") for cell in cells for output in cell.outputs)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_they_are_kept_with_what_they_show(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert len(outputs(notebook, "image/png")) == 1
    assert "Traceback" not in printed(notebook)
    assert not re.search(r"[\s'=(]/\w+/\w", printed(notebook)), "a path of the machine that it ran on"


def test_paths_of_the_machine_and_progress_are_not_kept(tmp_path: Path) -> None:
    told = nbformat.v4.new_output("stream", text=f"{tmp_path}/run, {tmp_path}")
    progress = nbformat.v4.new_output("stream", name="stderr", text="step 1")
    cells = [nbformat.v4.new_markdown_cell("# A"), nbformat.v4.new_code_cell(outputs=[told, progress])]
    kept = as_kept(nbformat.v4.new_notebook(cells=cells), tmp_path)
    assert '"run, ."' in kept
    assert "step 1" not in kept


@contextmanager
def watched() -> Iterator[list[int]]:
    """MiB of memory of all processes below this one, twice a second; what several share is divided among them."""
    used, ended = list[int](), threading.Event()

    def look() -> None:
        while not ended.wait(0.5):
            total = 0
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):  # it has just ended
                    total += process.memory_full_info().pss
            used.append(total >> 20)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield used
    finally:
        ended.set()
        thread.join()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.long
def test_quickstart(tmp_path: Path) -> None:
    with watched() as used:
        notebook = executed(FOLDER / "quickstart.ipynb", tmp_path)
    assert 1000 < max(used) < 12_000 * 0.9, "MiB"
    rewards = [float(value) for value in re.findall(r"step \d+: reward ([\d.]+)", printed(notebook))]
    assert len(rewards) == 15
    assert sum(rewards[-3:]) > sum(rewards[:3])
    assert len(outputs(notebook, "image/png")) == 1


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.long
def test_own_reward(tmp_path: Path) -> None:
    notebook = executed(FOLDER / "own_reward.ipynb", tmp_path)
    assert len(outputs(notebook, "image/png")) == 1
    assert any("15 training steps" in text for text in outputs(notebook, "text/plain"))
    assert len(re.findall(r"^ *-?\d\.\d{3}  ", printed(notebook), re.MULTILINE)) == 4, "responses with their scores"
