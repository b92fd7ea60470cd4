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
import transformers

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.vllm.float32_head import WorkerExtension
from grpo_dist.engines.weights.buckets import unpack
from grpo_dist.protocol import DataProto
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.workers.actor import ActorWorker
from grpo_dist.workers.gang import Gang
from grpo_dist.workers.rollout import RolloutGroup, RolloutWorker
from grpo_dist.workers.weight_transport import BroadcastTransport
from tests.engines.vllm.test_engine import sampling
from tests.processes import spawned, start_together
from tests.worker_settings import engine_settings, lora, model_settings, policy_settings

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
        layer = model.lm_head
        layer, start = getattr(layer, "base_layer", layer), layer.shard_indices.org_vocab_start_index
        end = layer.shard_indices.org_vocab_end_index
        others = {str(weight.dtype) for name, weight in model.named_parameters() if "layers" in name}
        embedding = model.model.embed_tokens
        return {
            "rows": [start, end],
            "weight": layer.weight[: end - start].float().tolist(),
            "type": str(layer.weight.dtype),
            "embedding": str(getattr(embedding, "base_layer", embedding).weight.dtype),
            "others": sorted(others),
        }


class ReadRolloutWorker(RolloutWorker):
    async def head(self) -> list[dict[str, Any]]:
        return await self.engine._llm.collective_rpc("head")


def actor_class() -> type:
    class Actor(ActorWorker):
        def perturb(self, sends_factors: bool) -> None:
            torch.manual_seed(3 + self.rank)
            with torch.no_grad():
                for name, parameter in self.engine.model.named_parameters():
                    if sends_factors and "lora_" not in name:
                        continue
                    shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                    shard += 0.02 * torch.randn_like(shard)

    return Actor


class Case:
    """An actor and an engine with layers in bf16."""

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, tensor_parallel: int) -> None:
        self.actor, self.rollout, self.version = actor, rollout, -1
        self.transport = BroadcastTransport(tensor_parallel, 20.0, "broadcast")

    def sync(self) -> None:
        self.version += 1
        rollout = RolloutGroup(self.rollout)
        run(rollout.sync_weights(self.actor, self.transport, version=self.version, dtype="bfloat16"))

    def sent(self) -> dict[str, torch.Tensor]:
        buckets = ray.get(self.actor.call_all("test", "export_weights", "bfloat16")[0])
        return {name: tensor.clone() for bucket in buckets for name, tensor in unpack(bucket.data, bucket.entries)}

    def master(self, name: str) -> torch.Tensor:
        """The actor's weight, in float32."""
        buckets = ray.get(self.actor.call_all("test", "export_parameters")[0])
        return next(tensor for b in buckets for own, tensor in unpack(b.data, b.entries) if own == name).clone()

    def head(self) -> torch.Tensor:
        """The engine's output layer, put together from its processes."""
        parts = self.rollout.call(0, "test", "head")
        assert {part["type"] for part in parts} == {"torch.float32"}
        assert all("torch.bfloat16" in part["others"] for part in parts)
        rows = sorted((part["rows"], part["weight"]) for part in parts)
        return torch.cat([torch.tensor(weight) for _, weight in rows])

    def mismatch(self) -> torch.Tensor:
        """The engine's log-probs less the trainer's."""
        prompts = [np.arange(5 + i, 12 + i, dtype=np.int32) for i in range(12)]
        settings = sampling(n=4, temperature=1.0, max_tokens=24, ignore_eos=True)
        calls = [
            self.rollout.submit_for_data(0, "generate", "generate", str(i), p, settings) for i, p in enumerate(prompts)
        ]
        labels = [label for label, *_ in self.rollout.gather(calls)]
        sampled = DataProtoRef.concat([call.handle(label) for call, label in zip(calls, labels, strict=True)])
        computed = run(Gang(self.actor).compute_log_probs("log_probs", sampled))
        theirs: DataProto = sampled.fetch(("rollout_log_probs",))
        return theirs["rollout_log_probs"].values - computed.fetch(("old_log_probs",))["old_log_probs"].values


@contextmanager
def started(path: str, size: int, factors: bool, head: str | None) -> Iterator[Case]:
    adapters = lora(targets=("q_proj",)) if factors else None
    model = model_settings(path, adapters, merge=not factors, compute_dtype="bf16", head_dtype=head)
    forward = PassLimits("actor_rollout_ref.rollout.log_prob_", 8)
    settings = policy_settings(model, forward=forward, weight_bucket_bytes=20_000)
    extension = {"worker_extension_cls": f"{__name__}.ReadWorker"} if head else {}
    engine = engine_settings(
        path,
        dtype="bfloat16",
        head_dtype=head,
        tensor_model_parallel_size=size,
        vllm=extension,
        lora=model.model.lora,
        lora_rank=model.model.lora_rank,
        target_modules=model.model.target_modules,
    )
    with (
        spawned("actor", actor_class(), [(0, 1)]) as actor,
        spawned("rollout", ReadRolloutWorker, [()], env={"OMP_NUM_THREADS": "1"}) as rollout,
    ):
        start_together(Gang(actor).start(settings), RolloutGroup(rollout).start([engine]))
        yield Case(actor, rollout, size)


@pytest.mark.parametrize("name", CASES)
def test_the_engine_holds_the_trainers_weight_bit_by_bit(
    local_ray: None, random_models: dict[str, str], name: str
) -> None:
    """As it was loaded, and after a sync that rounds all other weights; also in an embedding that shares it."""
    (kind, size, factors), path = CASES[name], random_models[CASES[name][0]]
    weight = "lm_head.weight" if kind == "untied" else "model.embed_tokens.weight"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).get_parameter(weight)
    assert not torch.equal(loaded, loaded.bfloat16().float()), "rounding would show"
    with started(path, size, factors, "fp32") as case:
        assert torch.equal(case.head(), loaded.detach())
        assert {part["embedding"] for part in case.rollout.call(0, "test", "head")} == {
            "torch.bfloat16" if kind == "untied" else "torch.float32"
        }
        case.actor.call_all("test", "perturb", factors)
        case.sync()
        if not factors:
            sent, master = case.sent(), case.master(weight)
            assert not torch.equal(master, loaded)
            assert {str(tensor.dtype) for tensor in sent.values() if tensor is not sent[weight]} == {"torch.bfloat16"}
            assert torch.equal(sent[weight], master)
        else:
            master = loaded.detach()
        assert torch.equal(case.head(), master)
        assert case.mismatch().abs().mean() < 0.1


def test_sampler_and_trainer_differ_less(local_ray: None, random_models: dict[str, str], tmp_path: Path) -> None:
    """The same number more in each row of the output layer moves all logits of a token alike, here by some 20: that
    changes no probability, but for the rounding of logits in bf16, to eighths. The rest is what the layers round.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(random_models["untied"], dtype=torch.float32)
    model.lm_head.weight.data += 4
    model.save_pretrained(tmp_path)
    means = {}
    for head in (None, "fp32"):
        with started(str(tmp_path), 1, False, head) as case:
            case.sync()
            means[head] = float(case.mismatch().abs().mean())
    assert 0 < means["fp32"] < SMALLER * means[None], means
