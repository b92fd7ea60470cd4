"""How numbers stand in texts: signs that look like a minus, and where a number begins and ends."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from numbers import Real
from typing import Any

# Hyphens, figure dash, en dash and the minus signs of Unicode: models write all of them for a minus.
MINUS_SIGNS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-")


def contains(text: str, part: str) -> bool:
    """Return whether a part stands in a text as whole words and whole numbers.

    5 stands in "-5", "5%", "2+3=5" and "3, 5", not in 2.5, 1/5, 10:5, 2^5 and 15; 1 not in 1,000, nor does 200 stand in
    1,200.
    """
    before, after = r"(?<!\w)", r"(?!\w)"
    if part[:1].isdecimal():
        before += r"(?<!\d[./⁄:^])" + (r"(?<!\d,)" if re.match(r"\d{3}(?!\d)", part) else "")
    if part[-1:].isdecimal():
        after += r"(?![./⁄:^]\d|,\d{3}(?!\d))"
    return re.search(before + re.escape(part) + after, text) is not None


def accepted_answers(ground_truth: Any) -> list[str]:
    """Return the texts of a ground truth: a text or a number, or each one of a list, which are alternatives.

    Raises:
        ValueError: it, or one of the list, is something else (an object, null, nan), or blank text.
    """
    accepted = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not accepted or not all(_is_answer(each) for each in accepted):
        raise ValueError(
            f"ground_truth {ground_truth!r} holds no answer; it must be a text, a number, or a list of these"
        )
    return [str(each).strip() for each in accepted]


def _is_answer(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, int) or (isinstance(value, Real | Decimal) and math.isfinite(value))
