import pytest

from grpo_dist.rewards.steps import step_ends


@pytest.mark.parametrize(
    ("tokens", "separator", "steps", "ends"),
    [
        (["a", "b", "\n", "c", ""], "\n", ["ab", "c"], [2, 4]),  # the last step ends with the end-of-sequence token
        (["a\n", "b\n", ""], "\n", ["a", "b"], [0, 1]),  # nothing follows the last separator
        (["a\nb\nc"], "\n", ["a", "b", "c"], [0, 0, 0]),  # steps that share a token
        (["a", "\n\n", "b"], "\n", ["a", "b"], [1, 2]),  # an empty line is no step
        (["x", "-", ">", "y"], "->", ["x", "y"], [2, 3]),  # a separator of two tokens
        (["abc", ""], "\n", ["abc"], [1]),
        (["", "\n", " "], "\n", [], []),
        ([], "\n", [], []),
    ],
)
def test_steps_and_their_last_tokens(tokens: list[str], separator: str, steps: list[str], ends: list[int]) -> None:
    assert [step.strip() for step in "".join(tokens).split(separator) if step.strip()] == steps
    assert step_ends(tokens, separator) == ends
