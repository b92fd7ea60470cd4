r"""Equal and different answers, by hand; and what would never end."""

import sys
import time

import pytest
from math_verify import grader, parse, verify
from sympy import sympify

from grpo_dist.tasks.competition_math import equality
from grpo_dist.tasks.competition_math.equality import same_value

CPU_S = 0.3
ONE_VALUE = r"""
4 == 4 | 0.5 == \frac12 | 1/2 == \dfrac{1}{2} | x^2+2x+1 == (x+1)^2 | \$18 == 18 | 18\text{ dollars} == 18
90^\circ == 90 | 1,000 == 1000 | 1,234,567 == 1234567 | 11,\! 111 == 11111 | x=5 == 5 | 3, 1, 2 == 1,2,3 | 50\% == 50
Monday == \text{Monday} | \begin{pmatrix}1\\2\end{pmatrix} == \begin{pmatrix} 1 \\ 2 \end{pmatrix}
# as text
9^{9^{9}} == 9^{9^{9}} | 9^{ 9^{9} } == 9^{9^9} | 2^{9999 \times 9999 \cdot x} == 2^{9999 \cdot 9999\cdot x}
\left(x+y+z\right)^{99} == (x + y + z)^{99} | \dfrac{1}{9999!!} == \frac{1}{9999!!}
# large, and evaluated
2^{100} == 1267650600228229401496703205376 | 2^{10} == 1024 | 10^{18} == 1000000000000000000
1.5 \times 10^{8} == 150000000 | \frac{100!}{98!} == 9900 | 100 \cdot 99! == 100! | 2005 \cdot 2004! == 2005!
\binom{100}{50} == \frac{100!}{50! \cdot 50!} | \binom{1000000}{2} == 499999500000 | {10 \choose 5} == 252
3 \cdot 3^{2004} == 3^{2005} | 2^{1004} + 2^{1004} == 2^{1005} | \frac{3^{2008} - 1}{2} == \frac{9^{1004} - 1}{2}
(-1)^{2005} == -1 | 2^{2^{2^2}} == 65536 | (1+x)^{99}(x+1) == (x+1)^{100}
\frac{1-x^{501}}{1-x} == \frac{x^{501}-1}{x-1} | (x-1)(x+1)(x^2+1) == x^4-1
\left(\frac{2}{3}\right)^{-3} == \frac{27}{8}
# exact
10^{-20} == \frac{1}{10^{20}} | \frac{1}{2^{50}} == 2^{-50} | 0.1+0.2 == 0.3 | 0.1x+0.2x == 0.3x | 1.5e3 == 1500
\sqrt2+\sqrt3 == \sqrt{5+2\sqrt6} | \sqrt{2} \cdot 10^{-20} == 2^{1/2} 10^{-20} | \frac{1+i}{2} == 0.5+0.5i
6.02\times10^{23} == 602000000000000000000000 | \cos\frac{\pi}{7}-\cos\frac{2\pi}{7}+\cos\frac{3\pi}{7} == \frac12
# decimals that round a value in their last place
0.333333 == \frac13 | 0.142857 == \frac17 | -0.666667 == -\frac23 | 3.141593 == \pi | [0, 0.333333] == [0, \frac13]
6.02214\times 10^{23} == 6.02214076\times 10^{23}
0.6666666666666666 == \frac23 | 0.66666666 == \frac{2}{3} | 0.666666 == \frac23 | 0.14285714285714285 == \frac17
1.4142135623730951 == \sqrt2 | 14142.135623730951 == 10000\sqrt2 | 3.1415926535 == \pi | -\frac23 == -0.6666666666
0.30000000000000004 == 0.3 | 0.9999999999999998 == 1 | 66.66666666666667% == \frac23 | 1234.5678 == 1234.56789
120_5 == 120_{5} | (120)_5 == 120_5 | 0120_5 == 120_5 | 10_2 + 1_2 == 11_2 | x=120_5 == 120_5 | 120_n == 120_n
1A_{16} == 1A_{16} | \log_{10} 100 == 2 | 2x_1 == 2x_{1} | C^2_5 == C_5^2
6\text{ million} == 6000000 | 6,000,000 == 6 million | \$6\text{ million} == 6 million dollars | 5\text{ halves} == 2.5
1.5 billion == 1500000000 | 2\text{ dozen} == 24 | 6 hundred thousand == 600000 | 1,500 thousand == 1500000
x = 6\text{ million} == 6000000 | 5\text{ cm} == 5\,\mathrm{centimetres} | 5 kilometers == 5\text{ KM}
5\text{ sq cm} == 5\text{ cm}^2 | 5\text{ square centimeters} == 5 cm² | 5\text{ square units} == 5 | 50 km/h == 50
50 m/s == 50 | 5 mi/hr == 5 | 5 m == 5 | 5 g == 5 | 5 == 5\text{ m} | 5\text{ cm} == 5 | 5 lbs == 5\text{ pounds}
50\text{ miles per hour} == 50 mph | 50\text{ km}/\text{h} == 50\text{ kilometers per hour} | 5 hrs == 5 hours
9.8\text{ m/s}^2 == 9.8\text{ meters per second squared} | \$5 == 5\text{ dollars} | $5 == \$5 | $\$5$ == 5 dollars
5¢ == 5\text{ cents} | -$5 == -5 | \$5\text{ per hour} == 5 dollars per hour | 90^\circ == 90 degrees
60^\circ, 30^\circ == 30°, 60° | \sin 30^\circ == \frac12 | \sin\frac{\pi}{36} == \sin 5^\circ
\frac{1}{2} b h == \frac{bh}{2} | True == true | true == \text{True} | infinite == Infinite | NO == no
No solution == no solution | Alice and Bob == Bob, Alice | ba == ab | 2A+a == a+2A | R/r == \frac Rr | \text{BAC} == BAC
a \cdot b \cdot c == abc | a^2bc+ab^2c == abc(a+b) | x == 2x/2 | A) 5 == A | \text{(A) } 5 == (A)
-1 + sqrt(3) == \sqrt3-1 | 2**(1/4) == \sqrt[4]{2} | 2**10 == 1024 | x² + 2x == x^2+2x | √2 == \sqrt2 | √12 == 2\sqrt3
½ == 0.5 | 5½ == 5.5 | (-∞, 3) == (-\infty,3) | 10⁻³ == 0.001 | pi/2 == \frac{\pi}{2} | sin(x) == \sin x
sqrt((1+x)/2) == \sqrt{\frac{1+x}{2}} | 2^((a+b)/2) == 2^{\frac{a+b}{2}} | 2 == 2=x | 2=x == 2 | 185\ == 185
-2 \le x \le 7 == [-2,7] | 0<x<1 == (0,1) | 3<x == (3,\infty)
# units, signs and writings
5 cm == 5 | 5\text{ miles} == 5 mile | 9.8\,\mathrm{m/s^2} == 9.8 | 5 ft == 5\text{ feet} | 50% == 0.5 | 90° == 90
50\% == 50 percent | €5 == 5 | −5 == -5 | １２ == 12 | 1 234 567 == 1234567 | 1 1/4 == 1.25 | \frac 1 2 == 0.5
2+3\mathrm{i} == 2+3i | 1-\frac{1}{\mathrm{e}} == 1-\frac1e | \log_2 8 == 3 | x = 1+2 = 3 == 3
x = \frac23 = 0.67 == 0.67 | \int_0^1 x\,dx = \frac{1}{2} == 0.5 | \sum_{k=1}^{3} k = 6 == 6 | f'(x) == f'(x)
\(4\) == 4 | 1, 3, \ldots, 2n-1 == 1,3,\ldots,2n-1 | \begin{aligned} x &= 1+2 \\ &= 3 \end{aligned} == 3
\begin{aligned} x &= 1 \\ y &= 2 \\ \end{aligned} == x=1, y=2
\begin{equation}\begin{pmatrix}1&2\end{pmatrix}\end{equation} == \begin{pmatrix}1&2\end{pmatrix}
"""
OTHERS = r"""
1.05\times 10^{-34} == 6.63\times 10^{-34} | 9.1\times10^{-31} == 1.6\times10^{-19} | 10^{-21} == 10^{-20}
\frac{1}{2^{98}} == \frac{1}{2^{99}} | \left(\frac12\right)^{61} == \left(\frac12\right)^{60}
\frac{1}{19!} == \frac{1}{20!} | \frac{1}{3\cdot 2^{2006}} == \frac{2^{2005}+1}{3\cdot 2^{2006}}
0.0000002 == 0.0000001 | e^{-201} == e^{-200}
\sqrt2\cdot10^{-21} == \sqrt2\cdot10^{-20} | \sqrt{2}+10^{-200} == \sqrt{2} | 0 == e^{-200} | 10^{-50} == 0
10^{-21}x == 10^{-20}x | (0, 10^{-20}) == (0, 10^{-21}) | \{10^{-20}\} == \{10^{-21}\} | x=10^{-20} == x=10^{-21}
x<10^{-20} == x<10^{-21} | \begin{pmatrix}10^{-20}\\1\end{pmatrix} == \begin{pmatrix}10^{-21}\\1\end{pmatrix}
123456.78 == 123456.79 | 1000000.9 == 1000000 | 0.33333 == \frac13 | 0.333334 == \frac13 | 1.41421 == \sqrt2
0.12345 == 0.12346 | 0.9999999 == 1 | 0.3333333 == 0.3333334 | 0.6667 == \frac23 | 3.14 == \pi
120_5 == 120_6 | 120_5 == 120 | 120_5 == 35 | 120_n == 120 | 129_5 == 129 | 12_1 == 12 | (120)_5 == 120_6
3\cdot12_5 == 3\cdot12_6 | 11_2 == 3_{10} | 5 == 5_{7} | 6 million == 6 | 6 thousand == 6 million
5\text{ half} == 5 | 2 dozen == 2 | 5\text{ cm} == 5\text{ meters} | 5\text{ kg} == 5 grams | 5 min == 5 hours
5 m/s == 5 km/h | 5\text{ MW} == 5\text{ mW} | 5\text{ cm}^2 == 5\text{ cm} | 5 square feet == 5 feet
5 cm == 5 apples | \$5 == 5¢ | \$5 == €5 | $5 == 5\text{ cents} | 90^\circ == 90\text{ radians} | 5 am == 5 pm
5^\circ\text{C} == 5^\circ\text{F} | 5 per second == 5 seconds | \sin 5 == \sin 5^\circ | e^{30i} == e^{30^\circ i}
2 g == 2g^2 | \frac{R}{r} == 1 | \frac{R}{r} == \frac{r}{R} | N-n == 0 | \pi R r == \pi r^2 | X_1 == x_1
\delta == \Delta | e == E | nRT == nrT | A == a | BAC == CAB | BA == AB | A B C == C B A | \text{ABC} == CBA
stop == pots | no == on | \angle BAC == \angle ABC | (Al, Bob) == (Bob, Al) | dog bites man == man bites dog
A) 5, B) 6 == A | A) or B) == A | A) 5 == B | √12 == 2 | 5½ == \frac52 | x² == 2x | 3=x == 2
x>2 == (3,\infty) | x \ge 3 == (3,\infty)
"""
NO_PART_DECIDES = r"""
5 == 4 | 0.333 == \frac13 | \sqrt{2} == 1.414 | (1,2) == (2,1) | \text{even} == \text{odd} | \frac{ == 4 | }{ == 4
3, 4 == 4 | 1+\frac{1}{\mathrm{e}} == 1-\frac{1}{\mathrm{e}} | 1+\frac{1}{\text{e}} == 1-\frac{1}{\text{e}}
4\sqrt(2) == 4 | 4\foo{3} == 4 | 1, 3, 5, \ldots, 2n-1 == 1, 2, \ldots, n | 1+2+\cdots+m == 1+2+\cdots+n
f(x) == f'(x) | f^\prime(x) == f(x) | 3=4 == 4 | x=3=4 == 4 | 3m == 3 | 2d == 2 | 3ab == 3 | 2 == 2 g | x^2 == x^3
5\text{ cm} == 5\text{ m} | 5 cm == 5 km | 5 feet == 5 inches | 5\% == 6\% | 12 == 0.12\% | 100 \bmod 7 == 7
5 \mid 7 == 7 | 5 \to 7 == 7 | 5 \equiv 7 == 7 | 5 \\ 7 == 7 | 4 & 5 == 4 | 2 3 == 5 | 1.2.3 == 1.2 | −5 == 5
1.4 million == 1.4 | 4;5 == 4 | 0.\overline{3} == 0 | 4 \text{ and } 5 \text{ cm} == 4
2 \text{ hours } 30 \text{ minutes} == 2 | \begin{aligned} x &= 1 \\ y &= 2 \end{aligned} == 2
# the question, not its answer
\sum_{k=1}^{100} k == 5050 | \int_0^1 x\,dx == 0.5 | x = \int_0^1 x\,dx == 0.5 | \int_0^1 x\,dx = \frac{1}{3} == \frac13
"""
ENDLESS = r"""
9^{9^{9^{9}}} == 4 | 9^9^9 == 4 | 4 == 2^{9999!} | 9^{9^{9}} + 1 0 == 9^{9^{9}} + 10 | 2^{99999999} == 4
1e999999999 == 4 | 0.1^{9^{9}} == 4 | 999999! == 4 | 2^{9999 \times 9999 \times 9999} == 4
\frac{4 \cdot 9999999!}{9999999!} == 5 | \left\lfloor 9^{99} \right\rfloor! == 4 | \binom{10^9}{5 \cdot 10^8} == 4
\Gamma(99999999) == 4 | \log_{9^{9^9}} 2 == 4 | \gcd(9^{9^9}, 10^{10^{10}}) == 4 | \sin(10^{10^{10}}) == 4
\sin^{20}(x+y) == 4 | (x+1)^{9999} == x+1 | (x+y+z)^{99} == x+y+z | \operatorname{zeros}(9999, 9999) == 4
\begin{pmatrix} 9^{9^9} \\ 4 \end{pmatrix} == 4 | [9^{9^9}, 2] == 4 | 9^{9^9}\text{ cm} == 4
\int_0^1 \frac{\sin(x^{50})}{1+x^{33}} dx == \int_0^1 \frac{\sin(x^{51})}{1+x^{33}} dx
"""


def pairs(text: str) -> list[tuple[str, str]]:
    """Answers and truths, each pair between bars; a line that begins with # says what follows."""
    lines = [line for line in text.strip().splitlines() if not line.startswith("#")]
    return [(answer, truth) for pair in "|".join(lines).split("|") for answer, truth in [pair.strip().split(" == ")]]


@pytest.mark.parametrize(("answer", "truth"), pairs(ONE_VALUE))
def test_one_value_written_in_two_ways(answer: str, truth: str) -> None:
    assert same_value(answer, truth)


@pytest.mark.parametrize(("answer", "truth"), pairs(OTHERS))
def test_what_only_looks_alike(answer: str, truth: str) -> None:
    assert not same_value(answer, truth)
    assert not same_value(truth, answer)


@pytest.mark.parametrize(("answer", "truth"), [("", "4"), ("4" + "+0" * 300, "4"), *pairs(NO_PART_DECIDES)])
def test_no_part_of_an_answer_decides(answer: str, truth: str) -> None:
    assert not same_value(answer, truth)


def test_others_that_use_the_library_get_its_own_comparison() -> None:
    right, answer = parse(r"$\sqrt{2}$"), parse("$1.41421356$")
    assert verify(right, answer)
    assert not equality.grader.sympy_expr_eq(sympify("1/3"), sympify("0.33333"), 6, 15)
    assert equality.grader.sympy_numeric_eq is not grader.sympy_numeric_eq


@pytest.mark.parametrize(
    "text", ["km " * 160 + "x", "²" * 490, "1_2" * 160, "$" * 499, "A) " * 160, "x^(" + "(a)" * 150]
)
def test_long_garbage_takes_no_time(text: str) -> None:
    start = time.process_time()
    assert not same_value(text, "4")
    assert time.process_time() - start < equality.CPU_S


NEVER = [("(" * 240 + "x" + ")" * 240, "4"), ("2^" * 240 + "2", "4"), *pairs(ENDLESS)]
DEEP = [pytest.param(*pair, marks=pytest.mark.deep) for i, pair in enumerate(NEVER) if i % 5]


@pytest.mark.parametrize(("answer", "truth"), NEVER[::5] + DEEP)
def test_what_would_never_end_is_wrong_within_limits(answer: str, truth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "CPU_S", CPU_S)
    # pytest's hook takes longer than the alarm takes to come again: it would be raised there, out of everybody's hands
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: None)
    start = time.process_time()
    assert not same_value(answer, truth)
    assert time.process_time() - start < CPU_S + 10
