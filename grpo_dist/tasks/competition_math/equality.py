r"""Whether two answers in LaTeX are the same, as text or else as mathematics.

The math-verify library (https://github.com/huggingface/Math-Verify) reads and compares, without three of its habits:

- A text that its grammar cannot read as a whole is compared as text. The library goes on with a number that stands in
  it, and drops dots, primes and whatever looks like a unit at the end.
- Numbers are compared exactly. The library rounds decimals to 6 places and takes differences below 1e-15 for 0; here
  they are fractions, and one of them is also right for a value that it rounds correctly (`_rounds`).
- Its time limits are for seconds on the clock; here CPU time and memory are limited (`rewards.scorer.limited`).

Nor does it tell R from r, 120_5 from 120_6, an angle in degrees from radians, and BAC from CAB, for it a product.
"""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from functools import lru_cache
from itertools import groupby
from typing import Any

from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.math_normalization import units as counted
from sympy import Basic, Eq, Float, MatrixBase, MatrixExpr, Rational, multiplicity, simplify
from sympy.core.cache import clear_cache
from sympy.core.evalf import PrecisionExhausted

from grpo_dist.rewards.format import MINUS_SIGNS
from grpo_dist.rewards.scorer import TooCostly, limited

CPU_S = 5.0  # math-verify's own limit for each of reading and comparing
MEMORY_BYTES = 1 << 30
MOST_CHARACTERS = 500  # of an answer; longer ones are compared as text
# Relative errors: of a decimal that stands for another value (0.333333 for 1/3, and not 0.33333), and of arithmetic
# with float64 (0.30000000000000004 for 0.3).
CLOSE, FLOAT = Rational(1, 10**6), Rational(1, 10**15)
MOST_DIGITS = 500  # to which the difference of two values is worked out; below, they are one
# What may be written differently without another meaning, and how it is compared as text.
_WRITTEN = (
    (re.compile(r"\\[dt](?=frac|binom)"), r"\\"),
    (re.compile(r"\\(?:text\w*|mathrm|mbox)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\(?:cdot|times)(?![a-zA-Z])"), "*"),
    (re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[,;:! ]|(?<![0-9])[\s~]+|[\s~]+(?![0-9])"), ""),
    (re.compile(r"\{(\w)\}"), r"\1"),
)
# What the library misreads, or plain text has, and how it reads it well.
_INSIDE = r"\s*\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)"
_READ = (
    (re.compile(r"\*\*"), "^"),
    (re.compile(rf"\^{_INSIDE}"), r"^{\1}"),
    (re.compile(r"(?<![\\a-zA-Z])sqrt\s*(\d+(?:\.\d+)?)"), r"\\sqrt{\1}"),
    (re.compile(rf"(?:\\|(?<![a-zA-Z]))sqrt{_INSIDE}"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\a-zA-Z])(sqrt|pi|sin|cos|tan|ln|log)(?![a-zA-Z])"), r"\\\1 "),
    (re.compile(r"\\(?:text\w*|mathrm)\s*\{\s*([ei])\s*\}"), r" \1"),
    (re.compile(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?![\w.])"), r"\1 \\times 10^{\2}"),
    (re.compile(r"(?<![\d.,/])(\d+)[\s~]+(\d+)/(\d+)(?![\d.])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<=\d)(?:\s|~|\\[ :])(?=\d{3}(?!\d))"), ""),
    (re.compile(r"°|\\degree(?![a-zA-Z])"), r"^\\circ "),
)
# What its normalisation loses, and numbers side by side, of which its grammar makes a sum or a product.
_LOST = re.compile(r"\\[lcdv]?dots|\.\.\.|…|(?<=[\w)\]}])['′’]|\\prime(?![a-zA-Z])|(?<![\^_{])\d\)?\s*_")
_CASES = ConversionConfig(lowercase_symbols=False)
_BASED = re.compile(r"(?<![\w.}^\\])(\d+|\(\d+\))_(?:\{\s*(\d+)\s*\}|(\d+))")
_SIGNS = MINUS_SIGNS | {ord("∞"): r"\infty ", ord("√"): " sqrt", ord("⁄"): "}{"}
_APART = re.compile(r"\d[\s~]+\d|\d\.\d+\.")
_UNDONE = re.compile(r"\\(?:int|sum|prod|lim)(?![a-zA-Z])")
_EQUALS = re.compile(r"=(?![^{}]*\})")  # not those below a sum
_PERCENT = re.compile(r"\s*(?:\\?%|(?:\\text\w*\s*\{\s*)?\b(?:percent|percentage|pct)\b\s*\}?)$")
# Words alone: names and orders. Three letters in a row, or two capital ones, are one, and no product.
_WORDS = re.compile(r"(?=.*(?:[A-Z]\s*[A-Z]|[^\W\d_]{3}|\b(?i:no|on)\b))(?:[^\W\d_]|[\s,;.()])+", re.DOTALL)
_COMMANDS = re.compile(r"\\(?:text\w*|mathrm|mbox|angle|triangle)(?![a-zA-Z])|[{}]")
_CHOICE = re.compile(r"\(?([A-J])[).:](?!.*(?<![a-zA-Z])[A-J](?![a-zA-Z]))")  # "A) 5"
# A sign of money in front of a number, which ends the text or has the name of another unit behind it.
_MONEY = re.compile(r"^\$?([-+]?)\s*\\?([$€£])([^$€£]*?[^$€£\s\\])(?=\s*(?:\\(?:text|mathrm|mbox)|/|per\b|\$?$))")


@lru_cache(maxsize=1024)  # the responses of a group have one truth, and often one answer
def same_value(answer: str, truth: str) -> bool:
    r"""Return whether an answer in LaTeX is the truth.

    It is compared as text only, apart from spaces, \left, \text and \cdot, where one of the two cannot be read as a
    whole, where both are words, where it is longer than `MOST_CHARACTERS`, where it is an integral, sum, product or
    limit and the truth has none, and where mathematics would take longer than `CPU_S` or more than `MEMORY_BYTES`.
    """
    if len(answer) > MOST_CHARACTERS:
        return answer.split() == truth.split()
    answer, truth = plain(answer), plain(truth)
    if not answer or _normal(answer) == _normal(truth):
        return bool(answer)
    if (choice := _CHOICE.match(_COMMANDS.sub("", answer))) and choice[1] == _normal(truth).strip("()"):
        return True
    if (words := _words(answer)) and (right_words := _words(truth)):
        return words == right_words
    if _UNDONE.search(_EQUALS.split(answer)[-1]) and not _UNDONE.search(truth):
        return False
    try:
        with limited(cpu_s=CPU_S, memory_bytes=MEMORY_BYTES):
            return _same_mathematics(answer, truth)
    except (TooCostly, ValueError):  # or what are no digits of their base
        return False
    finally:
        clear_cache()  # of a thousand values, each as large as the answers make it


def plain(text: str) -> str:
    """Return the text without signs of money and of mathematics, forced spaces and surrounding white space.

    Lines that are set one below the other become one line: they go on with "=", or are a list.
    """
    text = re.sub("[⁰¹²³⁴-⁹⁻]+", r"^{\g<0>}", re.sub("[¼-¾⅐-⅞]", r"\\frac{\g<0>}", text))
    text = unicodedata.normalize("NFKC", text).translate(_SIGNS).strip().rstrip("\\")  # digits of any width, 1⁄2 for ½
    text, number = _LINES.subn("", text)
    if number and "\\begin" not in text:  # no matrix in it
        text = text.replace("&", "").strip().removesuffix(r"\\")
        text = re.sub(r"\s*\\\\\s*", ", ", re.sub(r"\s*\\\\\s*(?==)", " ", text))
    text = re.sub(r"\\[!,;]\s*|(?<!\\)\\[][()]", "", text).strip().removesuffix(".").strip()
    return re.sub(r"\\?[$€£¥](?!\})", "", _MONEY.sub(r"\1\3\\text{\2}", text)).strip()


_LINES = re.compile(r"\\(?:begin|end)\s*\{(?:equation|align|aligned|gather|gathered|multline|split)\*?\}")


def _normal(text: str) -> str:
    """Return the text without spacing, sizes of brackets and braces around one character, and with one product sign."""
    for written, normal in _WRITTEN:
        text = written.sub(normal, text)
    return text


def _words(text: str) -> list[str] | None:
    """Return the words of a text that has nothing else, sorted if they are a list."""
    text = _COMMANDS.sub("", text)
    folded = re.sub(r"\b(?:[A-Z]?[a-z]+|[A-Z]+)\b", lambda found: found[0].lower(), text)
    words = ["".join(part.split()) for part in re.split(r"[,;]|\b(?:and|or)\b", folded)]
    return (words if "(" in text else sorted(words)) if _WORDS.fullmatch(text) else None


def _same_mathematics(answer: str, truth: str) -> bool:
    (given, is_share), (expected, expects_share) = (_PERCENT.subn("", text) for text in (answer, truth))
    given, unit = without_unit(given, abbreviated=True)
    expected, expected_unit = without_unit(expected, abbreviated=bool(unit))
    (given, bases), (expected, expected_bases) = map(_without_bases, (given, expected))
    if bases != expected_bases or (unit and expected_unit and unit != expected_unit):
        return False
    is_real = not (grader.should_treat_as_complex(given) or grader.should_treat_as_complex(expected))
    value, right = _read(given, is_real), _read_truth(expected, is_real)
    if value is None or right is None:
        return False
    if _equal(right, value):
        return True
    if is_share == expects_share:
        return False
    try:  # 50 % is 0.5 as well
        return _equal(right, value / 100) if is_share else _equal(right / 100, value)
    except TypeError:
        return False


def _without_bases(text: str) -> tuple[str, set[int]]:
    """Return a text with its numbers in the decimal system, and the bases that they had: 35 and {5} for 120_5."""
    numbers = [(found[1].strip("()"), int(found[2] or found[3])) for found in _BASED.finditer(text)]
    values = iter([str(int(*number)) for number in numbers])
    return _BASED.sub(lambda _: next(values), text), {base for _, base in numbers}


def _read(text: str, is_real: bool) -> Any:
    """Return what the library's grammar reads, all of the text; None where it cannot, or would lose a part."""
    for written, read in _READ:
        text = written.sub(read, text)
    if _LOST.search(text):
        return None
    steps = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    try:
        text = normalize_latex(text, config=steps)
        value = (
            None if _APART.search(text) else latex2sympy(text, None, is_real, bool(ANGLE.search(text)), None, _CASES)
        )
    except Exception:  # noqa: BLE001 - its grammar raises Exception, its conversion what it happens to meet
        return None
    if isinstance(value, Eq) and value.lhs.is_number and not value.rhs.is_number:
        value = Eq(value.rhs, value.lhs, evaluate=False)
    return value if isinstance(value, Basic | MatrixBase) else None


_read_truth = lru_cache(maxsize=1024)(_read)


def _equal(right: Any, value: Any) -> bool:
    try:
        return _holds(value) and bool(grader.sympy_expr_eq(right, value, 6, 15, allow_set_relation_comp=True))
    except Exception:  # noqa: BLE001 - sympy raises whatever it happens to meet: they cannot be compared
        return False


# The library's grader as a module of its own, so that it compares in another way here and for nobody else.
_spec: Any = importlib.util.find_spec("math_verify.grader")
grader: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(grader)
_compare_matrices = grader.sympy_numeric_eq  # goes through their elements


def _compare(a: Any, b: Any, *precisions: int) -> bool:
    """Compare two values in place of the library's own comparisons."""
    matrices = MatrixBase | MatrixExpr
    if isinstance(a, matrices) and isinstance(b, matrices):
        return bool(_compare_matrices(a, b, *precisions))
    return _same_expression(a, b)


grader.sympy_numeric_eq = grader.sympy_compare_symbols = _compare
grader.sympy_symbolic_eq = lambda a, b: False  # what it tries next


def _same_expression(a: Any, b: Any) -> bool:
    """Return whether two expressions are equal, exactly or because one is a decimal that rounds the other."""
    exact_a, exact_b = _exact(a), _exact(b)
    difference = exact_a - exact_b
    if difference.is_zero:
        return True
    if difference.free_symbols:
        return bool(simplify(difference).is_zero)
    if (a.has(Float) and _rounds(exact_a, exact_b)) or (b.has(Float) and _rounds(exact_b, exact_a)):
        return True
    if difference.is_Rational:
        return False
    try:
        return bool(difference.evalf(15, maxn=MOST_DIGITS, strict=True) == 0)
    except PrecisionExhausted:
        return True


def _exact(value: Any) -> Any:
    return value.xreplace({decimal: Rational(str(decimal)) for decimal in value.atoms(Float)}).doit()


def _rounds(decimal: Any, value: Any) -> bool:
    """Return whether a decimal is a value to its last place, rounded or cut off, and close to it."""
    if not decimal.is_Rational:
        return False
    places = max(multiplicity(2, decimal.q), multiplicity(5, decimal.q))
    if 10**places % decimal.q:
        return False
    if not places and decimal:
        places = -min(multiplicity(2, decimal.p), multiplicity(5, decimal.p))
    unit, error, size = Rational(10) ** -places, abs(decimal - value), abs(value)
    is_no_longer = (value / unit).is_Integer  # a decimal itself
    return bool(error <= size * FLOAT) or bool(not is_no_longer and error <= unit and error <= size * CLOSE)


def _holds(value: Any) -> bool:
    """Return whether the equations of numbers in a value are true, up to 1 %: x=3=4 is no way to write 4."""
    sides = [equation.args for equation in value.atoms(Eq) if equation.lhs.is_number and equation.rhs.is_number]
    return all(abs((left - right).evalf()) <= abs(left.evalf()) / 100 for left, right in sides)


# --- units: 5 cm is 5 centimeters and not 5 meters, 6 million is 6000000; none is converted: 100 cm is not 1 m -------
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
_LONG = {word for word in (*counted, *_NAMES, *_SCALES) if word.isalpha() and len(word) > 2} | _COMMON
_NAMES = {name + plural: unit for plural in ("es", "s", "") for name, unit in _NAMES.items()}

_LONG_NAME = rf"(?<![a-zA-Z\\])(?:{'|'.join(sorted(_LONG))})(?:e?s)?(?![a-zA-Z])\.?"
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
