"""What an environment put into a response is read, and neither trains nor counts, whatever its columns hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.engines.settings import PassLimits
from grpo_dist.protocol import DataProto, Ragged, metric_values
from tests.models import VOCAB, objective, random_batch, random_qwen3, trainable_engine
from tests.ranks import run_ranks

LAYOUTS = ("shared", "packed", "padded")
NOISY = ("old_log_probs", "ref_log_probs", "advantages")


def with_environment(data: DataProto, noise: float) -> DataProto:
    """Every second response gets three tokens put in behind its first one; their columns hold `noise`."""
    columns: dict[str, list[list[float]]] = {}
    for name in ("responses", "response_mask", *NOISY):
        fill = {"responses": 7.0, "response_mask": 0.0}.get(name, noise)
        rows = [row.tolist() for row in data[name].rows()]
        columns[name] = [[*row[:1], *[fill] * 3, *row[1:]] if i % 2 else row for i, row in enumerate(rows)]
    changed = {name: Ragged.from_rows(rows, data[name].values.dtype) for name, rows in columns.items()}
    return data.select([name for name in data.columns() if name not in columns]).union(DataProto(changed))


def one_step(path: str, data: DataProto, layout: str, **changes: object) -> dict[str, Any]:
    engine = trainable_engine(path, layout=layout)
    engine.optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.1)
    result = engine.train_mini_batch(data, objective(**changes), PassLimits("", 4))
    weights = {name: tensor.numpy().copy() for name, tensor in engine.full_parameters("float32")}
    return {"weights": weights, "metrics": metric_values(result.metrics)}


def all_steps(rank: int, path: str) -> dict[str, Any]:
    data = random_batch(num_groups=3, n=4)
    out: dict[str, Any] = {}
    for layout in LAYOUTS:
        for on_policy in (False, True):
            for noise in (0.0, 50.0):
                batch = with_environment(data, noise)
                out[f"{layout} {on_policy} {noise}"] = one_step(path, batch, layout, on_policy=on_policy)
    other = with_environment(data, 0.0)
    ids = other["responses"].values.clone()
    ids[other["response_mask"].values == 0] = VOCAB - 1
    swapped = DataProto({"responses": Ragged(ids, other["responses"].offsets)})
    rest = other.select([name for name in other.columns() if name != "responses"])
    return out | {"other words": one_step(path, rest.union(swapped), "shared", on_policy=False)}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(1, all_steps, random_qwen3(tmp_path_factory.mktemp("model")))[0]


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_their_columns_change_nothing(steps: dict[str, Any], layout: str, on_policy: bool) -> None:
    plain, noisy = (steps[f"{layout} {on_policy} {noise}"] for noise in (0.0, 50.0))
    assert noisy["metrics"] == plain["metrics"]
    for name, weights in plain["weights"].items():
        assert np.array_equal(noisy["weights"][name], weights), name


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_every_layout_takes_the_same_step(steps: dict[str, Any], layout: str) -> None:
    shared, other = steps["shared False 0.0"], steps[f"{layout} False 0.0"]
    assert other["metrics"] == pytest.approx(shared["metrics"], rel=1e-4, abs=1e-6)
    for name, weights in shared["weights"].items():
        np.testing.assert_allclose(other["weights"][name], weights, atol=1e-5, err_msg=name)


def test_their_words_are_read(steps: dict[str, Any]) -> None:
    assert steps["other words"]["metrics"]["actor/loss"] != steps["shared False 0.0"]["metrics"]["actor/loss"]
