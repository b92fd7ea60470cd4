import pytest

from grpo_dist.tasks.competition_math.boxed import last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{4}", "4"),
        (r"\boxed{3} no, \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        (r"\fbox{4}", "4"),
        (r"\boxed {4}", "4"),
        (r"$\boxed 7$", "7"),
        (r"$\boxed\pi$", r"\pi"),
        (r"$\boxed \frac{1}{2}$", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"\boxed{\boxed{4}}", "4"),
        (r"\boxed{}", ""),
        (r"\boxed{4", None),
        (r"\boxed{3} and \boxed{4", None),  # cut off in the middle of the last one
        (r"\boxed{\}", None),
        (r"\boxed", None),
        (r"\boxedanswer{4}", None),
        ("boxed{4}", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content
