"""Runs the notebooks and writes them back with what they show: `python -m scripts.notebooks [NAME.ipynb ...]`.

They run in an empty folder, whose path is taken out of what they print. What goes to stderr, such as the progress of a
run, is not kept.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"


def executed(path: Path, folder: Path) -> Any:
    """Return a notebook as it is after all its cells have run in a folder.

    Raises:
        CellExecutionError: a cell has failed.
    """
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as in an activated environment
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=500, kernel_name="python3", record_timing=False, resources=resources).execute()
    return notebook


def as_kept(notebook: Any, folder: Path) -> str:
    """Return the text of the notebook without stderr, and with relative paths of what lies in the folder."""
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return nbformat.writes(notebook).replace(f"{folder}/", "").replace(str(folder), ".") + "\n"


def main() -> None:
    """Run all notebooks, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME.ipynb")
    for name in parser.parse_args().names or [path.name for path in sorted(FOLDER.glob("*.ipynb"))]:
        with tempfile.TemporaryDirectory() as folder:
            text = as_kept(executed(FOLDER / name, Path(folder)), Path(folder))
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
