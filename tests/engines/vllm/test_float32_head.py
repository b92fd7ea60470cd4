"""vLLM's output layer in float32 beside layers in bf16, on real engines: what it samples with, what a sync brings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.vllm.float32_head import WorkerExtension
from grpo_dist.engines.weights.buckets import unpack
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.workers.gang import Gang
from grpo_dist.workers.rollout import RolloutGroup, RolloutWorker
from grpo_dist.workers.weight_transport import BroadcastTransport
from tests.engines.vllm.test_engine import of_folder, sampling
from tests.processes import spawned, start_together
from tests.worker_settings import engine_settings, lora, model_settings, policy_settings
from tests.workers.test_weight_transport import actor_class

pytestmark = [pytest.mark.ray, pytest.mark.deep]

# What of the mean difference of two log-probs remains with the output layer in float32.
SMALLER = 0.7
CASES = {
    "tied": ("tied", 1, False),
    "untied": ("untied", 1, False),
    "tensor parallel": ("tied", 2, False),
    "tensor parallel, untied": ("untied", 2, False),
    "factors": ("untied", 1, True),
}


class ReadWorker(WorkerExtension):
    """A process of an engine whose weights can be read."""

    model_runner: Any

    def head(self) -> dict[str, Any]:
        """The output layer's share of this process, and the types of the others' weights."""
        model = self.model_runner.get_model()
        layer, embedding = (getattr(each, "base_layer", each) for each in (model.lm_head, model.model.embed_tokens))
        start, end = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
        return {
            "rows": [start, end],
            "weight": layer.weight[: end - start].float().tolist(),
            "type": str(layer.weight.dtype),
            "embedding": str(embedding.weight.dtype),
            "others": sorted({str(weight.dtype) for name, weight in model.named_parameters() if "layers" in name}),
        }


class ReadRolloutWorker(RolloutWorker):
    async def head(self) -> list[dict[str, Any]]:
        return await self.engine._llm.collective_rpc("head")


class Case:
    """An actor and an engine with layers in bf16."""

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, tensor_parallel: int) -> None:
        self.actor, self.rollout = actor, rollout
        self.transport = BroadcastTransport(tensor_parallel, 20.0, "broadcast")

    def sync(self) -> None:
        run(RolloutGroup(self.rollout).sync_weights(self.actor, self.transport, version=0, dtype="bfloat16"))

    def exported(self, method: str, *args: str) -> dict[str, torch.Tensor]:
        """What the actor sends, or its own weights in float32."""
        buckets = ray.get(self.actor.call_all("test", method, *args)[0])
        return {name: tensor.clone() for bucket in buckets for name, tensor in unpack(bucket.data, bucket.entries)}

    def head(self) -> torch.Tensor:
        """The engine's output layer, put together from its processes."""
        parts = self.rollout.call(0, "test", "head")
        assert {part["type"] for part in parts} == {"torch.float32"}
        assert all("torch.bfloat16" in part["others"] for part in parts)
        rows = sorted((part["rows"], part["weight"]) for part in parts)
        return torch.cat([torch.tensor(weight) for _, weight in rows])

    def mismatch(self) -> torch.Tensor:
        """The engine's log-probs less the trainer's."""
        settings = sampling(n=4, temperature=1.0, max_tokens=24, ignore_eos=True)
        calls = [
            self.rollout.submit_for_data(
                0, "generate", "generate", str(i), np.arange(5 + i, 12 + i, dtype=np.int32), settings
            )
            for i in range(12)
        ]
        labels = [label for label, *_ in self.rollout.gather(calls)]
        sampled = DataProtoRef.concat([call.handle(label) for call, label in zip(calls, labels, strict=True)])
        computed = run(Gang(self.actor).compute_log_probs("log_probs", sampled))
        theirs = sampled.fetch(("rollout_log_probs",))
        return theirs["rollout_log_probs"].values - computed.fetch(("old_log_probs",))["old_log_probs"].values


@contextmanager
def started(path: str, size: int, factors: bool, head: str | None) -> Iterator[Case]:
    adapters = lora(targets=("q_proj",)) if factors else None
    model = model_settings(path, adapters, merge=not factors, compute_dtype="bf16", head_dtype=head)
    forward = PassLimits("actor_rollout_ref.rollout.log_prob_", 8)
    settings = policy_settings(model, forward=forward, weight_bucket_bytes=20_000)
    own = {name: getattr(model.model, name) for name in ("lora", "lora_rank", "target_modules")}
    extension = {"worker_extension_cls": f"{__name__}.ReadWorker"} if head else {}
    parallel = {"tensor_model_parallel_size": size, "vllm": extension}
    engine = engine_settings(path, dtype="bfloat16", head_dtype=head, **parallel, **own)
    with (
        spawned("actor", actor_class(), [(0, 1)]) as actor,
        spawned("rollout", ReadRolloutWorker, [()], env={"OMP_NUM_THREADS": "1"}) as rollout,
    ):
        start_together(Gang(actor).start(settings), RolloutGroup(rollout).start([engine]))
        yield Case(actor, rollout, size)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if "parallel" in name else ()) for name in CASES]
)
def test_the_engine_holds_the_trainers_weight_bit_by_bit(
    local_ray: None, random_models: dict[str, str], name: str
) -> None:
    """As it was loaded, and after a sync that rounds all other weights; also in an embedding that shares it."""
    (kind, size, factors), path = CASES[name], random_models[CASES[name][0]]
    weight = "lm_head.weight" if kind == "untied" else "model.embed_tokens.weight"
    loaded = of_folder(path).get_parameter(weight).detach()
    assert not torch.equal(loaded, loaded.bfloat16().float()), "rounding would show"
    with started(path, size, factors, "fp32") as case:
        assert torch.equal(case.head(), loaded)
        of_embedding = "torch.bfloat16" if kind == "untied" else "torch.float32"
        assert {part["embedding"] for part in case.rollout.call(0, "test", "head")} == {of_embedding}
        case.actor.call_all("test", "perturb", 3, 1.0, "lora_" if factors else "")
        case.sync()
        master = loaded
        if not factors:
            sent, master = case.exported("export_weights", "bfloat16"), case.exported("export_parameters")[weight]
            assert not torch.equal(master, loaded)
            assert {str(tensor.dtype) for tensor in sent.values() if tensor is not sent[weight]} == {"torch.bfloat16"}
            assert torch.equal(sent[weight], master)
        assert torch.equal(case.head(), master)
        assert case.mismatch().abs().mean() < 0.1


def test_sampler_and_trainer_differ_less(local_ray: None, random_models: dict[str, str], tmp_path: Path) -> None:
    """The same number more in each row of the output layer moves all logits of a token alike, here by some 20: that
    changes no probability, but for the rounding of logits in bf16, to eighths. The rest is what the layers round.
    """
    model = of_folder(random_models["untied"])
    model.lm_head.weight.data += 4
    model.save_pretrained(tmp_path)
    means = {}
    for head in (None, "fp32"):
        with started(str(tmp_path), 1, False, head) as case:
            case.sync()
            means[head] = float(case.mismatch().abs().mean())
    assert 0 < means["fp32"] < SMALLER * means[None], means
