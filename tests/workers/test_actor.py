"""A real actor process with LoRA: it is its own reference, and the engines get plain weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from grpo_dist.assets.model_folder import Usage, read_usage
from grpo_dist.engines.settings import PassLimits, RankSettings
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.event_loop import run
from grpo_dist.workers.actor import ActorGroup, ActorWorker
from tests.engines.fakes import LOG_PROB, FakeTrainEngine
from tests.models import objective, random_batch
from tests.processes import spawned
from tests.worker_settings import lora, model_settings, policy_settings

pytestmark = pytest.mark.ray


def actor_settings(path: str, **changes: Any) -> RankSettings:
    """An actor with LoRA, which is its own reference."""
    own = {"update": PassLimits("actor_rollout_ref.actor.ppo_", 4), "reference_columns": ("ref_log_probs",)}
    return policy_settings(**{"model": model_settings(path, lora=lora())} | own | changes)


@pytest.fixture(scope="module")
def actor(local_ray: None, random_models: dict[str, str]) -> Iterator[ActorGroup]:
    settings = actor_settings(random_models["tied"])
    with spawned("actor", ActorWorker, [(0, 2), (1, 2)]) as workers:
        group = ActorGroup(workers)
        run(group.start(settings))
        yield group


def stored_batch() -> DataProtoRef:
    """16 rows of 4 groups, as the driver has them before an update on policy."""
    data = random_batch(num_groups=4, n=4)
    data = data.select([name for name in data.columns() if name != "old_log_probs"])
    lengths = {name: data[name].lengths.numpy() for name in ("prompts", "responses")}
    handle = DataProtoRef.put(data)
    small = {"prompt_length": lengths["prompts"], "response_length": lengths["responses"]}
    return DataProtoRef(handle.frames, handle.small | small, len(data))


def log_probs(actor: ActorGroup, batch: DataProtoRef, method: str) -> np.ndarray:
    found = run(actor.compute_log_probs("test", batch, method))
    return found.fetch(found.columns)[found.columns[0]].values.numpy()


@pytest.mark.deep
def test_lora_on_real_workers(actor: ActorGroup) -> None:
    """The reference stays what it was while the policy moves; on policy the update returns the old log-probs."""
    batch = stored_batch()
    before = {method: log_probs(actor, batch, method) for method in ("compute_log_probs", "compute_reference")}
    np.testing.assert_allclose(*before.values(), atol=1e-6)  # the factors start without effect
    trained, metrics = run(actor.update(batch, [np.arange(16)], objective(on_policy=True), 1))
    old = trained.fetch(("old_log_probs",))["old_log_probs"].values.numpy()
    np.testing.assert_allclose(old, before["compute_log_probs"], atol=1e-5)
    assert metrics["actor/grad_norm"].value > 0
    after = {method: log_probs(actor, batch, method) for method in before}
    np.testing.assert_allclose(after["compute_reference"], before["compute_reference"], atol=1e-6)
    assert np.abs(after["compute_log_probs"] - old).max() > 1e-3


def test_the_engines_get_plain_names(actor: ActorGroup, random_models: dict[str, str]) -> None:
    import transformers

    buckets = ray.get(actor.workers.call_all("test", "export_weights", "float32")[0])
    names = {entry.name for bucket in buckets for entry in bucket.entries}
    plain = transformers.AutoModelForCausalLM.from_pretrained(random_models["tied"])
    assert names == {name for name, _ in plain.named_parameters()}


@pytest.mark.parametrize(("apart", "name"), [(False, "weights"), (True, "factor")])
def test_engines_get_whole_weights_or_factors_alone(apart: bool, name: str) -> None:
    worker = object.__new__(ActorWorker)
    worker.engine, worker.settings = (
        FakeTrainEngine(),
        actor_settings("model", model=model_settings("model", lora(), merge=not apart)),
    )
    for sends in (True, False):
        assert [found for found, _ in worker._sent("float32", "cpu", sends=sends)] == [name]


@pytest.mark.deep
def test_an_actor_over_another_train_engine(local_ray: None, random_models: dict[str, str], tmp_path: Path) -> None:
    """One without a model, named in the settings: passes, a step, weights for engines, a checkpoint, an export."""
    settings = actor_settings(random_models["tied"], engine="tests.engines.fakes:FakeTrainEngine")
    with spawned("actor", ActorWorker, [(0, 1)]) as workers:
        group, batch = ActorGroup(workers), stored_batch()
        run(group.start(settings))
        assert set(log_probs(group, batch, "compute_log_probs")) == {LOG_PROB}
        _, metrics = run(group.update(batch, [np.arange(16)], objective(on_policy=True), 1))
        assert metrics["actor/loss"].value == 16
        [bucket] = ray.get(workers.call_all("test", "export_weights", "float32")[0])
        assert [(entry.name, entry.shape) for entry in bucket.entries] == [("weights", (4,))]
        workers.call_all("test", "begin_save", str(tmp_path / "actor"))
        assert list(workers.call_all("test", "finished_save", True)[0]) == ["rank0.json"]
        workers.call_all("test", "load_checkpoint", str(tmp_path / "actor"))
        run(group.export_hf_model(str(tmp_path / "huggingface"), "bf16", Usage(1, checkpoint="ab")))
        assert (tmp_path / "huggingface" / "weights.json").is_file()
        assert read_usage(tmp_path / "huggingface") == Usage(1, checkpoint="ab")
