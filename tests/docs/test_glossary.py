"""The glossary: in order, each term leads to a page, and a key that verl has is not called one of ours."""

from __future__ import annotations

import re
from pathlib import Path

from grpo_dist.plugins.names import LOSS_AGG_MODES

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| \[([^]]+)\]\(([^)]+)\) \| (.+) \| ?(.*) \|$")
VERLS_KEYS = {line.split("\t")[0] for line in (ROOT / "tests/golden/verl_grpo_keys.tsv").read_text().splitlines()}


def rows() -> list[tuple[str, ...]]:
    """Term, link, meaning and key of every row but the table's head."""
    lines = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("|")][2:]
    found = [match.groups() for match in map(ROW.match, lines) if match]
    assert len(found) == len(lines)
    return found


def test_terms_are_in_order_and_there_once() -> None:
    terms = [term.casefold() for term, *_ in rows()]
    assert len(terms) > 50
    assert terms == sorted(set(terms))
    assert {*LOSS_AGG_MODES, "k1", "k2", "k3", "advantage", "group", "staleness", "weight version"} <= set(terms)


def test_meanings_are_one_or_two_sentences() -> None:
    assert [term for term, _, meaning, _ in rows() if len(re.findall(r"[.](?= |$)", meaning)) not in (1, 2)] == []


def test_what_verl_has_is_not_called_our_own() -> None:
    own = [key for _, _, _, keys in rows() if keys.startswith("*own*") for key in re.findall(r"`([\w.]+)`", keys)]
    assert len(own) > 5
    assert set(own) & VERLS_KEYS == set()
