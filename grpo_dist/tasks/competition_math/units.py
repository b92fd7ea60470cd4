r"""Units behind a number, and words that multiply it: 5 cm is 5 centimeters and not 5 meters, 6 million is 6000000.

Values are not converted: 100 cm is not 1 m.
"""

from __future__ import annotations

import re
from itertools import groupby

from latex2sympy2_extended.math_normalization import units as counted

# The names of one unit each, the first of which stands for it. Prefixes go before metric ones: km, kilometer.
_METRIC = "m meter metre|g gram gramme gm|L l liter litre|s second sec|W watt|J joule|N newton|V volt|A ampere|Hz|Pa"
_OTHERS = (
    r"in inch|ft foot feet|yd yard|mi mile|lb pound £|oz ounce|gal gallon|min minute|h hr hour|wk week|month|yr year"
    r"|day|dollar $|cent ¢|euro €|deg degree ° \circ \degree|rad radian|mi/h mph|km/h kmph kph kmh|/ per|2 squared"
    r"|3 cubed|half halve"
)
_PREFIXES = {"": "", "k": "kilo", "c": "centi", "m": "milli", "d": "deci", "n": "nano", "M": "mega", "G": "giga"}
_NAMES = {name: names.split()[0] for names in _OTHERS.split("|") for name in names.split()}
for _unit in map(str.split, _METRIC.split("|")):
    for _letter, _prefix in _PREFIXES.items():
        _NAMES |= {(_prefix if len(name) > 2 else _letter) + name: _letter + _unit[0] for name in _unit}
_SCALES = {"half": r"\frac{1}{2}", "dozen": "12", "hundred": "100", "thousand": "10^{3}"}
_SCALES |= {"million": "10^{6}", "billion": "10^{9}", "trillion": "10^{12}"}
_SAYS_NOTHING = {"unit", "2unit", "3unit", "of", "a", "an", "the"}
_COMMON = {"cm", "mm", "km", "kg", "ft", "st", "nd", "rd", "th", "square", "sq", "cubic", "cu"}
_SHORT = {name for name in _NAMES if len(name) < 3 and name.isalpha()} - _COMMON  # may be variables
_WORDS = {word for word in (*counted, *_NAMES, *_SCALES) if word.isalpha() and len(word) > 2} | _COMMON
_NAMES = {name + plural: unit for plural in ("es", "s", "") for name, unit in _NAMES.items()}

_LONG_NAME = rf"(?<![a-zA-Z\\])(?:{'|'.join(sorted(_WORDS))})(?:e?s)?(?![a-zA-Z])\.?"
_SHORT_NAME = rf"(?<=[\s~/,;:])(?:{'|'.join(sorted(_SHORT))})s?(?![a-zA-Z])"
_TEXT = r"\\(?:text\w*|mathrm|mbox)\s*\{(?!\s*(?:and|or)\b)[^{}]*\}|\^\s*\{?\s*\\circ(?![a-zA-Z])\s*\}?|[°£¢€]|\\degree"
_UNIT, _SPACE = rf"(?:{_TEXT}|{_LONG_NAME}|{_SHORT_NAME})(?:\^\{{?-?\d\}}?)?", r"(?:[\s~]|\\[,;: ])"
_UNITS = re.compile(rf"(?<=[\w)}}\]!.\s]){_SPACE}*{_UNIT}(?:(?:{_SPACE}|[/*]|\\cdot(?![a-zA-Z]))*{_UNIT})*$")
# No unit of a value, but of what its sine is taken.
ANGLE = re.compile(r"(?:\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])|\be\^).*(?:\\circ|\\degree|°)")


def without_unit(text: str, *, abbreviated: bool) -> tuple[str, str]:
    r"""Return a text in LaTeX, times the million behind it, and its unit; "5 m" has one only if it is `abbreviated`."""
    match = _UNITS.search(text)
    if match is None or not match.start() or ANGLE.search(text):
        return text, ""
    number, unit = text[: match.start()], match.group().strip(" ~")
    if unit.split("/")[0] in _SHORT and (not abbreviated or re.search(r"(?<![\\a-zA-Z])[a-zA-Z]", number)):
        return text, ""
    unit = re.sub(r"\b(?:sq(?:uare)?|(cu(?:bic)?))\b\.?\s*([a-zA-Z]+)", lambda m: m[2] + "23"[bool(m[1])], unit)
    names = [_name(token) for token in re.findall(r"\\circ|\\degree|(?<![\\a-zA-Z])[a-zA-Z]+|[/°$£¢€]|-?\d", unit)]
    for scale in filter(_SCALES.get, names):
        number = re.sub(r",(?=\d{3})", "", number) + rf" \cdot {_SCALES[scale]}"
    return number, "".join(name for name, _ in groupby(names) if name not in {*_SCALES, *_SAYS_NOTHING})


def _name(word: str) -> str:
    """Return the first name of a unit; one that the tables lack is its own, in lower case and the singular."""
    known = _NAMES.get(word) or _NAMES.get(word.lower() if len(word) > 1 else "")
    return known or re.sub(r"(?<=..)e?s?$", "", word.lower())
