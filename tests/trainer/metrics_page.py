"""docs/metrics.md as tests see it: the names in its tables."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented_names(text: str) -> list[str]:
    """The names in back quotes of the first column of all tables."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def pattern(name: str) -> re.Pattern[str]:
    """What a documented name stands for: its parts in capitals, such as SOURCE or n of `mean@N`, are anything."""
    return re.compile(re.sub(r"[A-Z]+", "[^@]+", re.escape(name)))


def undocumented(names: set[str], text: str) -> list[str]:
    """Those of the names that no table explains."""
    patterns = [pattern(name) for name in documented_names(text)]
    return sorted(name for name in names if not any(each.fullmatch(name) for each in patterns))
