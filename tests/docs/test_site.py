"""The docs site: it builds without a warning, and its reference has every public name."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from tests.architecture.test_public_api import PUBLIC

ROOT = Path(__file__).parents[2]


def build(site: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def documented(site: Path) -> set[str]:
    """The names of objects.inv: four lines of text, then one line for each object, compressed."""
    lines = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    return {line.split(" ")[0] for line in lines}


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_is_in_the_reference(site: Path, package: str) -> None:
    wanted = {f"{package}.{name}" for name in PUBLIC[package] if not name.startswith("__")}
    assert wanted
    assert wanted - documented(site) == set()


def test_links_to_sources_lead_to_the_repository_and_formulas_are_drawn(site: Path) -> None:
    page = (site / "clusters.html").read_text()
    assert 'href="https://github.com/grpo-dist/grpo_dist/blob/main/examples/cluster/slurm.sh"' in page
    page = (site / "algorithms.html").read_text()
    assert 'aria-label="\\nabla D_t"' in page
    assert "arithmatex" not in page


@pytest.mark.parametrize("link", ["../gone.py", "gone.md", "#gone"])
def test_a_broken_link_fails(tmp_path: Path, link: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A\n\n[link]({link})\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        f"site_name: a\nrepo_url: https://a.b/c\nhooks: [{ROOT / 'scripts' / 'docs_site.py'}]\n"
        "validation: {links: {not_found: warn, anchors: warn}}\n"
    )
    done = build(tmp_path / "site", config)
    assert done.returncode != 0
    assert link in done.stderr + done.stdout
