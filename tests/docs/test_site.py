"""The docs site: it builds without a warning, and its reference has every public name (docs/extending.md)."""

import ast
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from tests.architecture.test_public_api import PUBLIC
from tests.docs.code_blocks import blocks
from tests.sources import parsed

ROOT = Path(__file__).parents[2]
# Of these, and of all that is in them, every function and class is public.
WHOLE = ("grpo_dist.algorithms", "grpo_dist.protocol", "grpo_dist.report")
# Its one name is verifiers' own interface, which that package calls.
OF_OTHERS = {"grpo_dist.agents.verifiers_harness"}
DOTTED = re.compile(r"(?<![\w/.])grpo_dist(?:[.:][A-Za-z_]\w*)+")
# Named in pages as `python -m NAME`, and a file of the exported model.
COMMANDS = {"grpo_dist.main", "grpo_dist.json"}

pytestmark = pytest.mark.deep


def build(site: Path, config: Path = ROOT / "mkdocs.yml") -> tuple[int, str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    code, told = build(folder)
    assert code == 0, told
    return folder


@pytest.fixture(scope="module")
def known(site: Path) -> set[str]:
    """The names of objects.inv, behind whose four lines of text there is one line for each object, compressed."""
    lines = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    return {line.split(" ")[0] for line in lines}


def listed(tree: ast.Module) -> set[str]:
    """Its `__all__`, but for its version."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {name for name in ast.literal_eval(node.value) if not name.startswith("__")}
    return set()


def test_every_public_name_is_in_the_reference(known: set[str]) -> None:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    wanted, defined, named = set(), set(), set()
    for path in (ROOT / "grpo_dist").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found = listed(parsed(path)) if name not in OF_OTHERS else set()
        wanted |= {f"{name}.{each}" for each in found}
        if f"{name}.".startswith(tuple(f"{package}." for package in WHOLE)):
            own = [node.name for node in parsed(path).body if isinstance(node, kinds)]
            defined |= {f"{name}.{each}" for each in own if not each.startswith("_")}
            named |= {each for each in found if f"{name}.{each}" in known}
    assert wanted >= {f"{package}.{name}" for package in PUBLIC for name in PUBLIC[package] if name[0] != "_"}
    assert all(sum(each.startswith(package) for each in defined) > 5 for package in WHOLE)
    # Names in capitals are registries and defaults of inner packages.
    assert {name for name in wanted - known if not name.rpartition(".")[2].isupper()} == set()
    assert {name for name in defined - known if name.rpartition(".")[2] not in named} == set()


def test_what_pages_import_and_name_is_in_the_reference(known: set[str]) -> None:
    named: set[str] = set()
    for path in [*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")]:
        page = path.read_text()
        named |= {name.replace(":", ".") for name in DOTTED.findall(page)} - COMMANDS
        for tree in (parsed(block.text) for block in blocks(page) if block.language == "python"):
            found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
            imported = {f"{node.module}.{alias.name}" for node in found for alias in node.names}
            named |= {name for name in imported if name.startswith("grpo_dist.")}
    assert {"grpo_dist.agents.AgentLoop", "grpo_dist.tasks.gsm8k"} <= named
    assert {name for name in named if not any(f"{each}.".startswith(f"{name}.") for each in known)} == set()


def test_links_to_sources_lead_to_the_repository_and_formulas_are_drawn(site: Path) -> None:
    page = (site / "clusters.html").read_text()
    assert 'href="https://github.com/grpo-dist/grpo_dist/blob/main/examples/cluster/slurm.sh"' in page
    page = (site / "algorithms.html").read_text()
    assert 'aria-label="\\nabla D_t"' in page
    assert "arithmatex" not in page


def test_a_broken_link_fails(tmp_path: Path) -> None:
    links = ("../gone.py", "gone.md", "#gone")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A\n\n" + "\n".join(f"[link]({link})" for link in links))
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        f"site_name: a\nrepo_url: https://a.b/c\nhooks: [{ROOT / 'scripts' / 'docs_site.py'}]\n"
        "validation: {links: {not_found: warn, anchors: warn}}\n"
    )
    code, told = build(tmp_path / "site", config)
    assert (code != 0, "3 warnings" in told) == (True, True), told
    assert [link for link in links if link not in told] == []
