"""README.md and README_zh.md say the same: section by section, what is no prose is equal in both."""

import re
from pathlib import Path
from typing import Any

import pytest

import grpo_dist

ROOT = Path(grpo_dist.__file__).parents[1]
ENGLISH = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README_zh.md").read_text()
# Of each page, the line that leads to the other one.
ENGLISH_SWITCH = "English | [简体中文](README_zh.md)\n"
CHINESE_SWITCH = "[English](README.md) | 简体中文\n"

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
NUMBER = re.compile(r"\d+(?:\.\d+)*")


def section(level: str, text: str) -> dict[str, Any]:
    """What a translation leaves as it is. Words change places within a section; blocks, rows and items do not."""
    prose = FENCE.sub("", text)
    rows = [len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0 for line in prose.splitlines()]
    return {
        "level": level,
        "blocks": FENCE.findall(text),
        "links": sorted(LINK.findall(prose)),
        "code": sorted(CODE.findall(prose)),
        "numbers": sorted(NUMBER.findall(CODE.sub("", LINK.sub("]", prose)))),
        # A 0 ends a table; how many lines stand between two of them depends on the wrapping.
        "tables": [row for row, before in zip(rows, [0, *rows], strict=False) if row or before],
        "items": sum(line.startswith("- ") for line in prose.splitlines()),
    }


def sections(text: str) -> list[dict[str, Any]]:
    """Of a page, in order. What a fence holds is no heading."""
    fences = [match.span() for match in FENCE.finditer(text)]
    headings = [
        match
        for match in re.finditer(r"^(#+) .*$", text, re.MULTILINE)
        if not any(start < match.start() < end for start, end in fences)
    ]
    ends = [*(heading.start() for heading in headings[1:]), len(text)]
    starts = [("", text[: headings[0].start()])] if headings[0].start() else []
    found = [(heading[1], text[heading.start() : end]) for heading, end in zip(headings, ends, strict=True)]
    return [section(level, part) for level, part in starts + found]


def without(switch: str, page: str) -> str:
    """The page without its language switch, which is above everything but the title."""
    title, rest = page.split("\n\n", 1)
    assert rest.startswith(switch)
    return title + "\n\n" + rest.removeprefix(switch)


def test_each_leads_to_the_other_and_both_say_the_same() -> None:
    english, chinese = sections(without(ENGLISH_SWITCH, ENGLISH)), sections(without(CHINESE_SWITCH, CHINESE))
    assert len(english) == len(chinese) > 5
    for of_english, of_chinese in zip(english, chinese, strict=True):
        assert of_chinese == of_english


def test_the_chinese_one_is_in_chinese() -> None:
    names = {"grpo_dist", "Apache-2.0。"}
    lines = [line for line in FENCE.sub("", CHINESE).splitlines() if line and not line.startswith("|--")]
    assert [line for line in lines if not re.search(r"[\u4e00-\u9fff]", line) and line.lstrip("# ") not in names] == []


PAGE = """# Name

Words of 2 lines, [one](a.md) and [two](b.md) with `key`.

## Section

```bash
# a comment
make test
```

- An item.

| a | b |
|---|---|
| 1 | `x` |
"""


def test_words_may_change_and_change_places() -> None:
    words = "Words of 2 lines, [one](a.md) and [two](b.md) with `key`."
    other = PAGE.replace(words, "`key`：[二](b.md)\n和[一](a.md)，2 行。")
    other = other.replace("## Section", "## 一节").replace("An item.", "一项。").replace("| a | b |", "| 甲 | 乙 |")
    assert sections(other) == sections(PAGE)
    assert [each["level"] for each in sections(PAGE)] == ["#", "##"]


@pytest.mark.parametrize(
    ("of_page", "of_other"),
    [
        ("## Section", "### Section"),
        ("## Section\n", "Section\n"),
        ("make test\n", "make test   # a word\n"),
        ("- An item.", "- An item.\n\n```bash\nmake bench\n```"),
        ("```bash", "```"),
        ("[two](b.md)", "two"),
        ("[two](b.md)", "[two](c.md)"),
        ("An item.", "[An item.](b.md)"),
        ("An item.", "![An item.](b.svg)"),
        ("An item.", "An item.\n- Another."),
        ("`key`", "`other`"),
        ("of 2 lines", "of 3 lines"),
        ("| 1 | `x` |\n", ""),
        ("| 1 | `x` |", "| 1 | `x` | |"),
        ("| a | b |", "\n| a | b |\n|---|---|\n\n| a | b |"),
    ],
)
def test_what_one_has_and_the_other_has_not_is_seen(of_page: str, of_other: str) -> None:
    assert of_page in PAGE
    assert sections(PAGE.replace(of_page, of_other)) != sections(PAGE)


def test_a_page_without_the_switch_is_seen() -> None:
    with pytest.raises(AssertionError):
        without(ENGLISH_SWITCH, PAGE)
