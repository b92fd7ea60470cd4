"""The notebooks, run by Jupyter's own client: they train, they learn, and they show a curve."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


def outputs(notebook: Any, kind: str) -> list[Any]:
    """What the cells show of a kind of content, such as image/png."""
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output["data"][kind] for output in shown if kind in output.get("data", {})]


def printed(notebook: Any) -> str:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return "".join(output.get("text", "") for cell in cells for output in cell.outputs)


def executed(name: str, folder: Path) -> Any:
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    NotebookClient(
        notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return notebook


def test_quickstart(tmp_path: Path) -> None:
    notebook = executed("quickstart.ipynb", tmp_path)
    rewards = [float(value) for value in re.findall(r"step \d+: reward ([\d.]+)", printed(notebook))]
    assert len(rewards) == 15
    assert sum(rewards[-3:]) > sum(rewards[:3])
    assert len(outputs(notebook, "image/png")) == 1


@pytest.mark.long
def test_own_reward(tmp_path: Path) -> None:
    notebook = executed("own_reward.ipynb", tmp_path)
    assert len(outputs(notebook, "image/png")) == 1
    assert any("15 training steps" in text for text in outputs(notebook, "text/plain"))
    assert len(re.findall(r"^ *-?\d\.\d{3}  ", printed(notebook), re.MULTILINE)) == 4, "responses with their scores"
