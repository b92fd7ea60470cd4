"""Take the pictures of the report in docs/images: the curves of a run, and a group of its responses.

usage: python -m scripts.screenshots RUN_DIR [FOLDER]

It needs Playwright and Chromium, which `make test-browser` installs, and a run such as that of README.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from grpo_dist.cli.report import main as write_report

SIZE = {"width": 1200, "height": 860}


def take(browser: Any, run_dir: Path, folder: Path) -> list[Path]:
    """Write a run's report, open it and keep what it shows of two tabs: the files of the pictures."""
    if write_report([str(run_dir)]):
        raise SystemExit(f"{run_dir}: there is no report of it")
    files = []
    for tab in ("curves", "rollouts"):
        page = browser.new_context(viewport=SIZE, color_scheme="light").new_page()
        page.goto(f"{(run_dir / 'report.html').absolute().as_uri()}#{tab}")
        page.wait_for_selector("body[data-ready=yes]")
        files.append(folder / f"report_{tab}.png")
        page.screenshot(path=files[-1])
    return files


if __name__ == "__main__":
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        images = Path(sys.argv[2] if len(sys.argv) > 2 else "docs/images")
        print(*take(chromium, Path(sys.argv[1]), images), sep="\n")
