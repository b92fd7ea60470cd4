from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_dist.rewards import load_reward_function, score_response
from grpo_dist.tasks.competition_math.task import compute_score, extract_answer, same_value
from tests.messages import refuses


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"Answer: 3, or rather \boxed{4}", "4"),
        ("Answer: 34", "34"),
        ("**Answer:** 34.", "34"),
        ("Answer:\n$34$", "$34$"),
        ("The final answer is 7.", "7"),
        ("Answer: 1\nAnswer: 2", "2"),
        ("The answer is 1. No, the answer is 2.", "2"),
        ("Answer: 5\n\\boxed{6", "5"),
        ("34", None),
        ("answers 4", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


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
        ("9^{9^{9^{9}}}", "4"),  # these would never end
        ("9^9^9", "4"),
        ("2^{99999999}", "4"),
        ("999999!", "4"),
        (r"2^{9999 \times 9999 \times 9999}", "4"),
        ("2^{9999!}", "4"),
        ("(x+1)^{9999}", "x+1"),
        ("(x+y+z)^{99}", "x+y+z"),
        ("4", "2^{9999!}"),
        ("9^{9^{9}} + 1 0", "9^{9^{9}} + 10"),
        ("4" + "+0" * 300, "4"),
    ],
)
def test_different(answer: str, truth: str) -> None:
    assert not same_value(answer, truth)


def test_scores() -> None:
    right = compute_score("d", r"\boxed{0.50}", r"\frac{1}{2}", {})
    assert right == {"score": 1.0, "acc": 1.0, "pred": "0.50"}
    assert compute_score("d", "0.5 and 1/2", "0.5", {}) == {"score": 0.0, "acc": 0.0, "pred": ""}
    assert compute_score("d", r"\boxed{1} \boxed{2}", "1", {}, right=2.0, wrong=-0.5)["score"] == -0.5
    assert compute_score("d", r"\boxed{4}", 4, {}, right=2.0)["score"] == 2.0


@pytest.mark.parametrize("truth", ["", " ", "$$", None])
def test_an_empty_truth_is_an_error(truth: object) -> None:
    with refuses(ValueError, f"ground_truth {truth!r}", "no answer"):
        compute_score("d", r"\boxed{4}", truth, {})


def score_built_in(data_source: str, text: str) -> float:
    function = load_reward_function(None, "compute_score", {})
    return score_response(
        function, data_source=data_source, solution_str=text, ground_truth=r"\frac{1}{2}", extra_info={}
    ).score


@pytest.mark.parametrize(
    ("data_source", "wrong"),
    [
        ("DigitalLearningGmbH/MATH-lighteval", 0.0),
        ("lighteval/MATH", 0.0),
        ("HuggingFaceH4/MATH-500", 0.0),
        ("math_dapo", -1.0),
        ("aime2024", -1.0),
        ("HuggingFaceH4/aime_2024", -1.0),
    ],
)
def test_built_in_for_verls_data_sources(data_source: str, wrong: float) -> None:
    assert score_built_in(data_source, "Answer: 0.5") == 1.0
    assert score_built_in(data_source, "Answer: 0.6") == wrong


def test_in_a_thread_that_is_not_the_main_one() -> None:
    """math-verify's own timeouts raise there."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(score_built_in, "lighteval/MATH", r"\boxed{2/4}").result(timeout=60) == 1.0
        assert pool.submit(score_built_in, "lighteval/MATH", r"\boxed{3/4}").result(timeout=60) == 0.0
