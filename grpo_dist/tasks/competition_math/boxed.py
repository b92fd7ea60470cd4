r"""The last `\boxed{...}` of a text, where mathematics data sets and the models trained on them put the answer."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BARE = re.compile(
    r"\\[a-zA-Z]+(?:\{[^{}$]*\})*|[^\s$\\{}]+"
)  # what stands in a box without braces: \boxed5, \boxed \pi


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` or `\fbox{...}`, stripped.

    Braces inside are balanced; `\{` and `\}` are text. MATH has boxes without braces (`\boxed 5`): those hold one word.

    Returns:
        The content; None where there is no box, or the last one is never closed.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if not text.startswith("{", start):
        bare = _BARE.match(text, start)
        return bare.group() if bare else None
    end = _closing_brace(text, start)
    return None if end is None else text[start + 1 : end].strip()


def _closing_brace(text: str, start: int) -> int | None:
    """Where the brace that opens at `start` is closed."""
    depth, position = 0, start
    while position < len(text):
        if text[position] == "\\":
            position += 1  # what follows is no brace of its own
        elif text[position] in "{}":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return position
        position += 1
    return None
