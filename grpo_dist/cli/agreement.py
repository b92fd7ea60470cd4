"""`grpo-dist agreement RUN_OR_MODEL`: sampler and trainer on the same tokens, and the first operation that differs."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_dist.algorithms.agreement import LOG_PROBS, Operation, distances, first_difference, operation, roundings
from grpo_dist.algorithms.kl import k3
from grpo_dist.assets import expanded
from grpo_dist.assets.model_folder import load_tokenizer, some
from grpo_dist.cli import trained
from grpo_dist.cli.arguments import MODEL_ARGUMENTS, add_shared, check_output, command_parser, write_output
from grpo_dist.cli.replay import policy_engine
from grpo_dist.cli.trained import PROMPTS, Asker, TrainedModel, base_of, engine_for, find_trained
from grpo_dist.data.prompts import Prompt
from grpo_dist.engines.base import rollout_backend
from grpo_dist.engines.settings import PassLimits, SamplingSettings
from grpo_dist.engines.train.checkpoint import load_training_state
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.model_loading import DTYPES
from grpo_dist.engines.train.watching import watched
from grpo_dist.engines.weights.buckets import pack
from grpo_dist.errors import ConfigError
from grpo_dist.runs import named_checkpoint
from grpo_dist.terminal import show
from grpo_dist.trainer.checkpoint.manifest import versions
from grpo_dist.trainer.rollout.job import group_seed
from grpo_dist.trainer.run_prompts import read_prompts
from grpo_dist.workers.rollout import group_batch

LIMIT = 0.01  # nats per token: that of rollout_corr/k3_kl in docs/metrics.md
_LAYER = re.compile(r"(.*\blayers\.\d+)(?:\.(.*))?")


def main(arguments: Sequence[str]) -> int:
    """Compare both ends; 2 if they are further apart than the limit."""
    parser = command_parser(
        "agreement",
        "Run the engine that samples and the trainer over the same tokens, layer by layer: names the first operation "
        "whose outputs differ by more than rounding, says what that costs in KL, and writes a certificate. Exit code "
        "2: the KL is above --limit.",
    )
    add_shared(parser, *MODEL_ARGUMENTS)
    parser.add_argument("--prompts", **PROMPTS)
    parser.add_argument("--n", type=int, default=8, help="responses; %(default)s")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each response; %(default)s")
    parser.add_argument("--limit", type=float, default=LIMIT, help="most KL, in nats per token; %(default)s")
    output = "the certificate, in JSON; replaces an older one. %(default)s"
    parser.add_argument("--output", metavar="FILE", default="agreement.json", help=output)
    options = parser.parse_intermixed_args(arguments)
    for flag, value, least in (("limit", options.limit, 0), ("n", options.n, 1), ("max-tokens", options.max_tokens, 1)):
        if not value >= least:
            raise ConfigError(f"--{flag} {value}: give at least {least}")
    check_output(options.output, replaces=True)
    model = find_trained(options.model, options.overrides, options.step, trust=options.trust)
    checkpoint = None if model.base is None else named_checkpoint(expanded(options.model), options.step)
    agreement, certificate = asyncio.run(_compare(model, checkpoint, options))
    path = expanded(options.output)
    write_output(path, json.dumps(certificate, indent=1) + "\n")
    show("\n".join([*_text(agreement, certificate), f"certificate: {path}"]) + "\n")
    return 0 if agreement.kl <= options.limit else 2


async def _compare(
    model: TrainedModel, checkpoint: Path | None, options: argparse.Namespace
) -> tuple[Agreement, dict[str, Any]]:
    at_start = model if checkpoint is None else base_of(model)  # the checkpoint has what was trained, factors too
    config, settings = at_start.config, engine_for(at_start)
    policy, backend = config.actor_rollout_ref.model, rollout_backend(settings.rollout.name)
    rollout, held = backend.watchable(settings.rollout), policy if policy.sends_factors else settings.model
    settings = replace(settings, rollout=rollout, model=held)
    prompts = _prompts(model, options)
    engine: Any = backend.load()(settings)
    tokenizer = load_tokenizer(str(model.folder), trust_remote_code=settings.model.trust_remote_code)
    sampling = replace(at_start.plan.sampling, seed=config.trainer.seed, max_tokens=options.max_tokens)
    ids = [asked.token_ids.tolist() for asked in Asker(model, engine, tokenizer, sampling).tokenized(prompts)]
    warnings.simplefilter("ignore")  # what vLLM imports warns of what it imports
    show(f"starting an engine and a trainer on {settings.device}\n", sys.stderr)
    with policy_engine(replace(at_start.plan, steps=1), device=settings.device) as trainer:
        if checkpoint is not None:
            load_training_state(checkpoint / "actor", trainer.model, None, None)
        await engine.start()
        try:
            await send_weights(engine, trainer, settings.rollout.checkpoint_engine.bucket_bytes)
            agreement = await compare(engine, trainer, ids, sampling)
            kernels = await engine.attention_kernels()
        finally:
            engine.shutdown()
        sampler = {"type": settings.dtype, "temperature": sampling.temperature, "attention": kernels}
        own = {"type": trainer.settings.compute_dtype, "temperature": config.actor_rollout_ref.rollout.temperature}
        own |= {"attention": [trainer.model.config._attn_implementation], "layout": trainer.forward.report}
        return agreement, {
            "model": model.name,
            "versions": versions(),
            "sampler": sampler | {"layout": "one response alone: its prompt, then token by token"},
            "trainer": own,
            **_judged(agreement, tokenizer, options.limit),
        }


@dataclass(frozen=True)
class Agreement:
    """How far sampler and trainer agree.

    Attributes:
        operations: that were seen at both ends, in the trainer's order; the log-probs are the last.
        unseen: names of the trainer's operations that were not seen in the sampler, or not in the same shape.
        places: response, position in it and token id of all T sampled tokens.
        sampler: (T,) log-probs of the sampler, nats.
        trainer: (T,) of the trainer.
    """

    operations: list[Operation]
    unseen: list[str]
    places: list[tuple[int, int, int]]
    sampler: Tensor
    trainer: Tensor

    @property
    def first(self) -> Operation | None:
        """The first operation that differs by more than rounding."""
        return first_difference(self.operations)

    @property
    def kl(self) -> float:
        """KL(sampler || trainer) by k3, nats per token."""
        return float(k3(self.sampler.double(), self.trainer.double()).mean())  # in float32 it is 0 below 1e-7


async def send_weights(sampler: Any, trainer: FSDPEngine, bucket_bytes: int) -> None:
    """Send the sampler what a run sends it: whole weights, with LoRA's factors merged, or its factors alone."""
    dtype = sampler.settings.dtype
    factors = sampler.settings.lora is not None
    tensors = trainer.lora_factors(dtype) if factors else trainer.full_parameters(dtype, as_in_files=True)
    await sampler.weights.load(list(pack(tensors, bucket_bytes=bucket_bytes)), sampler.weights.version + 1)


async def compare(
    sampler: Any, trainer: FSDPEngine, prompts: Sequence[Sequence[int]], sampling: SamplingSettings
) -> Agreement:
    """Sample a response to each prompt (token ids), and run the trainer over the same tokens, one after the other.

    The sampler is a `VLLMEngine` without prefix cache, with the weights of the trainer, which has one rank.
    """
    dtypes = (getattr(torch, sampler.settings.dtype), DTYPES[trainer.settings.compute_dtype])
    coarser = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    apart: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    unseen: dict[str, None] = {}
    places: list[tuple[int, int, int]] = []
    log_probs: list[tuple[Tensor, ...]] = []
    for row, prompt in enumerate(prompts):
        seeded = replace(sampling, n=1, seed=group_seed(sampling.seed or 0, 0, row))
        response, theirs = await sampler.watched(prompt, seeded)
        data = group_batch(str(row), np.asarray(prompt), [response])
        theirs[LOG_PROBS] = data["rollout_log_probs"].values.unsqueeze(1)
        if row == 0:  # which compares layouts first
            trainer.compute_log_probs(data, PassLimits("", 1))
        own, wobbled = watched(trainer, data), watched(trainer, data, torch.finfo(coarser).eps)
        for name, output in own.items():
            n = min(len(output), len(theirs.get(name, ())))
            if n < len(output) - 1 or theirs[name].shape[1] != output.shape[1]:  # a last token is no input of a sampler
                unseen[name] = None
                continue
            outputs = output[:n]
            pair = distances(name, theirs[name][:n], outputs), roundings(name, wobbled[name][:n], outputs)
            apart[name].append(pair)
        places += [(row, position, token) for position, token in enumerate(response.token_ids)]
        log_probs.append((theirs[LOG_PROBS][:, 0], own[LOG_PROBS][:, 0]))
    operations = []
    for name, pairs in apart.items():
        differences, wobbles = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        operations.append(operation(name, differences, wobbles, coarser))
    both = (torch.cat(parts) for parts in zip(*log_probs, strict=True))
    return Agreement(operations, list(unseen), places, *both)


def _prompts(model: TrainedModel, options: argparse.Namespace) -> list[Prompt]:
    if options.prompts:
        return trained.given_prompts(model, options.prompts)[0][: options.n]
    files = model.config.data.val_files
    if not files:
        raise ConfigError(f"no prompts: {model.name} has no data.val_files; give --prompts")
    return read_prompts(model.config, "data.val_files", files, options.n, trained.NO_ANSWERS)


def _judged(agreement: Agreement, tokenizer: Any, limit: float) -> dict[str, Any]:
    worst, kl, first = int((agreement.sampler - agreement.trainer).abs().argmax()), agreement.kl, agreement.first
    row, position, token = agreement.places[worst]
    return {
        "responses": 1 + max(row for row, _, _ in agreement.places),
        "num_tokens": len(agreement.places),
        "limit": limit,
        "kl": kl,
        "worst_token": {
            "response": row,
            "position": position,
            "id": token,
            "text": tokenizer.decode([token]),
            "sampler": float(agreement.sampler[worst]),
            "trainer": float(agreement.trainer[worst]),
        },
        "operations": [asdict(each) for each in agreement.operations],
        "unseen": sorted({re.sub(r"\b\d+\b", "*", name) for name in agreement.unseen}),
        "first_difference": None if first is None else asdict(first),
        "verdict": "beyond the limit" if not kl <= limit else "agree" if first is None else "differ",
    }


def _text(agreement: Agreement, certificate: dict[str, Any]) -> Iterator[str]:
    yield f"{certificate['model']}: {certificate['num_tokens']} tokens of {certificate['responses']} responses"
    for end in ("sampler", "trainer"):
        yield f"  {end}: " + "{type}, temperature {temperature:g}, {attention[0]}; {layout}".format(**certificate[end])
    yield f"\n{'largest difference of a token':<44} {'any':>9} {'mean':>9} {'rounding':>9}"
    by_layer: dict[str, list[Operation]] = {}
    for each in agreement.operations:
        layer = _LAYER.fullmatch(each.name)
        by_layer.setdefault(layer[1] if layer else each.name, []).append(each)
    for name, members in by_layer.items():
        most = max(members, key=lambda each: each.largest)
        inside = most.name.removeprefix(name).removeprefix(".")
        shown = f"{name} ({inside})" if inside else name
        yield f"  {shown:<42} {most.largest:9.2g} {most.mean:9.2g} {most.rounding:9.2g}"
    yield "(of an operation's output, relative to its size; of log_probs in nats)"
    if len(agreement.operations) == 1:
        yield (
            "the sampler's operations were not seen: its code is compiled, or its modules have other names. Log-probs "
            "alone are compared; with actor_rollout_ref.rollout.enforce_eager=true it is not compiled"
        )
    elif certificate["unseen"]:
        yield f"not compared, as the sampler has none of that name and shape: {some(certificate['unseen'])}"
    if (first := agreement.first) is None:
        yield f"no difference beyond rounding, in {len(agreement.operations)} operations"
    else:
        yield f"the first operation that differs beyond rounding: {first.name}"
        yield f"  by {first.mean:.2g} on average, where rounding explains {first.rounding:.2g}"
    yield (
        "worst token: {text!r}, token {position} of response {response}: log-prob {sampler:.6f} in the sampler, "
        "{trainer:.6f} in the trainer".format(**certificate["worst_token"])
    )
    limit = certificate["limit"]
    side = "within" if agreement.kl <= limit else "above"
    yield f"KL from sampler to trainer: {agreement.kl:.3g} nats per token (k3), {side} --limit {limit:g}"
