"""Arguments that go to vLLM as they are (`rollout.engine_kwargs.vllm`): those that would change more than its speed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grpo_dist.config.problems import Problem, shown
from grpo_dist.config.schema import RunConfig

_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_KEY = f"{_ROLLOUT}.engine_kwargs.vllm"
_MORE_GPUS = f"raise {_ROLLOUT}.tensor_model_parallel_size, up to the GPUs of a machine"
_SAMPLING = f"responses are sampled as {_ROLLOUT}.temperature, top_p, top_k, min_p and stop say; set those"
_TOKENIZER = (
    f"engines have the tokenizer that the rows are tokenized with, which is that of {_MODEL}.path; leave it out"
)
# Arguments that belong to keys of the config, or to the trainer: the value without effect, and what to do instead.
_OWNED: dict[str, tuple[Any, str]] = {
    # the layout: an engine would use GPUs that are not reserved, or get no weights
    "tensor_parallel_size": (1, f"the GPUs are reserved by {_ROLLOUT}.tensor_model_parallel_size; set that"),
    "pipeline_parallel_size": (1, f"an engine is not split by layers, since it is on one machine; {_MORE_GPUS}"),
    "prefill_context_parallel_size": (1, f"an engine is not split by sequences; {_MORE_GPUS}"),
    "data_parallel_size": (1, "engines are counted by cluster.rollout_world_size; raise that"),
    "enable_expert_parallel": (False, "experts are split by their width, as other layers are; leave it out"),
    "enable_eplb": (False, "experts do not move between GPUs; leave it out"),
    "nnodes": (1, f"an engine must be on one machine; {_MORE_GPUS}"),
    "distributed_executor_backend": (
        "mp",
        "an engine of several GPUs starts its own processes on them (mp), and one of a single GPU needs none; "
        "leave it out",
    ),
    # tokens and their log-probs: the trainer would learn from others than it takes them for
    "model": (None, f"engines sample from the policy, {_MODEL}.path; set that"),
    "hf_config_path": (None, f"engines have the config.json of the policy, {_MODEL}.path; leave it out"),
    "hf_overrides": (None, f"it would change the engines' model and not the trained one; set {_MODEL}.override_config"),
    "tokenizer": (None, _TOKENIZER),
    "tokenizer_mode": ("auto", _TOKENIZER),
    "skip_tokenizer_init": (
        None,
        f"engines have a tokenizer where {_ROLLOUT}.stop or an agent needs one; leave it out",
    ),
    "dtype": (None, f"the type of an engine's weights is {_ROLLOUT}.dtype; set that"),
    "max_model_len": (None, f"the longest sequence of an engine is {_ROLLOUT}.max_model_len; set that"),
    "seed": (None, "the seed of samples is trainer.seed; set that"),
    "logprobs_mode": (
        "processed_logprobs",
        "log-probs must be of the distribution that the tokens are sampled from; leave it out",
    ),
    "generation_config": ("vllm", _SAMPLING),
    "override_generation_config": ({}, _SAMPLING),
}
# Arguments by which an engine samples from another distribution than the trainer's, and their values without effect.
_INEXACT: dict[str, Any] = {
    "quantization": None,
    "kv_cache_dtype": "auto",
    "logits_processors": [],
    "watermark_config": None,
}
_DRAFTS = ("speculative_config", "spec_method", "spec_model", "spec_tokens")


def drafts(config: RunConfig) -> str:
    """Return the argument that makes engines decode speculatively, as key=value; "" if none does."""
    given = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    return next((f"{_KEY}.{name}={shown(given[name])}" for name in _DRAFTS if given.get(name) is not None), "")


def vllm_arguments_are_no_keys_of_the_config(config: RunConfig) -> Iterator[Problem]:
    """Engines that are told otherwise than the trainer would sample what the trainer takes for something else."""
    for name, value in config.actor_rollout_ref.rollout.engine_kwargs.vllm.items():
        if name in _OWNED and value not in (None, _OWNED[name][0]):
            yield Problem(f"{_KEY}.{name}={shown(value)}: {_OWNED[name][1]}", (f"{_KEY}.{name}",))


def seeded_samples_are_not_drafted(config: RunConfig) -> Iterator[Problem]:
    """Drafts make a seed give other tokens, by how many of them are accepted."""
    rollout, given = config.actor_rollout_ref.rollout, drafts(config)
    if given and rollout.resolved_deterministic(config.device):
        deterministic, where = f"{_ROLLOUT}.deterministic", "" if rollout.deterministic else ", on CPU that is true"
        why = "with drafts a seed gives other tokens than without; set deterministic=false, or leave the drafts out"
        text = f"{given}, {deterministic}={shown(rollout.deterministic)}{where}: {why}"
        yield Problem(text, (given.partition("=")[0], deterministic))


ENGINE_RULES = (vllm_arguments_are_no_keys_of_the_config, seeded_samples_are_not_drafted)


def engine_notes(config: RunConfig) -> Iterator[Problem]:
    """Notes on arguments that change what is sampled."""
    given = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    for name in (name for name, plain in _INEXACT.items() if given.get(name) not in (None, plain)):
        why = (
            "responses are sampled from another distribution than the one that the trainer's log-probs are of; "
            "training/rollout_probs_diff_* shows the difference, algorithm.rollout_correction corrects for it"
        )
        yield Problem(f"{_KEY}.{name}={shown(given[name])}: {why}", (f"{_KEY}.{name}",))
    if drafted := drafts(config):
        why = "drafted tokens are of the same distribution, but not those that the same seeds give without"
        yield Problem(f"{drafted}: {why}", (drafted.partition("=")[0],))
