"""Every engine has the methods of its protocol, with the same arguments; engines are found by name."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.engines import settings
from grpo_dist.engines.base import (
    EngineWeights,
    Response,
    RolloutEngine,
    check_responses,
    rollout_backend,
)
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.vllm.engine import VLLMEngine
from grpo_dist.engines.vllm.weight_update import WeightUpdater
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.registry import load_attribute
from tests.engines.fakes import FakeRolloutEngine, FakeTrainEngine, FakeWeights
from tests.messages import refuses

# What workers and agent loops call of a rollout engine, and PolicyWorker of the one train engine.
METHODS = {
    protocol: [name for name in vars(protocol) if inspect.isfunction(vars(protocol)[name]) and name[0] != "_"]
    for protocol in (RolloutEngine, EngineWeights)
}
METHODS[FSDPEngine] = [name for name in vars(FakeTrainEngine) if name[0] != "_"]
CLASSES = [
    (RolloutEngine, VLLMEngine),
    (RolloutEngine, FakeRolloutEngine),
    (EngineWeights, WeightUpdater),
    (EngineWeights, FakeWeights),
    (FSDPEngine, FakeTrainEngine),
]


@pytest.mark.parametrize(("protocol", "engine"), CLASSES, ids=lambda each: each.__name__)
def test_an_engine_has_what_its_protocol_says(protocol: type, engine: type) -> None:
    assert METHODS[protocol]
    for name in METHODS[protocol]:
        wanted, found = getattr(protocol, name), getattr(engine, name)
        assert inspect.iscoroutinefunction(found) == inspect.iscoroutinefunction(wanted), name
        arguments = [(p.name, p.kind, p.default) for p in inspect.signature(wanted).parameters.values()]
        assert [(p.name, p.kind, p.default) for p in inspect.signature(found).parameters.values()] == arguments, name


def test_the_train_engine_is_found_by_name() -> None:
    assert load_attribute(settings.FSDP, key="FSDP") is FSDPEngine


def test_an_engine_of_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from tests.engines.fakes import FakeRolloutEngine as Mine\n\n\nclass Half:\n    def start(): ...\n"
    )
    assert rollout_backend(f"{file}:Mine").load() is FakeRolloutEngine
    with pytest.raises(ConfigError) as caught:
        rollout_backend(f"{file}:Half").load()
    for part in ("actor_rollout_ref.rollout.name", f"{file}:Half", "generate, abort, shutdown"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="'Mine'"):
        rollout_backend(f"{file}:Min").load()


def answer(*lengths: int) -> Response:
    """A response with so many tokens, log-probs and weight versions."""
    tokens, log_probs, versions = lengths
    return Response([5] * tokens, [-1.0] * log_probs, False, [0] * versions)


@pytest.mark.parametrize(
    ("returned", "parts"),
    [
        ([answer(2, 2, 2)], ["length 1", "2 Response"]),
        ("ab", ["'ab' (str)"]),
        ([answer(2, 2, 2), [5, 6]], ["[1] = list", "length 2"]),
        (
            [answer(2, 2, 2), answer(3, 2, 3)],
            ["response 1", "token_ids, log_probs, weight_versions, mask = [3, 2, 3, 3]"],
        ),
    ],
)
def test_an_engine_that_returns_something_else(returned: Any, parts: list[str]) -> None:
    engine: Any = FakeRolloutEngine()
    check_responses(engine, [answer(2, 2, 2), answer(0, 0, 0)], 2)
    with refuses(ConfigError, "actor_rollout_ref.rollout.name", "fakes.py:FakeRolloutEngine", *parts):
        check_responses(engine, returned, 2)
