"""A process that calls `grpo-dist agreement` twice, and plants faults while the engines of a call are there.

python -m tests.cli.planted_faults FOLDER MODEL: FOLDER/run is a run with LoRA, MODEL a mixture of experts. What was
found is written to FOLDER/found.json.
"""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import grpo_dist.cli.agreement as command
from grpo_dist.cli.agreement import Agreement, compare, send_weights
from grpo_dist.cli.entry import main

LAYER = "model.layers.1"
PROMPTS = ("w5 w6 w7 w8", "w40 w41 w42 w43 w44 w45 w46 w47 w48", "w90 w12 w31")
CPU = "trainer.n_gpus_per_node=0"
Sent = Iterable[tuple[str, Tensor]]


# --- faults -------------------------------------------------------------------------------------------------------
class Spoiled:
    """A trainer that sends other weights than it has."""

    def __init__(self, trainer: Any, change: Callable[[str, Tensor], tuple[str, Tensor]]) -> None:
        self.trainer, self.change = trainer, change

    def full_parameters(self, dtype: str, *, as_in_files: bool) -> Sent:
        return (self.change(*each) for each in self.trainer.full_parameters(dtype, as_in_files=as_in_files))

    def lora_factors(self, dtype: str) -> Sent:
        return (self.change(*each) for each in self.trainer.lora_factors(dtype))


def without_norm(norm: str) -> Callable[[str, Tensor], tuple[str, Tensor]]:
    return lambda name, weight: (name, torch.ones_like(weight) if name == f"{LAYER}.{norm}.weight" else weight)


def swapped(name: str, weight: Tensor) -> tuple[str, Tensor]:
    numbers = {f"{LAYER}.mlp.experts.{a}.": f"{LAYER}.mlp.experts.{b}." for a, b in ((2, 5), (5, 2))}
    part = next((part for part in numbers if name.startswith(part)), "")
    return name.replace(part, numbers.get(part, "")) if part else name, weight


def older(name: str, factor: Tensor) -> tuple[str, Tensor]:
    return name, factor - 1e-2 if name.endswith(f"{LAYER}.self_attn.q_proj.lora_B.weight") else factor


def turn(worker: Any, theta: float) -> None:
    for module in worker.model_runner.get_model().modules():
        if hasattr(module, "cos_sin_cache"):
            cache = module.cos_sin_cache
            frequencies = theta ** -(torch.arange(0, module.rotary_dim, 2) / module.rotary_dim)
            angles = torch.outer(torch.arange(len(cache)).float(), frequencies)
            cache.copy_(torch.cat([angles.cos(), angles.sin()], -1))


# --- the calls ----------------------------------------------------------------------------------------------------
def told_of(agreement: Agreement) -> dict[str, Any]:
    first = agreement.first
    return {"first": None if first is None else first.name, "kl": agreement.kl}


async def with_faults(found: dict[str, Any], ends: tuple[Any, ...], faults: dict[str, Any]) -> None:
    """Compare with weights that differ, one after the other, and at last with the right ones again."""
    engine, trainer, prompts, sampling = ends
    for name, change in faults.items():
        await send_weights(engine, Spoiled(trainer, change), 1 << 20)  # type: ignore[arg-type]
        found[name] = told_of(await compare(engine, trainer, prompts, sampling))
    await send_weights(engine, trainer, 1 << 20)
    found["mended"] = told_of(await compare(engine, trainer, prompts, sampling))


def call(folder: Path, experts: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def of_experts(*ends: Any) -> Agreement:
        norms = {
            "no k norm": without_norm("self_attn.k_norm"),
            "no layer norm": without_norm("post_attention_layernorm"),
        }
        await with_faults(found, ends, norms | {"swapped experts": swapped})
        found["another temperature"] = told_of(await compare(*ends[:3], replace(ends[3], temperature=0.7)))
        for theta in (1e6, 1e4):
            await ends[0]._llm.collective_rpc(turn, (theta,))
            found["another theta" if theta > 1e4 else "mended theta"] = told_of(await compare(*ends))
        return await compare(*ends)

    async def of_factors(*ends: Any) -> Agreement:
        await with_faults(found, ends, {"an old factor": older})
        return await compare(*ends)

    async def moved(engine: Any, trainer: Any, bucket_bytes: int) -> None:
        """Norms that are not all ones, as training leaves them."""
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in trainer.model.named_parameters():
                if "norm" in name:
                    weight.to_local().mul_(0.5 + torch.rand(weight.shape, generator=generator))
        await send_weights(engine, trainer, bucket_bytes)

    prompts = [part for text in PROMPTS for part in ("--prompts", text)]
    lora = [str(folder / "run"), "actor_rollout_ref.model.lora.merge=false", "--limit", "0", "--n", "2"]
    calls = {
        "experts": ([experts, *prompts, "--n", "3", "--max-tokens", "24"], of_experts, moved),
        "run": (lora, of_factors, send_weights),
    }
    for name, (arguments, comparing, sending) in calls.items():
        command.compare, command.send_weights = comparing, sending  # type: ignore[assignment]
        keys = [CPU, "actor_rollout_ref.actor.fsdp_config.dtype=fp32", "actor_rollout_ref.rollout.dtype=float32"]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = main(["agreement", *arguments, *keys, "--output", str(folder / f"{name}.json")])
        found[name] = {"code": code, "out": out.getvalue()} | json.loads((folder / f"{name}.json").read_text())
    return found


if __name__ == "__main__":
    place = Path(sys.argv[1])
    (place / "found.json").write_text(json.dumps(call(place, sys.argv[2])))
