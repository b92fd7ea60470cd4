"""The pages for users name keys and files that exist, and their links lead somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import grpo_dist
from grpo_dist.config.keys import foreign_key, is_free_form, leaf_keys, section_keys
from grpo_dist.config.schema import RunConfig

ROOT = Path(grpo_dist.__file__).parents[1]
PLACES = ("*.md", "docs/*.md", "examples/*/README.md", "skills/*/SKILL.md")
PAGES = sorted(page for place in PLACES for page in ROOT.glob(place))
FOR_USERS = ("tutorial", "common_keys", "from_trl", "from_verl", "glossary", "troubleshooting")
KEY = re.compile(rf"`(?:\+\+?)?((?:{'|'.join(RunConfig.model_fields)})\.[\w.]+)")


def keys(text: str) -> Iterator[str]:
    """The keys that stand in backticks, with those that continue the one before: `a.b.c`, `.d` is a.b.d."""
    before = ""
    for quoted in re.findall(r"`([^`\n]+)`", text):
        if found := KEY.match(f"`{quoted}"):
            before = found[1]
            yield before
        elif re.fullmatch(r"\.[a-z_]+", quoted) and before:
            yield before.rpartition(".")[0] + quoted


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", FOR_USERS)
def test_every_key_is_one(page: str) -> None:
    known = {*leaf_keys(RunConfig), *section_keys(RunConfig)}
    named = set(keys((ROOT / "docs" / f"{page}.md").read_text()))
    assert named
    wrong = {key for key in named - known if not is_free_form(key, RunConfig) and foreign_key(key) is None}
    assert wrong == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(path.read_text()), f"{target}: no such heading"
