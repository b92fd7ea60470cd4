"""TRL, by methods of its trainers, made with a tiny model of their own.

The trainers compute advantages and importance weights while they generate, and the loss from a forward pass. So the
generated responses and the log-probs of the passes are given to them; rewards come from reward functions, as ever.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import cache
from importlib import metadata
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from conformance.adapters import NotOffered
from conformance.adapters.tensors import column, columns, rows
from conformance.form import Case

# loss_type of each aggregation by verl's names.
AGGREGATIONS = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
# Policy losses that are a loss_type with an aggregation of its own.
OWN = {"cispo": "token-mean", "sapo": "seq-mean-token-mean", "vespo": "token-mean"}
VESPO = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig), "gmpo": (GMPOTrainer, GMPOConfig)}


def version() -> str:
    """Of the package."""
    return f"trl {metadata.version('trl')}"


@cache
def folder() -> str:
    """An empty folder for what trainers may write."""
    return tempfile.mkdtemp()


def make(kind: str, rewards: int = 1, steps: int = 1, size: int = 4, **settings: Any) -> Any:
    """A trainer, made as users make it; `steps` micro-batches of `size` rows are an optimizer step."""
    trainer, config = TRAINERS[kind]
    tokens = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=3,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    fixed = {"use_cpu": True, "bf16": False, "report_to": "none", "gradient_checkpointing": False, "num_generations": 2}
    args = config(
        folder(),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=steps,
        **(fixed | settings),
    )
    return trainer(
        model,
        [lambda completions, **_: [0.0] * len(completions) for _ in range(rewards)],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>"),
    )


cached = cache(make)


def with_log_probs(trainer: Any, log_probs: Tensor) -> Any:
    """The trainer with these log-probs as those of its forward passes."""
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None)
    trainer.model.train()
    return trainer


def loss_of(trainer: Any, given: dict[str, Tensor], mask: Tensor, tokens: Tensor, steps: int = 1) -> Tensor:
    """`_compute_loss` of a micro-batch; `tokens` are those of the whole mini-batch, `steps` its micro-batches."""
    trainer = with_log_probs(trainer, given["log_probs"])
    trainer.current_gradient_accumulation_steps = steps
    ones = torch.ones(mask.shape, dtype=torch.long)
    batch = {
        "prompt_ids": ones[:, :1],
        "prompt_mask": ones[:, :1],
        "completion_ids": ones,
        "completion_mask": ones,
        "tool_mask": mask.long(),
        "num_items_in_batch": tokens,
        "advantages": given["advantages"],
        "old_per_token_logps": given["old_log_probs"],
    }
    if "ref_log_probs" in given:
        batch["ref_per_token_logps"] = given["ref_log_probs"]
    trainer.use_vllm = "rollout_is_weights" in given
    if trainer.use_vllm:  # weights are 1 where a tool speaks
        batch["importance_sampling_ratio"] = given["rollout_is_weights"].where(mask.bool(), 1.0)
    return trainer._compute_loss(trainer.model, batch)


def loss_settings(name: str, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(trainer, its arguments) for a policy loss."""
    mode = settings["loss_agg_mode"]
    low, high = settings.get("clip_ratio_low", 0.0), settings.get("clip_ratio_high", 0.0)
    if name in ("vanilla", "gspo"):
        level = "sequence" if name == "gspo" else "token"
        clip = {"epsilon": low, "epsilon_high": high, "delta": settings.get("clip_ratio_c")}
        return "grpo", {"loss_type": AGGREGATIONS[mode], "importance_sampling_level": level, **clip}
    if name == "geo_mean":
        return "gmpo", {"epsilon": low, "epsilon_high": high}
    if name not in OWN:
        raise NotOffered(f"no policy loss {name}")
    if mode != OWN[name]:
        raise NotOffered(f"{name} has the aggregation {OWN[name]}")
    if name == "cispo":
        if low < 1:
            raise NotOffered("cispo has no lower bound")
        return "grpo", {"loss_type": "cispo", "epsilon_high": 1 + high}
    if name == "sapo":
        temperatures = {f"sapo_temperature_{side}": settings[f"tau_{side}"] for side in ("pos", "neg")}
        return "grpo", {"loss_type": "sapo", **temperatures}
    return "grpo", {"loss_type": "vespo", **{key: settings[key] for key in VESPO}}


def policy_loss(name: str, case: Case) -> dict[str, Any]:
    """Loss, gradient and the metric `clip_ratio/region_mean`."""
    kind, arguments = loss_settings(name, case.settings)
    given = columns(case.inputs)
    mask = given["response_mask"]
    log_probs = given["log_probs"].requires_grad_()
    one = bool((given["advantages"] == given["advantages"][:, :1])[mask.bool()].all())
    if kind == "gmpo" and "rollout_is_weights" in given:
        raise NotOffered("gmpo has no importance weights")
    if one:  # as its trainers have it; a subclass may bring one for each token
        given["advantages"] = given["advantages"][:, 0]
    elif name == "gspo":
        raise NotOffered("no token variant of gspo")
    trainer = cached(kind, **arguments)
    loss = loss_of(trainer, given, mask, mask.sum())
    loss.backward()
    found = {"loss": float(loss.detach()), "gradient": rows(log_probs.grad)}
    fraction = trainer._metrics["train"].get("clip_ratio/region_mean")
    return found | ({"clip_fraction": fraction[-1]} if fraction else {})


def aggregation(name: str, case: Case) -> dict[str, Any]:
    """Of token losses that are advantages of log-ratio 0, with the other sign."""
    if name not in AGGREGATIONS:
        raise NotOffered(f"no aggregation {name}")
    losses, mask = column(case.inputs["losses"]), column(case.inputs["response_mask"])
    parts = case.settings.get("micro_batches", [list(range(len(mask)))])
    scale = {"max_completion_length": case.settings["loss_scale_factor"]} if name.endswith("norm") else {}
    trainer = cached("grpo", steps=len(parts), size=len(parts[0]), loss_type=AGGREGATIONS[name], **scale)
    zeros = torch.zeros_like(losses)
    found = 0.0
    for part in parts:
        given = {"log_probs": zeros[part], "old_log_probs": zeros[part], "advantages": -losses[part]}
        found += float(loss_of(trainer, given, mask[part], mask.sum(), len(parts)))
    return {"loss": found}


def kl(name: str, case: Case) -> dict[str, Any]:
    """The loss of one token at a time without an advantage, with beta 1."""
    if name not in ("k3", "unbiased_k3"):
        raise NotOffered(f"no KL {name}")
    trainer = make("grpo", loss_type="grpo", use_bias_correction_kl=name == "unbiased_k3")
    trainer.beta = 1.0  # as an argument it loads a reference model by name
    given = columns(case.inputs)
    mask = given.pop("response_mask")
    log_probs = given["log_probs"].requires_grad_()
    given.setdefault("old_log_probs", log_probs.detach())
    given["advantages"] = torch.zeros(len(mask))
    values = torch.zeros_like(mask)
    for i, t in mask.nonzero().tolist():
        own = {key: column[i : i + 1] for key, column in given.items()}
        place = torch.zeros_like(mask[i : i + 1])
        place[0, t] = 1.0
        loss = loss_of(trainer, own, place, place.sum())
        loss.backward()
        values[i, t] = loss.detach()
    return {"kl": rows(values), "gradient": rows(log_probs.grad)}


def generated(trainer: Any, mask: Tensor, scores: list[Tensor], sampler: Tensor | None = None) -> dict[str, Tensor]:
    """`_generate_and_score_completions` of responses whose trained tokens are those of `mask`, with these scores."""
    count = len(mask)
    for own, name in zip(scores, range(len(scores)), strict=True):
        values = [None if score != score else score for score in own.tolist()]
        trainer.reward_funcs[name] = lambda values=values, **_: values
    ids = [[2] * mask.shape[1]] * count
    tools = [[int(place) for place in row] for row in mask.tolist()]
    samplers = None if sampler is None else sampler.tolist()
    if isinstance(trainer, RLOOTrainer):
        trainer._generate = lambda prompts: ([[2]] * count, ids, ["a"] * count)
    else:
        trainer._generate = lambda prompts: ([[2]] * count, ids, tools, ["a"] * count, samplers, {}, None, None)
    trainer.use_vllm = sampler is not None
    trainer.tools = []
    return trainer._generate_and_score_completions([{"prompt": "a"} for _ in range(count)])


def advantage_settings(name: str, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(trainer, its arguments) for an estimator."""
    if name == "grpo":
        return "grpo", {"scale_rewards": "group" if settings["norm_adv_by_std_in_grpo"] else "none"}
    if name == "lite_ppo":
        return "grpo", {"scale_rewards": "batch"}
    if name == "rloo":
        return "rloo", {}
    if name == "gdpo":
        weights = tuple(settings["gdpo_reward_weights"])
        return "grpo", {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": weights}
    raise NotOffered(f"no estimator {name}")


def advantage(name: str, case: Case) -> dict[str, Any]:
    """The advantages of responses, in the order of their groups, on all tokens."""
    kind, arguments = advantage_settings(name, case.settings)
    given = columns(case.inputs)
    index, mask = given["index"], given["response_mask"]
    sizes = set(Counter(index).values())
    if len(sizes) > 1:
        raise NotOffered("groups have one size")
    order = sorted(range(len(index)), key=lambda i: index[i])
    scores = list(given.get("reward_components", {"score": given["token_level_rewards"].sum(-1)}).values())
    arguments = {key: list(value) if isinstance(value, tuple) else value for key, value in arguments.items()}
    trainer = make(kind, len(scores), size=len(index), num_generations=sizes.pop(), beta=0.0, **arguments)
    with_log_probs(trainer, torch.zeros_like(mask))
    found = generated(trainer, mask[order], [own[order] for own in scores])["advantages"]
    advantages = torch.zeros_like(found)
    advantages[order] = found
    return {"advantages": rows(advantages[:, None] * mask)}


def correction(name: str, case: Case) -> dict[str, Any]:
    """`get_off_policy_mask`, or the importance weights that are made while responses are generated."""
    given, settings = columns(case.inputs), case.settings
    mask = given["response_mask"]
    if name == "off_policy_mask":
        own = given["advantages"], given["log_probs"], given["rollout_log_probs"]
        return {"weights": rows(GRPOTrainer.get_off_policy_mask(*own, mask, settings["threshold"]))}
    if not name.startswith("rollout_is"):
        raise NotOffered(f"no correction {name}")
    if settings.get("rollout_is_batch_normalize"):
        raise NotOffered("weights are not divided by their mean")
    *lower, upper = map(float, settings["rollout_is_threshold"].split("_"))
    limits = {"clip_max": upper} | ({"clip_min": lower[0]} if lower else {})
    mode = f"{settings['rollout_is']}_{'mask' if lower else 'truncate'}"
    arguments = {f"vllm_importance_sampling_{key}": value for key, value in limits.items()}
    trainer = cached("grpo", vllm_importance_sampling_mode=mode, **arguments)
    with_log_probs(trainer, given["old_log_probs"])
    scores = [torch.zeros(len(mask))]
    found = generated(trainer, mask, scores, given["rollout_log_probs"])["importance_sampling_ratio"]
    return {"weights": rows(found.expand_as(mask))}
