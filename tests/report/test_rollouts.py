"""The responses of a step, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import load_tokenizer
from grpo_dist.report.rollouts import TokenTexts, chosen_steps, load_token_texts, read_step
from tests.report.runs import TINY, write_run, write_step


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [{"step": 1, "critic/score/mean": 1.0}])


def text(response: dict[str, Any], step: dict[str, Any]) -> str:
    return "".join(step["pieces"][piece] for piece in response["tokens"])


def test_groups_with_their_numbers(run: Path) -> None:
    write_step(run, 3, ["1+1=2 #### 2", "#### 3", "two", "5"], [1.0, 0.0, None, 0.5])
    step = read_step(run, 3, load_token_texts(run))
    first, second = step["groups"]
    assert [first["uid"], first["gts"], second["uid"]] == ["step3-prompt0", "1", "step3-prompt1"]
    one, other = first["responses"]
    assert text(one, step) == "1+1=2 #### 2"
    assert (one["score"], one["advantage"], one["extra"], one["truncated"], one["versions"]) == (
        1.0, 0.5, {"acc": 1.0}, True, [2, 3],
    )  # fmt: skip
    assert "truncated" not in other
    assert ("branches" in one, other["branches"]) == (False, [2])
    assert (one["log_probs"], one["mismatch"], one["kl"], one["mask"]) == (-2.75, 0.25, -0.5, 1)
    assert second["responses"][0]["failure"] == "it raised"
    assert "score" not in second["responses"][0]


def test_without_tokens_there_is_the_text(run: Path) -> None:
    write_step(run, 3, ["1", "2"], [1.0, 0.0], tokens=False)
    assert load_token_texts(run) is None
    step = read_step(run, 3, None)
    assert step["pieces"] == []
    assert [response["output"] for response in step["groups"][0]["responses"]] == ["1", "2"]


def test_secrets_in_texts_are_replaced(run: Path) -> None:
    write_step(run, 3, ["sk-" + "a1" * 12, "2"], [1.0, 0.0], tokens=False)
    assert "a1a1" not in str(read_step(run, 3, None))


def test_each_token_adds_its_text() -> None:
    """Spaces stay, and a character of several tokens stands at the first of them."""
    tokenizer = load_tokenizer(resolve_model_path(TINY), trust_remote_code=False)
    texts = TokenTexts(tokenizer)
    for said in ("9+6=15 #### 15", " 7 ", "a é 🌈 b"):
        ids = tokenizer.encode(said, add_special_tokens=False)
        found = texts.of(ids)
        assert len(found) == len(ids)
        assert "".join(found) == tokenizer.decode(ids)
        assert texts.of(ids) == found, "the second time, from what is known"


def test_steps_are_left_out_evenly(run: Path) -> None:
    """Two responses each: of six steps ten responses would be five, which are no even choice but the nearest."""
    for step in (1, 2, 3, 4, 5, 6):
        write_step(run, step, ["1", "2"], [1.0, 0.0], tokens=False)
    steps = [1, 2, 3, 4, 5, 6]
    assert chosen_steps(run, steps, 12) == steps
    assert chosen_steps(run, steps, 6) == [1, 3, 6]
    assert chosen_steps(run, steps, 4) == [1, 6]
    assert chosen_steps(run, steps, 1) == [6], "the last, however many it has"
    assert chosen_steps(run, [], 1) == []
