"""A real actor process with LoRA: it is its own reference, and the engines get plain weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_dist.engines.settings import PassLimits, RankSettings
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.event_loop import run
from grpo_dist.workers.actor import ActorGroup, ActorWorker
from grpo_dist.workers.gang import Gang
from tests.engines.fakes import FakeTrainEngine
from tests.models import objective, random_batch
from tests.processes import spawned
from tests.worker_settings import lora, model_settings, policy_settings

SEQUENCES = ("uid", "prompts", "responses", "response_mask")


def stored_batch(*columns: str) -> DataProtoRef:
    """16 rows of 4 groups, as the driver has them."""
    data = random_batch(num_groups=4, n=4).select(columns)
    handle = DataProtoRef.put(data)
    lengths = {f"{name}_length": data[f"{name}s"].lengths.numpy() for name in ("prompt", "response")}
    return DataProtoRef(handle.frames, handle.small | lengths, len(data))


def save(gang: Gang, folder: Path) -> str:
    run(gang.begin_save(str(folder)))
    run(gang.finished_save(wait=True))
    return str(folder)


def actor_settings(path: str, **changes: Any) -> RankSettings:
    """An actor with LoRA, which is its own reference."""
    own = {"update": PassLimits("actor_rollout_ref.actor.ppo_", 4), "reference_columns": ("ref_log_probs",)}
    return policy_settings(**{"model": model_settings(path, lora=lora())} | own | changes)


def before_an_update() -> DataProtoRef:
    """On policy."""
    return stored_batch(*(name for name in random_batch(num_groups=1, n=1).columns() if name != "old_log_probs"))


def log_probs(actor: ActorGroup, batch: DataProtoRef, method: str) -> np.ndarray:
    found = run(actor.compute_log_probs("test", batch, method))
    return found.fetch(found.columns)[found.columns[0]].values.numpy()


@pytest.fixture(scope="module")
def actor(local_ray: None, random_models: dict[str, str]) -> Iterator[ActorGroup]:
    with spawned("actor", ActorWorker, [(0, 2), (1, 2)]) as workers:
        group = ActorGroup(workers)
        run(group.start(actor_settings(random_models["tied"])))
        yield group


@pytest.mark.deep
@pytest.mark.ray
def test_lora_on_real_workers(actor: ActorGroup) -> None:
    """The reference stays what it was while the policy moves; on policy the update returns the old log-probs."""
    batch = before_an_update()
    before = {method: log_probs(actor, batch, method) for method in ("compute_log_probs", "compute_reference")}
    np.testing.assert_allclose(*before.values(), atol=1e-6)  # the factors start without effect
    trained, metrics = run(actor.update(batch, [np.arange(16)], objective(on_policy=True), 1))
    old = trained.fetch(("old_log_probs",))["old_log_probs"].values.numpy()
    np.testing.assert_allclose(old, before["compute_log_probs"], atol=1e-5)
    assert metrics["actor/grad_norm"].value > 0
    after = {method: log_probs(actor, batch, method) for method in before}
    np.testing.assert_allclose(after["compute_reference"], before["compute_reference"], atol=1e-6)
    assert np.abs(after["compute_log_probs"] - old).max() > 1e-3


@pytest.mark.parametrize(("apart", "name"), [(False, "weights"), (True, "factor")])
def test_engines_get_whole_weights_or_factors_alone(apart: bool, name: str) -> None:
    worker = object.__new__(ActorWorker)
    worker.engine = FakeTrainEngine()
    worker.settings = actor_settings("model", model=model_settings("model", lora(), merge=not apart))
    for sends in (True, False):
        assert [found for found, _ in worker._sent("float32", "cpu", sends=sends)] == [name]
