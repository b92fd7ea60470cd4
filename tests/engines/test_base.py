"""Every engine has the methods of its protocol, with the same arguments; engines are found by name."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_dist.engines import settings
from grpo_dist.engines.base import EngineWeights, Response, RolloutEngine, check_responses, rollout_backend
from grpo_dist.engines.float32_products import float32_products
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.vllm.engine import VLLMEngine
from grpo_dist.engines.vllm.weight_update import WeightUpdater
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.registry import load_attribute
from tests.engines.fakes import FakeRolloutEngine, FakeTrainEngine, FakeWeights
from tests.messages import refuses


def public(owner: type) -> list[str]:
    return [name for name, each in vars(owner).items() if inspect.isfunction(each) and name[0] != "_"]


@pytest.mark.parametrize(
    ("protocol", "engine", "methods"),
    [  # what workers and agent loops call of a rollout engine, and PolicyWorker of the one train engine
        (RolloutEngine, VLLMEngine, public(RolloutEngine)),
        (RolloutEngine, FakeRolloutEngine, public(RolloutEngine)),
        (EngineWeights, WeightUpdater, public(EngineWeights)),
        (EngineWeights, FakeWeights, public(EngineWeights)),
        (FSDPEngine, FakeTrainEngine, public(FakeTrainEngine)),
    ],
)
def test_an_engine_has_what_its_protocol_says(protocol: type, engine: type, methods: list[str]) -> None:
    assert methods
    for name in methods:
        wanted, found = getattr(protocol, name), getattr(engine, name)
        assert inspect.iscoroutinefunction(found) == inspect.iscoroutinefunction(wanted), name
        arguments = [(p.name, p.kind, p.default) for p in inspect.signature(wanted).parameters.values()]
        assert [(p.name, p.kind, p.default) for p in inspect.signature(found).parameters.values()] == arguments, name


def test_engines_are_found_by_name(tmp_path: Path) -> None:
    assert load_attribute(settings.FSDP, key="FSDP") is FSDPEngine
    file = tmp_path / "mine.py"
    half = "\n\n\nclass Half:\n    def start(): ...\n"
    file.write_text(f"from tests.engines.fakes import FakeRolloutEngine as Mine{half}")
    assert rollout_backend(f"{file}:Mine").load() is FakeRolloutEngine
    with refuses(ConfigError, "actor_rollout_ref.rollout.name", f"{file}:Half", "generate, abort, shutdown"):
        rollout_backend(f"{file}:Half").load()
    with refuses(ConfigError, "'Mine'"):
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


@pytest.mark.parametrize(
    ("dtype", "is_cuda", "within"),
    [
        (torch.bfloat16, True, "high"),
        (torch.float16, True, "high"),
        (torch.float32, True, "highest"),
        (torch.bfloat16, False, "highest"),
    ],
)
def test_products_of_hidden_states_of_16_bits_on_a_gpu_may_read_fewer(
    dtype: torch.dtype, is_cuda: bool, within: str
) -> None:
    """And only within the block, also where it fails. The mantissas have 7 and 10 bits, and TF32's has 10."""
    states: Any = SimpleNamespace(is_cuda=is_cuda, element_size=lambda: dtype.itemsize)
    seen = [torch.get_float32_matmul_precision()]

    def product() -> None:
        with float32_products(states):
            seen.append(torch.get_float32_matmul_precision())
            raise RuntimeError

    pytest.raises(RuntimeError, product)
    assert [*seen, torch.get_float32_matmul_precision()] == ["highest", within, "highest"]
