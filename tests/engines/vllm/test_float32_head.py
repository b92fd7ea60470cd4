"""vLLM's output layer in float32 beside layers in bf16, on real engines: what it samples with, what a sync brings."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.vllm.float32_head import WorkerExtension
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.event_loop import run
from grpo_dist.workers.gang import Gang
from grpo_dist.workers.rollout import RolloutGroup, RolloutWorker
from grpo_dist.workers.weight_transport import BroadcastTransport
from tests.engines.vllm.real import of_folder, sampling
from tests.processes import spawned, start_together
from tests.worker_settings import engine_settings, lora, model_settings, policy_settings
from tests.workers.test_weight_transport import Case, actor_class, exported

pytestmark = [pytest.mark.ray, pytest.mark.deep]

# What of the mean difference of two log-probs remains with the output layer in float32.
SMALLER = 0.7


class ReadWorker(WorkerExtension):
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


class HeadCase(Case):
    """Of an actor and an engine with layers in bf16."""

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
        prompts, submit = [np.arange(5 + i, 12 + i, dtype=np.int32) for i in range(12)], self.rollout.submit_for_data
        calls = [submit(0, "generate", "generate", f"{i}", prompt, settings) for i, prompt in enumerate(prompts)]
        labels = [label for label, *_ in self.rollout.gather(calls)]
        sampled = DataProtoRef.concat([call.handle(label) for call, label in zip(calls, labels, strict=True)])
        computed = run(Gang(self.actor).compute_log_probs("log_probs", sampled))
        theirs = sampled.fetch(("rollout_log_probs",))
        return theirs["rollout_log_probs"].values - computed.fetch(("old_log_probs",))["old_log_probs"].values


@contextmanager
def started(path: str, size: int, factors: bool, head: str | None) -> Iterator[HeadCase]:
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
        yield HeadCase("", path, actor, rollout, BroadcastTransport(size, 20.0, "broadcast"))


@pytest.mark.parametrize(
    ("kind", "size", "factors"),
    [
        pytest.param("tied", 1, False, id="tied"),
        pytest.param("untied", 1, False, id="untied", marks=pytest.mark.long),
        pytest.param("tied", 2, False, id="tensor parallel", marks=pytest.mark.long),
        pytest.param("untied", 2, False, id="tensor parallel, untied", marks=pytest.mark.long),
        pytest.param("untied", 1, True, id="factors"),
    ],
)
def test_the_engine_holds_the_trainers_weight_bit_by_bit(
    local_ray: None, random_models: dict[str, str], kind: str, size: int, factors: bool
) -> None:
    """As it was loaded, and after a sync that rounds all other weights; also in an embedding that shares it."""
    path = random_models[kind]
    weight = "lm_head.weight" if kind == "untied" else "model.embed_tokens.weight"
    loaded = of_folder(path).get_parameter(weight).detach()
    assert not torch.equal(loaded, loaded.bfloat16().float()), "rounding would show"
    with started(path, size, factors, "fp32") as case:
        assert torch.equal(case.head(), loaded)
        of_embedding = "torch.bfloat16" if kind == "untied" else "torch.float32"
        assert {part["embedding"] for part in case.rollout.call(0, "test", "head")} == {of_embedding}
        case.actor.call_all("test", "perturb", 3, 1.0, "lora_" if factors else "")
        case.sync("bfloat16")
        master = loaded
        if not factors:
            sent = exported(case.actor, "export_weights", "bfloat16")
            master = exported(case.actor, "export_parameters")[weight]
            assert not torch.equal(master, loaded)
            assert {str(tensor.dtype) for tensor in sent.values() if tensor is not sent[weight]} == {"torch.bfloat16"}
            assert torch.equal(sent[weight], master)
        assert torch.equal(case.head(), master)
        assert case.mismatch().abs().mean() < 0.1


def test_sampler_and_trainer_differ_less(local_ray: None, random_models: dict[str, str], tmp_path: Path) -> None:
    """The same more in each row of the output layer moves all logits alike: what remains is their rounding in bf16."""
    model = of_folder(random_models["untied"])
    model.lm_head.weight.data += 4
    model.save_pretrained(tmp_path)
    means = {}
    for head in (None, "fp32"):
        with started(str(tmp_path), 1, False, head) as case:
            case.sync("bfloat16")
            means[head] = float(case.mismatch().abs().mean())
    assert 0 < means["fp32"] < SMALLER * means[None], means
