"""Bounds of expressions, against their exact values where these can be had."""

from __future__ import annotations

import math

import pytest

from grpo_dist.tasks.competition_math.latex_size import latex_size
from grpo_dist.tasks.competition_math.task import is_too_large

X, Y = 2, 2  # what symbols are taken as


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2^{100}", 2**100),
        ("2^10", 2**10),
        ("10^{18}", 10**18),
        ("3^{2005}", 3**2005),
        ("100!", math.factorial(100)),
        ("3!!", math.factorial(6)),
        ("2^3!", math.factorial(8)),
        ("(1+2+3)!", math.factorial(6)),
        (r"\binom{100}{50}", math.comb(100, 50)),
        (r"\binom{10^6}{2}", math.comb(10**6, 2)),
        (r"{30 \choose 15}", math.comb(30, 15)),
        (r"\Gamma(10)", math.factorial(9)),
        ("2^{2^{2^2}}", 2**16),
        ("2^3^2", 2**9),
        ("2**3**2", 2**9),
        ("-7 + 9 - 30", 46),
        ("12(3+4)5", 420),
        (r"12 \cdot \frac{7}{3}", 28),
        ("1,234,567", 1234567),
        ("1 234 567", 1234567),
        ("99.9^2", 9980),
        ("2e5", 200_000),
        (r"\left\lfloor 9^{9} \right\rfloor + 1", 9**9 + 1),
        (r"|10^5 + 1|^3", 100_001**3),
        (r"\lvert 7 \rvert^4", 7**4),
        (r"(x^2+y)^{3}", (X**2 + Y) ** 3),
        (r"x_{12}^{5}", X**5),
        (r"\begin{pmatrix} 12 & 3 \\ 4 & 5 \end{pmatrix}^3", 12**3),
        ("9" * 5000, 10**5000 - 1),
        ("", 1),
        ("^!_", 1),
        (")5)6", 6),
    ],
    ids=lambda each: each[:40] if isinstance(each, str) else "",
)
def test_no_value_is_above_its_bound(text: str, value: int) -> None:
    bits, exact = latex_size(text).bits, value.bit_length() - 1
    assert bits >= exact - 1e-6 * exact
    assert not latex_size(text).too_large


def test_bounds_by_hand() -> None:
    """x + 1 has 2 terms; its cube 4, of degree 3; x and 1 are at most 2, and one bit more is their sum."""
    size = latex_size("(x+1)^3")
    assert (size.bits, size.degree, size.terms) == pytest.approx((6.0, 3.0, 2.0))
    size = latex_size("(x+y+z)^2")  # 6 terms
    assert (size.degree, size.terms) == pytest.approx((2.0, math.log2(6)))
    size = latex_size("(x-1)(x-2)(x-3)(x-4)")  # degree 4 in one symbol: 5 terms, not 16
    assert (size.degree, size.terms) == pytest.approx((4.0, math.log2(5)))
    size = latex_size(r"\binom{n}{3}")
    assert (size.degree, size.terms) == pytest.approx((3.0, 2.0))
    assert latex_size("(2+3)^{50}").terms == 0.0, "numbers are one number"


@pytest.mark.parametrize(
    "text",
    [
        r"2^{9999 \times 9999 \times 9999}",
        "2^{9999!}",
        r"\sin^{99}(x+y)",
        r"\sin^{20}(x+y)",
        r"\cosh^{8}\left(x+y+z\right)",
        r"(\tan(x+y))^{20}",
        "2^{9999! + x - x}",
        "(x+1)^{9999}",
        "(x+y+z)^{99}",
        r"\left(a+b+c+d+e+f\right)^{30}",
        r"(1+\sqrt{2})^{99999}",
        "x^{999999999} - 1",
        "9^{9^{9}}",
        "9^9^9",
        "9**9**9",
        "1^{9^{9^{9}}}",
        r"\frac{1}{9^{9^9}}",
        "2^{99999999}",
        "2^{9 999 999 999}",
        "2^{1 000 000 000}",
        "2^{1{,}000{,}000{,}000}",
        r"2^{\frac{9^9}{1}}",
        "1e999999999",
        "999999!",
        "(10!)!",
        "{9!}!",
        "9!!!",
        r"|10^{50} + 1|^{9999}",
        r"\left\lfloor 9^{99} \right\rfloor!",
        r"\binom{10^9}{5 \cdot 10^8}",
        r"{10^9 \choose 5 \cdot 10^8}",
        r"\binom{n}{9999}",
        r"\Gamma(99999999)",
        r"\sqrt[2^{9^9}]{2}",
        r"\log_{9^{9^9}} 2",
        r"\operatorname{zeros}(9999, 9999)",
        "(" * 450,
        "2^" * 240 + "2",
        r"\begin{pmatrix} 9^{99} & 1 \end{pmatrix}^{9999}",
    ],
)
def test_what_must_not_be_evaluated(text: str) -> None:
    assert is_too_large(text)


@pytest.mark.parametrize(
    "text",
    [
        r"\frac{x^{2011}-1}{x-1}",
        "10^{10000}",
        "2005^{2005}",
        r"\frac{2005!}{5^{500}}",
        "2^{n+1}-1",
        r"\binom{2n}{n}",
        r"\binom{n+3}{3}",
        "(n+1)!",
        "x^{n^2}",
        r"e^{2\pi i/5}",
        r"(-\infty, 2) \cup (3, \infty)",
        r"90^\circ",
        r"\sum_{k=1}^{100} k^2",
        "10^2, 10^3, 10^4",
        r"\text{Answer in metres per second}",
        r"6.02 \times 10^{23}",
        "(x+1)^{100}",
        r"(2+\sqrt{3})^{10}",
    ],
)
def test_what_may_be(text: str) -> None:
    assert not is_too_large(text)
