r"""Equal and different answers, by hand; and what would never end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from grpo_dist.rewards.forms import Sample
from grpo_dist.rewards.scorer import Scorer
from grpo_dist.tasks.competition_math import equality
from grpo_dist.tasks.competition_math.equality import same_value

CPU_S = 0.3


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("4", "4"),
        ("0.5", r"\frac12"),
        ("1/2", r"\dfrac{1}{2}"),
        (r"x^2+2x+1", "(x+1)^2"),
        (r"\$18", "18"),
        (r"18\text{ dollars}", "18"),
        (r"90^\circ", "90"),
        ("1,000", "1000"),
        (r"11,\! 111", "11111"),
        ("x=5", "5"),
        ("3, 1, 2", "1,2,3"),
        (r"50\%", "50"),
        ("Monday", r"\text{Monday}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        ("9^{9^{9}}", "9^{9^{9}}"),  # as text
        (r"9^{ 9^{9} }", "9^{9^9}"),
        (r"2^{9999 \times 9999 \cdot x}", r"2^{9999 \cdot 9999\cdot x}"),
        (r"\left(x+y+z\right)^{99}", "(x + y + z)^{99}"),
        (r"\dfrac{1}{9999!!}", r"\frac{1}{9999!!}"),
        # large, and evaluated
        ("2^{100}", "1267650600228229401496703205376"),
        ("2^{10}", "1024"),
        ("10^{18}", "1000000000000000000"),
        (r"1.5 \times 10^{8}", "150000000"),
        (r"\frac{100!}{98!}", "9900"),
        (r"100 \cdot 99!", "100!"),
        (r"\binom{100}{50}", r"\frac{100!}{50! \cdot 50!}"),
        (r"\binom{1000000}{2}", "499999500000"),
        (r"{10 \choose 5}", "252"),
        (r"3 \cdot 3^{2004}", "3^{2005}"),
        (r"2^{1004} + 2^{1004}", "2^{1005}"),
        (r"\frac{3^{2008} - 1}{2}", r"\frac{9^{1004} - 1}{2}"),
        (r"2005 \cdot 2004!", "2005!"),
        ("(-1)^{2005}", "-1"),
        ("2^{2^{2^2}}", "65536"),
        ("(1+x)^{99}(x+1)", "(x+1)^{100}"),
        (r"\frac{1-x^{501}}{1-x}", r"\frac{x^{501}-1}{x-1}"),
        ("(x-1)(x+1)(x^2+1)", "x^4-1"),
        (r"\left(\frac{2}{3}\right)^{-3}", r"\frac{27}{8}"),
        ("1,234,567", "1234567"),
    ],
)
def test_same(answer: str, truth: str) -> None:
    assert same_value(answer, truth)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("5", "4"),
        ("", "4"),
        ("0.333", r"\frac13"),
        (r"\sqrt{2}", "1.414"),
        ("(1,2)", "(2,1)"),
        (r"\text{even}", r"\text{odd}"),
        (r"\frac{", "4"),
        ("}{", "4"),
        ("3, 4", "4"),  # a list of guesses
        ("4" + "+0" * 300, "4"),
    ],
)
def test_different(answer: str, truth: str) -> None:
    assert not same_value(answer, truth)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        # exact
        ("10^{-20}", r"\frac{1}{10^{20}}"),
        (r"\frac{1}{2^{50}}", "2^{-50}"),
        ("0.1+0.2", "0.3"),
        ("0.1x+0.2x", "0.3x"),
        (r"\sqrt2+\sqrt3", r"\sqrt{5+2\sqrt6}"),
        (r"\sqrt{2} \cdot 10^{-20}", r"2^{1/2} 10^{-20}"),
        (r"\frac{1+i}{2}", "0.5+0.5i"),
        (r"6.02\times10^{23}", "6020000000000000" + "0" * 8),
        ("1.5e3", "1500"),
        # decimals that round a value in their last place
        ("0.333333", r"\frac13"),
        ("0.142857", r"\frac17"),
        ("-0.666667", r"-\frac23"),
        ("3.141593", r"\pi"),
        ("[0, 0.333333]", r"[0, \frac13]"),
        (r"6.02214\times 10^{23}", r"6.02214076\times 10^{23}"),
        # units, signs and writings
        ("5 cm", "5"),
        (r"5\text{ miles}", "5 mile"),
        (r"9.8\,\mathrm{m/s^2}", "9.8"),
        ("5 ft", r"5\text{ feet}"),
        ("50%", "0.5"),
        (r"50\%", "50 percent"),
        ("90°", "90"),
        ("€5", "5"),
        ("\u22125", "-5"),
        ("\uff11\uff12", "12"),
        ("1 234 567", "1234567"),
        ("1 1/4", "1.25"),
        (r"2+3\mathrm{i}", "2+3i"),
        (r"1-\frac{1}{\mathrm{e}}", r"1-\frac1e"),
        (r"\log_2 8", "3"),
        (r"\frac 1 2", "0.5"),
        ("x = 1+2 = 3", "3"),
        (r"x = \frac23 = 0.67", "0.67"),
        (r"\int_0^1 x\,dx = \frac{1}{2}", "0.5"),
        (r"\sum_{k=1}^{3} k = 6", "6"),
        ("f'(x)", "f'(x)"),
        (r"1, 3, \ldots, 2n-1", r"1,3,\ldots,2n-1"),
        (r"\(4\)", "4"),
        (r"\begin{aligned} x &= 1+2 \\ &= 3 \end{aligned}", "3"),
        (r"\begin{aligned} x &= 1 \\ y &= 2 \\ \end{aligned}", "x=1, y=2"),
        (r"\begin{equation}\begin{pmatrix}1&2\end{pmatrix}\end{equation}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    ],
)
def test_equal_exactly_or_as_a_rounded_decimal(answer: str, truth: str) -> None:
    assert same_value(answer, truth)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"1.05\times 10^{-34}", r"6.63\times 10^{-34}"),
        (r"9.1\times10^{-31}", r"1.6\times10^{-19}"),
        ("10^{-21}", "10^{-20}"),
        (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"),
        (r"\frac{1}{19!}", r"\frac{1}{20!}"),
        (r"\left(\frac12\right)^{61}", r"\left(\frac12\right)^{60}"),
        (r"\frac{1}{3\cdot 2^{2006}}", r"\frac{2^{2005}+1}{3\cdot 2^{2006}}"),  # the truth is about 1/6
        ("0.0000002", "0.0000001"),
        (r"\sqrt2\cdot10^{-21}", r"\sqrt2\cdot10^{-20}"),
        (r"\sqrt{2}+10^{-200}", r"\sqrt{2}"),
        ("e^{-201}", "e^{-200}"),
        ("0", "e^{-200}"),
        ("10^{-50}", "0"),
        ("10^{-21}x", "10^{-20}x"),
        (r"(0, 10^{-20})", r"(0, 10^{-21})"),
        (r"\{10^{-20}\}", r"\{10^{-21}\}"),
        ("x=10^{-20}", "x=10^{-21}"),
        ("x<10^{-20}", "x<10^{-21}"),
        (r"\begin{pmatrix}10^{-20}\\1\end{pmatrix}", r"\begin{pmatrix}10^{-21}\\1\end{pmatrix}"),
        ("123456.78", "123456.79"),
        ("1000000.9", "1000000"),
        ("0.33333", r"\frac13"),
        ("0.333334", r"\frac13"),
        ("0.666666", r"\frac23"),
        ("1.41421", r"\sqrt2"),
    ],
)
def test_values_that_differ(answer: str, truth: str) -> None:
    assert not same_value(answer, truth)
    assert not same_value(truth, answer)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"1+\frac{1}{\mathrm{e}}", r"1-\frac{1}{\mathrm{e}}"),
        (r"1+\frac{1}{\text{e}}", r"1-\frac{1}{\text{e}}"),
        (r"4\sqrt(2)", "4"),
        (r"4\foo{3}", "4"),
        (r"1, 3, 5, \ldots, 2n-1", r"1, 2, \ldots, n"),
        (r"1+2+\cdots+m", r"1+2+\cdots+n"),
        ("f(x)", "f'(x)"),
        (r"f^\prime(x)", "f(x)"),
        ("3=4", "4"),
        ("x=3=4", "4"),
        ("3m", "3"),
        ("2d", "2"),
        ("3ab", "3"),
        (r"5\text{ cm}", r"5\text{ m}"),
        ("5 cm", "5 km"),
        ("5 feet", "5 inches"),
        (r"5\%", r"6\%"),
        ("12", r"0.12\%"),
        (r"100 \bmod 7", "7"),
        (r"5 \mid 7", "7"),
        (r"5 \to 7", "7"),
        (r"5 \equiv 7", "7"),
        (r"5 \\ 7", "7"),
        ("4 & 5", "4"),
        ("2 3", "5"),
        ("1.2.3", "1.2"),
        ("1.4 million", "1.4"),
        ("4;5", "4"),
        (r"0.\overline{3}", "0"),
        ("\u22125", "5"),
        (r"4 \text{ and } 5 \text{ cm}", "4"),
        (r"2 \text{ hours } 30 \text{ minutes}", "2"),
        (r"\begin{aligned} x &= 1 \\ y &= 2 \end{aligned}", "2"),
        (r"\sum_{k=1}^{100} k", "5050"),  # the question, not its answer
        (r"\int_0^1 x\,dx", "0.5"),
        (r"x = \int_0^1 x\,dx", "0.5"),
        (r"\int_0^1 x\,dx = \frac{1}{3}", r"\frac13"),
        ("x^2", "x^3"),
    ],
)
def test_no_part_of_an_answer_decides(answer: str, truth: str) -> None:
    assert not same_value(answer, truth)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("9^{9^{9^{9}}}", "4"),
        ("9^9^9", "4"),
        ("4", "2^{9999!}"),
        ("9^{9^{9}} + 1 0", "9^{9^{9}} + 10"),
        ("2^{99999999}", "4"),
        ("1e999999999", "4"),
        ("0.1^{9^{9}}", "4"),
        ("999999!", "4"),
        (r"2^{9999 \times 9999 \times 9999}", "4"),
        (r"\frac{4 \cdot 9999999!}{9999999!}", "5"),
        (r"\left\lfloor 9^{99} \right\rfloor!", "4"),
        (r"\binom{10^9}{5 \cdot 10^8}", "4"),
        (r"\Gamma(99999999)", "4"),
        (r"\log_{9^{9^9}} 2", "4"),
        (r"\gcd(9^{9^9}, 10^{10^{10}})", "4"),
        (r"\sin(10^{10^{10}})", "4"),
        (r"\sin^{20}(x+y)", "4"),
        ("(x+1)^{9999}", "x+1"),
        ("(x+y+z)^{99}", "x+y+z"),
        (r"\operatorname{zeros}(9999, 9999)", "4"),
        (r"\begin{pmatrix} 9^{9^9} \\ 4 \end{pmatrix}", "4"),
        ("[9^{9^9}, 2]", "4"),
        (r"9^{9^9}\text{ cm}", "4"),
        ("(" * 240 + "x" + ")" * 240, "4"),
        ("2^" * 240 + "2", "4"),
        (r"\int_0^1 \frac{\sin(x^{50})}{1+x^{33}} dx", r"\int_0^1 \frac{\sin(x^{51})}{1+x^{33}} dx"),
    ],
)
def test_what_would_never_end_is_wrong_within_the_limits(
    answer: str, truth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equality, "CPU_S", CPU_S)
    start = time.process_time()
    assert not same_value(answer, truth)
    assert time.process_time() - start < CPU_S + 10


def test_in_the_scorers_process_it_is_a_wrong_answer_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / "limited.py").write_text(
        f"from grpo_dist.tasks.competition_math import compute_score, equality\nequality.CPU_S = {CPU_S}\n"
    )
    scorer = Scorer(str(tmp_path / "limited.py"), "compute_score", {}, timeout_s=100.0)
    try:
        texts = [r"\boxed{9^{9^{9}}}", r"\boxed{4}", r"\boxed{2^{10^{11}}}"]
        results = scorer.score([Sample(text, "math", "4", {}, []) for text in texts])
        assert [result.score for result in results] == [0.0, 1.0, 0.0]
        assert scorer.num_starts == 1
    finally:
        scorer.stop()
