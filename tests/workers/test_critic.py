"""The critic on real ranks: the same values and losses however the work is cut, and resumed bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_dist.plan.commands import load_config
from grpo_dist.plan.plan import make_plan
from grpo_dist.protocol import DataProto, Ragged, metric_values
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.event_loop import run
from grpo_dist.workers.gang import TrainedGroup, TrainedWorker
from tests.processes import spawned
from tests.worker_settings import changed_sizes
from tests.workers.test_actor import SEQUENCES, save, stored_batch

pytestmark = [pytest.mark.ray, pytest.mark.deep]

STEPS, ROWS = 4, 16
# The rows of each mini-batch: twice over the batch, whole groups.
MINI_BATCHES = [np.arange(8), np.arange(8, ROWS)] * 2


@dataclass
class Trained:
    """What a critic says and reports, step by step."""

    values: list[np.ndarray]
    metrics: list[dict[str, float]]


@pytest.fixture(scope="module")
def critics(local_ray: None, random_models: dict[str, str]) -> Iterator[dict[str, TrainedGroup]]:
    """On one rank with passes of 16 sequences, on two ranks with passes of 3, and on two that split these."""
    path = f"critic.model.path={random_models['tied']}"
    config, _ = load_config(["recipe=ppo", path, "critic.optim.lr=1e-3"])
    plain = make_plan(config, STEPS).ranks("critic")
    with ExitStack() as stack:
        groups = {}
        for name, ranks, size in (("one", 1, 16), ("two", 2, 3), ("split", 2, 3)):
            workers = stack.enter_context(spawned("critic", TrainedWorker, [(rank, ranks) for rank in range(ranks)]))
            groups[name] = TrainedGroup(workers)
            model = replace(plain.model, sequence_parallel_size=2 if name == "split" else 1)
            settings = changed_sizes(plain, model=model, forward=size, update=size)
            run(groups[name].start(settings))
        yield groups


def with_returns(batch: DataProtoRef) -> DataProtoRef:
    """Returns that differ from token to token."""
    lengths = batch["response_length"]
    rows = [torch.linspace(-1, 2, int(length)) + 0.1 * i for i, length in enumerate(lengths)]
    return batch.union(DataProtoRef.put(DataProto.from_dict({"returns": Ragged.from_rows(rows, torch.float32)})))


def trained(critic: TrainedGroup, steps: range) -> Trained:
    config, _ = load_config(["recipe=ppo"])
    found, batch = Trained([], []), stored_batch(*SEQUENCES)
    for step in steps:
        with_values = batch.union(run(critic.compute_log_probs("values", batch)))
        found.values.append(with_values.fetch(("values",))["values"].values.numpy())
        updated, metrics = run(
            critic.update(with_returns(with_values), MINI_BATCHES, make_plan(config).value_objective, step + 1)
        )
        assert "old_log_probs" not in updated.columns
        found.metrics.append(metric_values(metrics))
    return found


def test_ranks_and_passes_change_nothing_and_a_stop_changes_no_bit(
    critics: dict[str, TrainedGroup], tmp_path: Path
) -> None:
    start = save(critics["two"], tmp_path / "start")
    one, two, split = (trained(critic, range(STEPS)) for critic in critics.values())
    assert np.abs(one.values[0]).max() < 0.5, "a new head says little"
    assert np.abs(one.values[-1] - one.values[0]).max() > 0.1, "and learns"
    assert one.metrics[-1]["critic/vf_loss"] < one.metrics[0]["critic/vf_loss"]
    assert {"critic/vf_loss", "critic/vf_clipfrac", "critic/grad_norm", "critic/lr"} <= one.metrics[0].keys()
    assert_alike(two, one.values, one.metrics)
    assert_alike(split, one.values, one.metrics)

    run(critics["two"].load_checkpoint(start))
    first = trained(critics["two"], range(2))
    half = save(critics["two"], tmp_path / "half")
    trained(critics["two"], range(1))  # as if it had gone on
    run(critics["two"].load_checkpoint(half))
    last = trained(critics["two"], range(2, STEPS))
    for mine, other in zip([*first.values, *last.values], two.values, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert [*first.metrics, *last.metrics] == two.metrics

    run(critics["split"].load_checkpoint(half))
    assert_alike(trained(critics["split"], range(2, STEPS)), last.values, last.metrics)


def assert_alike(found: Trained, values: list[np.ndarray], metrics: list[dict[str, float]]) -> None:
    for mine, other in zip(found.values, values, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4)
    for row, other_row in zip(found.metrics, metrics, strict=True):
        assert row == pytest.approx(other_row, rel=1e-3, abs=1e-4)


def test_of_ranks_that_split_sequences_one_returns_the_values(critics: dict[str, TrainedGroup]) -> None:
    workers, rows = critics["split"].workers, stored_batch(*SEQUENCES)
    calls = [workers.submit_for_data(rank, "values", "compute_log_probs", rows) for rank in range(2)]
    assert [(label.columns, label.num_rows) for label in run(workers.answers(calls))] == [(("values",), ROWS), ((), 0)]
