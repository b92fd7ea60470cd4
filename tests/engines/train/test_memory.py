"""What training holds: peaks of each rank's process, gradients between passes, and the largest tensor of a pass."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train import hf_export
from grpo_dist.engines.train.checkpoint import copied, training_state
from grpo_dist.engines.train.memory_errors import remedied, smaller_passes, within_memory
from grpo_dist.engines.train.objectives import PolicyObjective
from grpo_dist.errors import OutOfMemory
from grpo_dist.protocol import DataProto, Ragged
from tests.engines.train.plain import built
from tests.fake_memory import GIB, fake_engine, peak_of_update, sequences
from tests.messages import refuses, says
from tests.models import add_tokenizer, objective, random_batch, random_model, trainable_engine
from tests.ranks import run_ranks
from tests.tensor_sizes import largest_tensor
from tests.worker_settings import model_settings

# --- the process of a rank -------------------------------------------------------------------------------------------
MIB = 1 << 20
RANKS = 4
FILE_BYTES = 32 * MIB
CLEAR = Path("/proc/self/clear_refs")

needs_a_peak = pytest.mark.skipif(not os.access(CLEAR, os.W_OK), reason="the kernel does not start a peak anew")


def peak(work: Callable[[], Any]) -> tuple[Any, int]:
    """What `work` returns, and the most bytes that the process held meanwhile beside those that it held before."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

    gc.collect()
    CLEAR.write_text("5")
    before = status("VmRSS")
    return work(), status("VmHWM") - before


def load_and_export(rank: int, path: str, folder: Path) -> tuple[int, int, int]:
    hf_export.EXPORT_FILE_BYTES = FILE_BYTES
    engine, loading = peak(lambda: built(path, compute_dtype="bf16"))
    _, exporting = peak(lambda: engine.export_hf_model(folder, "bf16"))
    _, copying = peak(lambda: copied(training_state(engine.model, None, None)))
    return loading, exporting, copying


@needs_a_peak
@pytest.mark.deep
def test_a_rank_needs_its_shards_and_one_tensor(tmp_path: Path) -> None:
    """In bf16 the export has half of the largest; gloo copies it twice on its way from the shards."""
    sizes = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False}
    path = add_tokenizer(random_model("Llama", tmp_path, **sizes))
    held = [weight.nbytes for weight in load_file(tmp_path / "model.safetensors").values()]
    total, largest = sum(held), max(held)
    assert total > 120 * MIB
    peaks = run_ranks(RANKS, load_and_export, path, tmp_path / "exported")
    for rank, (loading, exporting, copying) in enumerate(peaks):
        assert loading <= total / RANKS + largest + 80 * MIB, peaks
        assert copying <= total / RANKS + 16 * MIB, peaks
        assert exporting <= 3 * largest // 2 + 80 * MIB + FILE_BYTES * (rank == 0), peaks


# --- between the micro-batches of a mini-batch -----------------------------------------------------------------------
# 4 layers of (2 * 512 * (512 + 256) + 3 * 512 * 4096) numbers of a Qwen3; the vocabulary hardly counts.
SHAPE = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
         "intermediate_size": 4096, "vocab_size": 512, "tie_word_embeddings": True}  # fmt: skip
PARAMETERS = 4 * (2 * 512 * (512 + 256) + 3 * 512 * 4096 + 2 * 512 + 2 * 64) + 512 * 512 + 512


def update_peak(ranks: int = RANKS, response: int = 8, **changes: object) -> float:
    """Bytes at the peak of an optimizer step of two micro-batches of two responses."""
    settings = model_settings("fake", compute_dtype="bf16", enable_gradient_checkpointing=True, **changes)
    with fake_engine(SHAPE, settings, ranks, trains=True) as engine:
        found = peak_of_update(engine, sequences(2, 2, 8, response), limits=PassLimits("", 2))
    return found["Total"] * GIB


@pytest.mark.deep
def test_what_is_there_at_the_peak_of_an_update() -> None:
    """A parameter takes 16 bytes: 4 each for weights, gradients and two states; on four ranks a quarter on each."""
    reduced = update_peak()
    # gradients that wait for the last pass are whole; a quarter is the buffer of a layer's reduction, which is later
    assert update_peak(defer_grad_sync=True) - reduced > PARAMETERS * 4 * (1 - 1 / RANKS) * 0.7
    # two copies (hybrid sharding): twice the shards, and no more
    assert update_peak(fsdp_size=RANKS // 2) - reduced == pytest.approx(PARAMETERS * 16 / RANKS, rel=0.1)
    # alone, offloaded states are not there at the peak of the backward pass, whose gathered weights take 2 bytes
    away = update_peak(1, optimizer_offload=True)
    assert away == pytest.approx(PARAMETERS * 16, rel=0.05), "weights, gradients and states in the step"
    assert update_peak(1) - away > PARAMETERS * 1.8
    # of the inputs of 4 layers, 512 numbers of 2 bytes a token, 3 are away where a layer is computed again
    stays, away = (update_peak(response=4096, enable_activation_offload=offload) for offload in (False, True))
    assert stays - away == pytest.approx(3 * (8 + 2 * 4096) * 512 * 2, rel=0.05)


# --- no tensor grows with the square of a response's length, or with that of its longest neighbour -------------------
PROMPT = 50


def response_of(length: int) -> DataProto:
    floats = ("old_log_probs", "ref_log_probs", "advantages")
    return DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([np.arange(PROMPT) % 90 + 3], torch.int32),
            "responses": Ragged.from_rows([np.arange(length) % 90 + 3], torch.int32),
            "response_mask": Ragged.from_rows([np.ones(length)], torch.int8),
            **{name: Ragged.from_rows([np.full(length, -1.0)], torch.float32) for name in floats},
        }
    )


def largest(rank: int, path: str) -> dict[str, list[tuple[int, int]]]:
    """Of the log-probs, with the comparison of layouts before them, and of an optimizer step; by layout and length."""
    found: dict[str, list[tuple[int, int]]] = {"shared": [], "padded": []}
    for layout, sizes in found.items():
        for length in (700, 1400):
            engine, data = trainable_engine(path, layout=layout, gradient_checkpointing=True), response_of(length)
            log_probs = partial(engine.compute_log_probs, data, PassLimits("", 1))
            step = partial(engine.train_mini_batch, data, objective(), PassLimits("", 1))
            sizes.append((largest_tensor(log_probs), largest_tensor(step)))
            assert engine.forward.report.startswith(layout)
    return found


def test_the_largest_tensor_of_a_pass_grows_with_the_length_alone(tmp_path: Path) -> None:
    (found,) = run_ranks(1, largest, random_model("Qwen3", tmp_path, head_dim=8))
    for sizes in found.values():
        for short, long in zip(*sizes, strict=True):
            assert long <= 2.2 * short, "twice the tokens"
            assert long < 1400**2 / 2


def test_a_long_response_does_not_lengthen_its_neighbours() -> None:
    """Counts of a mini-batch: 4,000 tokens and 63 responses of one, of which the last has none that trains."""
    rows = [np.ones(4000), *[np.ones(1)] * 62, np.zeros(1)]
    data = DataProto.from_dict({"response_mask": Ragged.from_rows(rows, torch.int8)})
    trained = PolicyObjective(objective(), None, None)  # type: ignore[arg-type]
    assert trained.counts(data) == [4062.0, 63.0, 0.0, 0.0], "no term divides by prompts or observations"
    assert largest_tensor(lambda: trained.counts(data)) <= 4063


# --- what is said where a GPU is full --------------------------------------------------------------------------------
# torch's error is raised by hand.
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


@pytest.mark.parametrize(
    ("tokens", "ranks", "setting", "parts"),
    [
        (None, 1, None, ["ppo_micro_batch_size_per_gpu=1:", "data.max_response_length"]),
        (4000, 4, ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", 1000), ["full"]),  # split by four ranks
    ],
)
def test_a_pass_of_one_sequence_or_of_a_share(tokens: int | None, ranks: int, setting: Any, parts: list[str]) -> None:
    limits = PassLimits("actor_rollout_ref.actor.ppo_", 1, tokens)
    with refuses(OutOfMemory, *parts) as caught, smaller_passes(limits, ranks=ranks):
        raise OutOfMemory("full")
    assert setting is None or caught.value.setting == setting  # type: ignore[attr-defined]


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
        told[name] = message(getattr(engine, method), data, limits=PassLimits("", 4), **arguments)
    engine = trainable_engine(path)
    engine.forward.check = full  # type: ignore[method-assign]
    return told | {"check": message(engine.compute_log_probs, data, PassLimits("", 4))}


def message(work: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(OutOfMemory) as caught:
        work(*arguments, **options)
    return f"{caught.value.message} | {caught.value.remedy}"


def test_an_engine_names_the_pass_its_tokens_and_the_rest(tmp_path: Path) -> None:
    told = run_ranks(1, one_rank, random_model("Qwen3", tmp_path, head_dim=8))[0]
    says(told["pass"], "forward pass", "micro-batch 1 of 2", " tokens, 4 sequences", "CUDA")
    says(told["update"], "forward and backward pass", "micro-batch 1 of 2")
    assert told["update"].endswith(" | "), "whoever knows the keys adds what to do"
    says(told["step"], "optimizer step", "CUDA", "optimizer_offload=true")
    says(told["check"], "layouts", "rows of ")
