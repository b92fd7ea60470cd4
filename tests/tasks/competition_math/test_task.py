import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_dist.tasks.competition_math.task import compute_score, extract_answer, last_boxed
from tests.messages import refuses
from tests.rewards.scoring import scored


def test_extract_answer() -> None:
    for text, answer in (
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"Answer: 3, or rather \boxed{4}", "4"),
        ("Answer: 34", "34"),
        ("**Answer:** 34.", "34"),
        ("Answer:\n$34$", "$34$"),
        ("The final answer is 7.", "7"),
        ("Answer: 1\nAnswer: 2", "2"),
        ("The answer is 1. No, the answer is 2.", "2"),
        ("Answer: 5\n\\boxed{6", "5"),
        # displayed
        ("The final answer is:\n\n\\[\n\\frac{1}{2}\n\\]\n\nI checked it.", r"\frac{1}{2}"),
        (r"Answer: \[\frac{1}{2}\]", r"\frac{1}{2}"),
        ("**Answer:**\n$$\n\\frac{1}{2}.\n$$", r"\frac{1}{2}"),
        ("Answer: $$4$$.", "4"),
        (r"Answer: \[4\] cm", "4 cm"),
        (r"Answer: \[4\] or \[5\]", r"4 or \[5\]"),
        (r"Answer: \(4\)", r"\(4\)"),
        ("Answer:\n\\begin{align*}\nx &= 4\n\\end{align*}\nSo", "\\begin{align*}\nx &= 4\n\\end{align*}"),
        ("Answer:\n\\begin{pmatrix}1\\\\2\\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        ("Answer:\n\\[\n4", None),  # cut off
        ("Answer:\n$$\n4", None),
        ("Answer:\n\\begin{aligned} 4", None),
        (r"Answer: \[\]", None),
        ("34", None),
        ("answers 4", None),
        ("", None),
    ):
        assert extract_answer(text) == answer


def test_scores() -> None:
    right = compute_score("d", r"\boxed{0.50}", r"\frac{1}{2}", {})
    assert right == {"score": 1.0, "acc": 1.0, "pred": "0.50"}
    assert compute_score("d", "0.5 and 1/2", "0.5", {}) == {"score": 0.0, "acc": 0.0, "pred": None}
    assert compute_score("d", r"\boxed{1} \boxed{2}", "1", {}, right=2.0, wrong=-0.5)["score"] == -0.5
    assert compute_score("d", r"\boxed{4}", 4, {}, right=2.0)["score"] == 2.0
    assert compute_score("d", r"\boxed{2} or \boxed{1}", "1, 2", {})["acc"] == 1.0
    assert compute_score("d", r"\boxed{2} or \boxed{1}", "1", {})["acc"] == 0.0, "two guesses"
    for answer, acc in (("4", 1.0), ("5.0", 1.0), ("4, 5", 0.0), ("6", 0.0)):
        assert compute_score("d", rf"\boxed{{{answer}}}", ["4", 5], {})["acc"] == acc
    assert compute_score("d", r"\boxed{0.0000001}", 1e-07, {})["acc"] == 1.0, "as JSON writes it"
    assert compute_score("d", r"\boxed{4}", r"so $\boxed{4}$", {})["acc"] == 1.0


def test_long_garbage_takes_no_time() -> None:
    boxes, spaces = r"\boxed{1} and " * 20_000 + r"x\boxed{2}", "Answer: 4" + " " * 100_000 + "5"
    start = time.process_time()
    for text in (boxes, spaces, "Answer:" * 30_000, r"\[" * 100_000 + "Answer: $$"):
        assert compute_score("d", text, "4", {})["acc"] == 0.0
    assert time.process_time() - start < 5


@pytest.mark.parametrize("truth", ["", " ", "$$", None, [], ["4", ""], {"answer": "4"}, [["4"]], float("nan")])
def test_a_truth_that_is_no_answer_is_an_error(truth: object) -> None:
    with refuses(ValueError, f"ground_truth {truth!r}", "no answer"):
        compute_score("d", r"\boxed{4}", truth, {})


def test_dapos_scale_for_its_data_sources_and_in_another_thread() -> None:
    def score_built_in(data_source: str, text: str) -> float:
        return scored(text, r"\frac{1}{2}", data_source).score

    for data_source, wrong in (("lighteval/MATH", 0.0), ("math_dapo", -1.0), ("HuggingFaceH4/aime_2024", -1.0)):
        assert score_built_in(data_source, "Answer: 0.5") == 1.0
        assert score_built_in(data_source, "Answer: 0.6") == wrong
    # math-verify's own timeouts raise there.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(score_built_in, "lighteval/MATH", r"\boxed{2/4}").result(timeout=60) == 1.0
        assert pool.submit(score_built_in, "lighteval/MATH", r"\boxed{3/4}").result(timeout=60) == 0.0


BOXED = r"""
\boxed{4} -> 4 | \fbox{4} -> 4 | \boxed {4} -> 4 | $\boxed 7$ -> 7 | $\boxed\pi$ -> \pi | \boxed{\boxed{4}} -> 4
\boxed{3} no, \boxed{ \frac{1}{2} }. -> \frac{1}{2} | $\boxed \frac{1}{2}$ -> \frac{1}{2} | \boxed{\{1, 2\}} -> \{1, 2\}
\boxed{\left\{x\right.} -> \left\{x\right. | \boxed{} ->
# a list in several boxes
\boxed{1} and \boxed{2} -> 1, 2 | \(\boxed{1}\), $\boxed{2}$ \quad \text{and} \quad \boxed3 -> 1, 2, 3
\boxed{4} or $\boxed{4}$ -> 4 | \boxed{1} = \boxed{2} -> 2 | \boxed{1} and then \boxed{2} -> 2
"""
# The third is cut off in the middle of the last one.
UNBOXED = ("", r"\boxed{4", r"\boxed{3} and \boxed{4", r"\boxed{\}", r"\boxed", r"\boxedanswer{4}", "boxed{4}")


def test_last_boxed() -> None:
    lines = [line for line in BOXED.strip().splitlines() if not line.startswith("#")]
    for pair in "|".join(lines).split("|"):
        text, _, content = pair.partition("->")
        assert last_boxed(text.strip()) == content.strip()
    assert [last_boxed(text) for text in UNBOXED] == [None] * len(UNBOXED)
