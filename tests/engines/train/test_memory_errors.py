"""What is said where a GPU is full: torch's error is raised by hand."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.memory_errors import remedied, smaller_passes, within_memory
from grpo_dist.errors import OutOfMemory
from tests.messages import says
from tests.models import objective, random_batch, random_model, trainable_engine
from tests.ranks import run_ranks

TORCHS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is free."
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF"
)


def full(*args: Any, **kwargs: Any) -> None:
    raise torch.OutOfMemoryError(TORCHS)


def test_the_nearest_remedy_counts() -> None:
    with (
        pytest.raises(OutOfMemory) as caught,
        remedied("take more GPUs"),
        smaller_passes(PassLimits("actor_rollout_ref.ref.log_prob_", 4, 1000)),
        within_memory("a pass"),
    ):
        full()
    error = pickle.loads(pickle.dumps(caught.value))  # as it travels between processes
    says(error.message, "a pass:", "Tried to", "79.10 GiB", "1.00 GiB")
    assert "PYTORCH" not in error.message
    assert error.setting == ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", 1000)
    says(error, "lower actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=1000")


def test_a_pass_of_one_sequence_is_shortened_by_other_keys() -> None:
    with pytest.raises(OutOfMemory) as caught, smaller_passes(PassLimits("actor_rollout_ref.actor.ppo_", 1)):
        raise OutOfMemory("full")
    assert "ppo_micro_batch_size_per_gpu=1: " in str(caught.value)
    assert "data.max_response_length" in str(caught.value)


def test_the_budget_of_ranks_that_split_a_pass_is_that_of_one() -> None:
    with (
        pytest.raises(OutOfMemory) as caught,
        smaller_passes(PassLimits("actor_rollout_ref.actor.ppo_", 1, 4000), ranks=4),
    ):
        raise OutOfMemory("full")
    assert caught.value.setting == ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", 1000)


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), remedied("x"), within_memory("y"):
        raise ZeroDivisionError


def one_rank(rank: int, path: str) -> dict[str, str]:
    """What an engine says of each part that finds no room."""
    data, told = random_batch(num_groups=2, n=4), {}
    for name, method in (("pass", "compute_columns"), ("update", "train_mini_batch"), ("step", "train_mini_batch")):
        engine = trainable_engine(path)
        engine.compute_log_probs(data, PassLimits("", 4))  # the comparison of layouts is over
        if name == "step":
            engine.optimizer.step = full  # type: ignore[method-assign]
        else:
            engine.forward.head = None
            engine.forward._plain = full  # type: ignore[method-assign]
        arguments = {"names": ("log_probs",)} if method == "compute_columns" else {"objective": objective()}
        try:
            getattr(engine, method)(data, limits=PassLimits("", 4), **arguments)
        except OutOfMemory as error:
            told[name] = f"{error.message} | {error.remedy}"
    return told | {"check": _checking(path, data)}


def _checking(path: str, data: Any) -> str:
    engine: FSDPEngine = trainable_engine(path)
    engine.forward.check = full  # type: ignore[method-assign]
    try:
        engine.compute_log_probs(data, PassLimits("", 4))
    except OutOfMemory as error:
        return error.message
    return ""


def test_an_engine_names_the_pass_its_tokens_and_the_rest(tmp_path: Path) -> None:
    told = run_ranks(1, one_rank, random_model("Qwen3", tmp_path, head_dim=8))[0]
    says(told["pass"], "forward pass", "micro-batch 1 of 2", " tokens, 4 sequences", "CUDA")
    says(told["update"], "forward and backward pass", "micro-batch 1 of 2")
    assert told["update"].endswith(" | "), "whoever knows the keys adds what to do"
    says(told["step"], "optimizer step", "CUDA", "optimizer_offload=true")
    says(told["check"], "layouts", "rows of ")
