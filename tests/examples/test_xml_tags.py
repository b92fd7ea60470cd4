from pathlib import Path

import pytest

from grpo_dist.plugins.registry import load_attribute
from tests.messages import refuses

PATH = str(Path(__file__).parents[2] / "examples" / "rewards" / "xml_tags.py")
compute_score = load_attribute(f"{PATH}:compute_score", key="path")


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("<think>a</think><answer>b</answer>", 4),
        ("<think>a</think>", 2),
        ("<think>a</think></think>", 1),  # the closing tag twice
        ("</answer>", 1),
        ("think answer", 0),
    ],
)
def test_each_tag_counts_once(text: str, tags: int) -> None:
    assert compute_score("d", text, None, {}) == pytest.approx(0.2 * tags)
    assert compute_score("d", text, None, {}, per_tag=1.0) == tags
    assert compute_score("d", text.removeprefix("<think>"), None, {}, per_tag=1.0, opened="think") >= tags


def test_tags_must_be_a_list() -> None:
    with refuses(ValueError, "tags='think'"):
        compute_score("d", "", None, {}, tags="think")
