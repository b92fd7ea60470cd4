"""Engines of this rank and what they hold, and models in plain PyTorch, which take each sequence alone."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers

from grpo_dist.config.schema_roles import AdamWConfig
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.durable_files import FileDigest
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.errors import GrpoDistError
from grpo_dist.protocol import DataProto, metric_values
from tests.models import objective
from tests.worker_settings import model_settings


def built(path: str, optimizer: AdamWConfig | None = None, temperature: float = 1.0, **changes: Any) -> FSDPEngine:
    """An engine for runs of six steps; without an optimizer it is frozen."""
    options: dict[str, Any] = {"optimizer": optimizer, "total_steps": 6, "grad_clip": 1.0}
    return FSDPEngine(model_settings(path, **changes), device="cpu", temperature=temperature, **options)


def with_sgd(path: str, lr: float, temperature: float = 1.0, **changes: Any) -> FSDPEngine:
    """By plain SGD: Adam divides by the size of the gradient, which turns rounding of small ones into real steps."""
    optimizer = AdamWConfig(lr=lr, weight_decay=0.0, betas=(0.9, 0.999), override_optimizer_config=None)
    made = built(path, optimizer, temperature, **changes)
    made.grad_clip = float("inf")
    made.optimizer = torch.optim.SGD([p for p in made.model.parameters() if p.requires_grad], lr=lr)
    return made


def weights(engine: FSDPEngine) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in engine.full_parameters("float32")}


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any], rtol: float = 0.0, atol: float = 0.0) -> None:
    """The same names, and under each the same numbers, to the bit or within the tolerances."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, numbers in expected.items():
        np.testing.assert_allclose(found[name], numbers, rtol=rtol, atol=atol, err_msg=name)


def flat(engine: FSDPEngine) -> np.ndarray:
    return np.concatenate([weight.ravel() for weight in weights(engine).values()])


def own_rows(data: DataProto, rank: int) -> DataProto:
    """A rank's share of the rows: they are dealt out in turns."""
    return data.index(np.arange(rank, len(data), dist.get_world_size()))


def log_probs(engine: FSDPEngine, data: DataProto, size: int = 8) -> np.ndarray:
    return engine.compute_log_probs(data, PassLimits("", size)).values.numpy().copy()


def step(engine: FSDPEngine, data: DataProto, size: int = 4, settings: Any = None) -> dict[str, float]:
    """The metrics of an optimizer step, by default of GRPO's objective."""
    return metric_values(engine.train_mini_batch(data, settings or objective(), PassLimits("", size)).metrics)


def save(engine: FSDPEngine, folder: Path) -> dict[str, FileDigest]:
    engine.begin_save(folder)
    files = engine.finished_save(wait=True)
    assert files is not None
    return files


def told(work: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The class and the message of the error with which the work ends; "" if it is done."""
    try:
        work(*args, **options)
    except GrpoDistError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def causal_lm(path: str | Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def response_logits(model: Any, data: DataProto) -> list[torch.Tensor]:
    """What a model says at the tokens before those of each response."""
    rows = zip(data["prompts"].rows(), data["responses"].rows(), strict=True)
    return [model(input_ids=torch.cat(row).long()[None]).logits[0, len(row[0]) - 1 : -1] for row in rows]


def log_probs_alone(model: Any, data: DataProto, temperature: float = 1.0) -> list[torch.Tensor]:
    """Log-probs of each response."""
    rows = zip(response_logits(model, data), data["responses"].rows(), strict=True)
    return [
        torch.log_softmax(logits / temperature, -1).gather(-1, response.long()[:, None])[:, 0]
        for logits, response in rows
    ]


@torch.no_grad()
def one_by_one(path: str | Path, data: DataProto, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of all responses by the model of a folder."""
    return torch.cat(log_probs_alone(causal_lm(path), data, temperature)).numpy()
