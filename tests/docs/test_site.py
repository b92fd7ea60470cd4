"""The docs site: it builds without a warning, and its reference has every public name (docs/extending.md)."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.test_public_api import PUBLIC
from tests.docs.code_blocks import blocks
from tests.sources import parsed

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "grpo_dist"
# Of these, and of all that is in them, every function and class is public.
WHOLE = ("grpo_dist.algorithms", "grpo_dist.protocol", "grpo_dist.report")
# Its one name is verifiers' own interface, which that package calls.
OF_OTHERS = {"grpo_dist.agents.verifiers_harness"}
DOTTED = re.compile(r"(?<![\w/.])grpo_dist(?:[.:][A-Za-z_]\w*)+")
# Named in pages as `python -m NAME`, and a file of the exported model.
COMMANDS = {"grpo_dist.main", "grpo_dist.json"}


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


def modules() -> Iterator[tuple[str, ast.Module]]:
    """The package's modules by name."""
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name, parsed(path)


def listed(tree: ast.Module) -> set[str]:
    """What a module has in `__all__`, but for its version."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {name for name in ast.literal_eval(node.value) if not name.startswith("__")}
    return set()


def defined(tree: ast.Module) -> set[str]:
    """The functions and classes of a module whose names do not begin with an underscore."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def imported(source: str) -> set[str]:
    """What code imports of the package, but for the package itself."""
    found = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.ImportFrom) and node.module]
    names = {f"{node.module}.{alias.name}" for node in found for alias in node.names}
    return {name for name in names if name.startswith("grpo_dist.")}


@pytest.mark.deep
def test_every_listed_name_is_in_the_reference(site: Path) -> None:
    wanted = {f"{name}.{each}" for name, tree in modules() if name not in OF_OTHERS for each in listed(tree)}
    assert wanted >= {f"{package}.{name}" for package in PUBLIC for name in PUBLIC[package] if name[0] != "_"}
    # Names in capitals are registries and defaults of inner packages.
    assert {name for name in wanted - documented(site) if not name.rpartition(".")[2].isupper()} == set()


@pytest.mark.deep
def test_every_function_of_whole_packages_is_in_the_reference(site: Path) -> None:
    """Where it is defined, or as a name of the package that lists it."""
    known = documented(site)
    for package in WHOLE:
        within = [(name, tree) for name, tree in modules() if f"{name}.".startswith(f"{package}.")]
        wanted = {(name, each) for name, tree in within for each in defined(tree)}
        assert len(wanted) > 5
        named = {each for name, tree in within for each in listed(tree) if f"{name}.{each}" in known}
        assert {f"{name}.{each}" for name, each in wanted if each not in named} - known == set()


@pytest.mark.deep
def test_what_pages_import_and_name_is_in_the_reference(site: Path) -> None:
    pages = [page.read_text() for page in [*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")]]
    named = {name.replace(":", ".") for page in pages for name in DOTTED.findall(page)} - COMMANDS
    imports = {
        name for page in pages for block in blocks(page) if block.language == "python" for name in imported(block.text)
    }
    assert {"grpo_dist.agents.AgentLoop", "grpo_dist.tasks.gsm8k"} <= named | imports
    known = documented(site)
    assert {name for name in named | imports if not any(f"{each}.".startswith(f"{name}.") for each in known)} == set()


@pytest.mark.deep
def test_links_to_sources_lead_to_the_repository_and_formulas_are_drawn(site: Path) -> None:
    page = (site / "clusters.html").read_text()
    assert 'href="https://github.com/grpo-dist/grpo_dist/blob/main/examples/cluster/slurm.sh"' in page
    page = (site / "algorithms.html").read_text()
    assert 'aria-label="\\nabla D_t"' in page
    assert "arithmatex" not in page


@pytest.mark.deep
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
