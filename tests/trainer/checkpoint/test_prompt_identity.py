"""By what a checkpoint knows the prompts that it was trained on."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace
from typing import Any

from grpo_dist.data import Prompt
from grpo_dist.trainer.checkpoint.config_changes import identify_prompts


def prompts(*questions: str, system: str = "", truth: str = "1") -> list[Any]:
    rows = []
    for question in questions:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        rows.append(SimpleNamespace(prompt=Prompt(0, "d", messages, truth, {}, "")))
    return rows


def test_prompts_are_known_by_what_they_ask_and_their_order() -> None:
    same = identify_prompts(prompts("a", "b"))
    assert same["count"] == 2
    assert identify_prompts(prompts("a", "b")) == same
    assert identify_prompts(prompts("a", "b", system="Be kind.")) == same, "positions mean the same rows"
    for other in (prompts("b", "a"), prompts("a", "c"), prompts("a", "b", truth="2"), prompts("a", "b", "c")):
        assert identify_prompts(other) != same


def test_the_fingerprint_of_prompts_is_that_of_earlier_checkpoints() -> None:
    """blake2b, 16 bytes, of [data_source, messages, ground_truth] as JSON."""
    text = json.dumps(["d", [{"role": "user", "content": "a"}], "1"]).encode()
    expected = {"count": 1, "fingerprint": hashlib.blake2b(text, digest_size=16).hexdigest()}
    assert identify_prompts(prompts("a")) == expected


def test_a_file_that_stands_for_the_data_source_may_be_renamed() -> None:
    def named(source: str) -> list[Any]:
        prompt = Prompt(0, source, [{"role": "user", "content": "a"}], "1", {}, "", taken={"data.data_source": source})
        return [SimpleNamespace(prompt=prompt)]

    assert identify_prompts(named("old")) == identify_prompts(named("new"))
