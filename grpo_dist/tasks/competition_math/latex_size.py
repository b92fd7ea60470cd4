r"""What a LaTeX text would cost to evaluate, from the text alone: an upper bound, before any library looks at it.

A few characters name numbers that no computer holds (`2^{9999!}`) or polynomials of very many terms
(`(x+y+z)^{999}`), and a computer algebra system begins to compute them all the same. Here every subexpression gets
three bounds:

    bits      binary logarithm of the absolute value of its integers, symbols taken as 2
    degree    as a polynomial in its symbols
    terms     binary logarithm of the number of terms, multiplied out

The reader is tolerant: it takes any text, knows numbers, symbols, groups, powers, factorials, fractions, roots and
binomials, and takes the larger value where a text can be read in several ways (powers of powers from the right). It
knows nothing of what sums, integrals, limits and identities of other functions than those of angles cost.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass

MOST_BITS = 100_000  # 30,000 digits: 10^{30000}, 2^{99999} and 7000! are below
MOST_DEGREE = 10_000
MOST_TERMS = 512  # about what is multiplied out in seconds
_LARGEST = 1e15  # bounds beyond are all the same, and sums of them stay finite
MOST_NESTED = 40
_TOKEN = re.compile(
    r"(?P<number>(?:[0-9](?:(?:\s|~|\\[: ])*[0-9]|,[0-9]{3}(?![0-9]))*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<open>\\begin\s*\{[^{}]*\}|\\left\s*(?:\\(?:[{|]|[a-zA-Z]+)|.)|\\l(?:floor|ceil|[vV]ert|brace)\b|\\\{|[({\[])"
    r"|(?P<close>\\end\s*\{[^{}]*\}|\\right\s*(?:\\(?:[}|]|[a-zA-Z]+)|.)|\\r(?:floor|ceil|[vV]ert|brace)\b|\\\}|[)}\]])"
    r"|(?P<text>\\(?:text\w*|math\w+|mbox|operatorname)\s*\*?\s*\{[^{}]*\})"
    r"|(?P<join>\\(?:pm|mp|leq?|geq?|neq?|cup|cap|in)(?![a-zA-Z])|\\\\|[-+,;=<>&±∓−])"
    r"|(?P<command>\\[a-zA-Z]+)|(?P<symbol>[a-zA-Z])|(?P<power>\^|\*\*)|(?P<factorial>!)|(?P<index>_)"
    r"|(?P<space>\s+|~|\\[: ])|(?P<sign>\\.|.)",
    re.DOTALL,
)
_TIMES = {"\\cdot", "\\times", "\\div", "*", "/", ":"}
_PAIRS = {"\\frac", "\\dfrac", "\\tfrac", "\\cfrac"}
_BINOMIALS = {"\\binom", "\\dbinom", "\\tbinom"}

_ANGLES = {f"\\{name}{h}" for name in ("sin", "cos", "tan", "cot", "sec", "csc") for h in ("", "h")}
_MATRIX = re.compile(r"\{\s*(?:eye|zeros|ones)\s*\}")  # matrices of any size, made while they are read


@dataclass(frozen=True)
class Size:
    """Upper bounds: binary logarithm of the value, degree, binary logarithm of the number of terms."""

    bits: float = 0.0
    degree: float = 0.0
    terms: float = 0.0

    @property
    def too_large(self) -> bool:
        """Whether it must not be evaluated."""
        return self.bits > MOST_BITS or self.degree > MOST_DEGREE or self.terms > math.log2(MOST_TERMS)

    @property
    def value(self) -> float:
        """The largest absolute value it may have, at least 1."""
        return 2.0 ** min(self.bits, math.log2(_LARGEST))


_ONE, _SYMBOL, _ENDLESS = Size(), Size(1.0, 1.0), Size(_LARGEST, _LARGEST, _LARGEST)


def latex_size(text: str) -> Size:
    """The bounds of a text: of all parts together where it is a list, an equation or a matrix."""
    tokens = [(str(match.lastgroup), match.group()) for match in _TOKEN.finditer(text)]
    reader = _Reader([token for token in tokens if token[0] != "space"])
    parts = [reader.group()]
    while reader.position < len(reader.tokens):  # behind a bracket too many
        parts.append(reader.group())
    return reader.sum_of(parts)


class _Reader:
    """Reads tokens from left to right; `position` is the next one."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens, self.position, self.depth = tokens, 0, 0
        names = {content for kind, content in tokens if kind in ("symbol", "command", "text")}
        self.num_symbols = len(names - _TIMES - _PAIRS - _BINOMIALS - {"\\choose"})

    def group(self) -> Size:
        """Up to the bracket that closes it, and that too: a sum of products of factors."""
        products: list[list[Size]] = [[]]
        indices = []
        while (kind := self._kind()) not in ("close", "end"):
            if self.tokens[self.position][1] == "\\choose":
                self.position += 1
                return self._binomial(self._sum(products), self.group())
            if kind in ("power", "factorial"):
                products = self._apply(kind, products)
            elif kind == "index":
                self.position += 1
                indices.append(self._argument())
            elif kind in ("join", "sign"):
                if kind == "join":
                    products.append([])
                self.position += 1
            else:
                products[-1].append(self._factor())
        self.position += 1
        size = self._sum(products)
        return Size(max([size.bits, *(index.bits for index in indices)]), size.degree, size.terms)

    def sum_of(self, parts: Sequence[Size]) -> Size:
        """The bounds of a sum."""
        if len(parts) < 2:
            return parts[0] if parts else _ONE
        bits = max(part.bits for part in parts) + math.log2(len(parts))
        most = max(part.terms for part in parts)
        terms = most + math.log2(sum(2.0 ** (part.terms - most) for part in parts))
        return self._capped(bits, max(part.degree for part in parts), terms)

    def product_of(self, factors: Sequence[Size]) -> Size:
        """The bounds of a product."""
        bits, degree, terms = (sum(values) for values in zip(*map(astuple, factors), strict=True))
        return self._capped(bits, degree, terms)

    def _sum(self, products: list[list[Size]]) -> Size:
        return self.sum_of([self.product_of(factors) for factors in products if factors])

    def _apply(self, kind: str, products: list[list[Size]]) -> list[list[Size]]:
        """A power or factorial of the last factor or, behind a sign such as that of |x|^2, of everything before it."""
        whole = self.position > 0 and self.tokens[self.position - 1][0] == "sign"
        if whole or not products[-1]:
            products = [[self._sum(products)]]
        self.position += 1
        base = products[-1][-1]
        applied = _factorial(base) if kind == "factorial" else self._power(base, self._exponent())
        return [*products[:-1], [*products[-1][:-1], applied]]

    def _kind(self) -> str:
        return self.tokens[self.position][0] if self.position < len(self.tokens) else "end"

    def _factor(self) -> Size:
        """A number, a symbol, a bracket, or a command with what belongs to it."""
        kind, content = self.tokens[self.position]
        self.position += 1
        if kind == "number":
            return _number(content)
        if kind == "open":
            return self._nested()
        if content in _PAIRS or content in _BINOMIALS:
            upper, lower = self._argument(), self._argument()
            return self.product_of([upper, lower]) if content in _PAIRS else self._binomial(upper, lower)
        if content == "\\sqrt":
            index = self._argument() if self.tokens[self.position : self.position + 1] == [("open", "[")] else _ONE
            root = self.product_of([index, self._argument()])
            return Size(root.bits, max(root.degree, 1.0), root.terms)  # powers of sums with it have many terms
        if content in _ANGLES:
            return self._of_a_sum()
        if kind == "text" and _MATRIX.search(content):
            return _ENDLESS
        if content.lower() == "\\gamma":
            return _factorial(self._argument()) if self._kind() == "open" else _SYMBOL
        return _ONE if content in _TIMES else _SYMBOL

    def _of_a_sum(self) -> Size:
        r"""A function such as \sin, perhaps of a sum, with its power in front: by the identities of angles.

        \sin(x+y) is a sum of two products; what is tried with it on the way makes it cost as one of four.
        """
        exponent = None
        if self._kind() == "power":
            self.position += 1
            exponent = self._exponent()
        argument = self._argument() if self._kind() == "open" else _SYMBOL
        summands = 2.0 ** min(argument.terms, 32.0)
        size = Size(max(argument.bits, 1.0), max(argument.degree, 1.0) * summands, 2 * (summands - 1))
        return size if exponent is None else self._power(size, exponent)

    def _nested(self) -> Size:
        self.depth += 1
        if self.depth > MOST_NESTED:
            self.position = len(self.tokens)
            return _ENDLESS
        size = self.group()
        self.depth -= 1
        return size

    def _argument(self) -> Size:
        while self._kind() in ("join", "sign", "power", "index", "factorial"):
            self.position += 1
        return _ONE if self._kind() in ("close", "end") else self._factor()

    def _exponent(self) -> Size:
        exponents = [self._argument()]
        while self._kind() == "power":
            self.position += 1
            exponents.append(self._argument())
        size = exponents.pop()
        while exponents:
            size = self._power(exponents.pop(), size)
        return size

    def _power(self, base: Size, exponent: Size) -> Size:
        times, num = exponent.value, 2.0 ** min(base.terms, 64.0)
        terms = _log2_binomial(times + num - 1, num - 1) if base.degree else 0.0
        return self._capped(max(base.bits * times, exponent.bits), max(base.degree * times, exponent.degree), terms)

    def _binomial(self, upper: Size, lower: Size) -> Size:
        """With symbols in it a polynomial: n over 3 is n(n-1)(n-2)/6."""
        times = lower.value
        bits = max(min(upper.value, upper.bits * times), upper.bits, lower.bits)
        return self._capped(bits, upper.degree * times + lower.degree, (upper.terms + 1) * times if upper.degree else 0)

    def _capped(self, bits: float, degree: float, terms: float) -> Size:
        """There are no more terms than monomials of this degree."""
        most = _log2_binomial(min(degree, _LARGEST) + self.num_symbols, self.num_symbols)
        return Size(min(bits, _LARGEST), min(degree, _LARGEST), min(terms, most))


def _number(text: str) -> Size:
    mantissa, _, exponent = re.sub(r"[^0-9.eE+-]", "", text).lower().partition("e")
    tens = math.log2(10) * abs(int(exponent[-9:] or 0))
    whole = mantissa.partition(".")[0] or "0"
    tens += math.log2(10) * len(whole[15:])  # Python refuses to read very long integers
    return Size(math.log2(int(whole[:15]) + 1) + tens if "." in mantissa else math.log2(max(1, int(whole[:15]))) + tens)


def _factorial(base: Size) -> Size:
    return Size(min(max(base.value * base.bits, base.bits), _LARGEST), base.degree, 0.0)


def _log2_binomial(n: float, k: float) -> float:
    """Of n over k, for n >= k >= 0; 0 where rounding of large arguments leaves nothing."""
    return max(0.0, (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2))
