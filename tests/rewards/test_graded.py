import pytest

from grpo_dist.rewards.graded import compute_score

TINY = {"exact": 1.0, "numeric": 1.0, "partial": 0.5, "wrong": 0.01}


def grade(text: str, truth: object = "1000", **kwargs: object) -> tuple[float, float]:
    result = compute_score("d", text, truth, {}, **kwargs)
    return result["score"], result["acc"]


@pytest.mark.parametrize(
    ("text", "demo", "tiny"),
    [
        ("<answer> 1000 </answer>", 2.0, 1.0),
        ("<answer>999</answer> no: <answer>1,000.0</answer>", 1.5, 1.0),
        ("<answer>about 1000 apples</answer>", 0.0, 0.5),
        ("<answer>999</answer>", 0.0, 0.01),
        ("1000", 0.0, 0.01),  # not in the tag
        ("<answer>1000", 0.0, 0.01),
        ("", 0.0, 0.01),
    ],
)
def test_both_scales(text: str, demo: float, tiny: float) -> None:
    assert grade(text, tag="answer")[0] == demo
    assert grade(text, tag="answer", **TINY)[0] == tiny
    assert grade(text, tag="answer")[1] == (demo > 0)


def test_without_a_tag_the_response_is_the_answer() -> None:
    assert grade(" 1000\n") == (2.0, 1.0)
    assert grade("$1,000.") == (1.5, 1.0)
    assert grade("nan", "nan") == (2.0, 1.0)
    assert grade("Paris", "paris") == (0.0, 0.0)
    assert grade("anything", "", partial=0.5) == (0.0, 0.0)
