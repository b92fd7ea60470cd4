"""The optimizer, what moves when (the meta device plays a GPU), what training holds, and what a full GPU says."""

import gc
import os
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torchao.optim.subclass_8bit import OptimState8bit

from grpo_dist.config.schema_roles import OptimConfig
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train import hf_export
from grpo_dist.engines.train.checkpoint import copied, training_state
from grpo_dist.engines.train.memory_errors import remedied, smaller_passes, within_memory
from grpo_dist.engines.train.objectives import PolicyObjective
from grpo_dist.engines.train.optimizer import (
    PINNED_BYTES,
    Offload,
    build_optimizer,
    check_overrides,
    lr_ratio,
    pinned,
    saved_in_cpu_memory,
)
from grpo_dist.engines.train.sharded_tensors import local_shard, whole
from grpo_dist.errors import OutOfMemory
from grpo_dist.protocol import DataProto, Ragged
from tests.engines.train.plain import assert_same, built, log_probs, own_rows, step, told, weights
from tests.fake_memory import GIB, fake_engine, peak_of_update, sequences
from tests.messages import refuses, says
from tests.models import add_tokenizer, objective, random_batch, random_model, scheduled, trainable_engine
from tests.ranks import run_ranks
from tests.tensor_sizes import largest_tensor
from tests.tiers import first
from tests.worker_settings import model_settings

STEPS = 12  # of the whole run


def settings(**changes: Any) -> OptimConfig:
    values = {"lr": 0.5, "weight_decay": 0.0, "warmup": 4, "lr_scheduler_type": "constant", "min_lr_ratio": 0.0}
    return scheduled(**(values | changes))


RISE = {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0}
RATES = [
    ("constant", {}, STEPS, RISE | {10_000: 1.0}),
    # a quarter of 8 decay steps: cos 45 degrees; it stays at the end value
    ("cosine", {"min_lr_ratio": 0.1}, STEPS, RISE | {6: 0.1 + 0.45 * (1 + 2**-0.5), 8: 0.55, 12: 0.1, 99: 0.1}),
    ("linear", {"min_lr_ratio": 0.1}, STEPS, RISE | {6: 0.1 + 0.9 * 0.75, 8: 0.55, 12: 0.1, 99: 0.1}),
    ("cosine", {}, 4, RISE | {5: 0.0}),  # of warm-up only
    *((kind, {"warmup": 0}, STEPS, {0: 1.0}) for kind in ("constant", "cosine")),
]


@pytest.mark.parametrize(("kind", "changes", "total", "expected"), RATES)
def test_the_rate_at_each_step(kind: str, changes: dict, total: int, expected: dict[int, float]) -> None:
    """A linear warm-up of four steps that ends at the peak, and what follows."""
    own = settings(lr_scheduler_type=kind, **changes)
    assert {step: lr_ratio(step, own, total) for step in expected} == pytest.approx(expected)


def test_optimizer_and_schedule_move_by_the_rate_and_decay_is_decoupled() -> None:
    """AdamW's first steps with a constant gradient move a weight by the rate; of a zero one 2 * (1 - 0.125 * 0.1)."""
    moving, still = (nn.Parameter(torch.tensor([value])) for value in (1.0, 2.0))
    frozen = nn.Parameter(torch.tensor([1.0]), requires_grad=False)
    optimizer, schedule = build_optimizer([moving, frozen], settings(), STEPS)
    places = [moving.item()]
    for _ in range(3):
        moving.grad = torch.tensor([2.0])
        optimizer.step()
        schedule.step()
        places.append(moving.item())
    assert -np.diff(places) == pytest.approx([0.125, 0.25, 0.375], rel=1e-5)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    still.grad = torch.zeros(1)
    decaying, _schedule = build_optimizer([still], settings(weight_decay=0.1), STEPS)
    decaying.step()
    assert still.item() == pytest.approx(2 * (1 - 0.0125))


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit"])
def test_a_setting_by_name_reaches_the_step(name: str) -> None:
    """With eps equal to the gradient, the first step moves a weight by half of the rate."""
    weight = nn.Parameter(torch.tensor([1.0]))
    named = settings(warmup=0, optimizer=name, override_optimizer_config={"eps": 2.0})
    optimizer, _schedule = build_optimizer([weight], named, STEPS)
    weight.grad = torch.tensor([2.0])
    optimizer.step()
    assert weight.item() == pytest.approx(1 - 0.5 / 2, rel=1e-5)


REFUSED = [
    ("AdamW", torch.float32, {"epz": 1}, ("{epz:1}", "eps", "fused")),
    ("AdamW", torch.float32, {"eps": -1}, ("{eps:-1}", "-1")),
    ("AdamW", torch.float32, {"foreach": True}, ("{foreach:true}", "`fused`")),
    ("AdamW", torch.float32, {"amsgrad": True}, ("{amsgrad:true}", "maximize")),
    ("AdamW", torch.bfloat16, {"maximize": True}, ("{maximize:true}", "eps")),
    ("AdamW8bit", torch.float32, {"fused": False}, ("{fused:false}", "block_size")),
]


@pytest.mark.parametrize(("name", "dtype", "entries", "parts"), REFUSED)
def test_what_the_optimizer_does_not_take_is_refused(name: str, dtype: Any, entries: dict, parts: tuple) -> None:
    key, own = "optim.override_optimizer_config", settings(optimizer=name, override_optimizer_config=entries)
    says(told(check_overrides, own, dtype, key), "ConfigError", key, *parts)


META, CUDA, CPU = (torch.device(name) for name in ("meta", "cuda", "cpu"))
ALL = ["parameters", "optimizer_states"]


def stepped(model: nn.Module) -> torch.optim.AdamW:
    """An optimizer that has states."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def as_if_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in CPU memory plays the GPU's."""
    monkeypatch.setattr(nn.Module, "to", lambda model, device: model._apply(torch.clone))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def read_on_meta(rank: int, path: str) -> None:
    """A sharded engine, on the meta device, where values are lost, and after it."""
    engine, data = trainable_engine(path), own_rows(random_batch(num_groups=4, n=2), rank)
    model, offload = engine.model, Offload(engine.model, None, META, parameters=True)
    before = log_probs(engine, data)
    for _ in range(2):
        with offload.on_device(reads=True):
            assert {weight.device for weight in model.parameters()} == {META}
    assert {weight.device for weight in model.parameters()} == {CPU}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(nn.Module, "to", Mock(side_effect=ValueError("full")))
        with pytest.raises(ValueError, match="full"), offload.on_device(reads=True):
            pass
    assert all(weight.requires_grad for weight in model.parameters())
    np.testing.assert_array_equal(log_probs(engine, data), before)
    with pytest.MonkeyPatch.context() as monkeypatch, torch.no_grad():
        as_if_on_gpu(monkeypatch)
        with offload.on_device():
            next(model.parameters()).fill_(7)
    assert (local_shard(next(model.parameters())) == 7).all(), "a later change stays"


@pytest.mark.parametrize("ranks", first([1, 2], 2))
def test_weights_that_were_only_read_are_back_from_a_device_that_has_lost_them(ranks: int, tmp_path: Path) -> None:
    """And a device that has no room for them leaves nothing that a later phase might take for the weights."""
    run_ranks(ranks, read_on_meta, random_model("Qwen3", tmp_path / "model"))


def trained_away(rank: int, path: str, away: bool) -> dict[str, Any]:
    """Two updates and a pass between, which find the weights on a device that is a copy."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        torch.manual_seed(1)
        engine, data = trainable_engine(path, param_offload=away), own_rows(random_batch(num_groups=4, n=2), rank)
        as_if_on_gpu(monkeypatch)
        engine.offload.device = CUDA if away else CPU
        engine.offload.away()
        places, computed = [], []
        for update in (True, False, True, False):
            places.append([local_shard(weight).data_ptr() for weight in engine.model.parameters()])
            with engine.on_device(reads=not update):
                computed.append(step(engine, data, 2) if update else log_probs(engine, data, 2).tolist())
        return {"weights": weights(engine), "computed": computed, "stayed": [at == places[0] for at in places]}


@pytest.mark.parametrize("ranks", first([1, 2], 1))
def test_a_sharded_model_trains_alike_wherever_its_weights_wait(ranks: int, tmp_path: Path) -> None:
    path = random_model("Qwen3", tmp_path / "model")
    for stayed, away in zip(*(run_ranks(ranks, trained_away, path, value) for value in (False, True)), strict=True):
        assert_same(away["weights"], stayed["weights"])
        assert away["computed"] == stayed["computed"]
        assert away["stayed"] == [True] * 4


def test_weights_that_were_on_the_device_before_the_first_phase_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "to", lambda model, device: model)
    model = nn.Linear(2, 2, device=META)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, at: torch.zeros(x.shape, device=at))
    with Offload(model, None, META, parameters=True).on_device():
        pass
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}


PHASES = [
    (lambda of: of.on_device(), META, ALL, ["meta"], []),  # only the update needs the states
    (lambda of: of.on_device(weights=False), META, ALL, [], []),  # a block that streams
    (lambda of: of.on_device(optimizer=True), META, ["optimizer_states"], [], [META]),
    (lambda of: of.states_on_device(), META, ALL, [], [META]),
    (lambda of: of.on_device(optimizer=True), META, [], [], []),
    (lambda of: of.states_on_device(), META, ["parameters"], [], []),
    (lambda of: of.on_device(optimizer=True), CPU, ALL, [], []),
]


@pytest.mark.parametrize(("phase", "device", "offloaded", "sent", "moved"), PHASES)
def test_what_comes_for_a_phase_and_an_error_sends_away(
    phase: Any, device: torch.device, offloaded: list, sent: list, moved: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, went, moves = nn.Linear(2, 2), [], []
    monkeypatch.setattr(nn.Module, "to", lambda model, at: went.append(str(at)))
    monkeypatch.setattr("grpo_dist.engines.train.optimizer.move_states", lambda *args: moves.append(args[1]) or {})
    offload = Offload(model, stepped(model), device, **dict.fromkeys(offloaded, True))

    def work() -> None:
        assert (went, moves) == (sent, moved)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), phase(offload):
        work()
    assert went == sent
    assert not moved or moves == [META, CPU]


def test_what_streams_is_taken_to_the_device() -> None:
    assert whole(torch.ones(2), META, torch.bfloat16).device == META


def test_states_come_back_into_the_places_that_they_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order the optimizer has them by then."""
    model = nn.Linear(2, 2)
    optimizer = stepped(model)
    offload = Offload(model, optimizer, CUDA, optimizer_states=True)
    own = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, at: x.clone() if str(at) == "cuda" else own(x, at))
    homes = {parameter: state["exp_avg"].data_ptr() for parameter, state in optimizer.state.items()}
    means = {parameter: state["exp_avg"].clone() for parameter, state in optimizer.state.items()}
    for changed in (3.0, 4.0):
        with offload.states_on_device():
            for parameter in reversed(list(optimizer.state)):
                state = dict(reversed(optimizer.state.pop(parameter).items()))
                assert torch.equal(state["exp_avg"], means[parameter])
                assert state["exp_avg"].data_ptr() != homes[parameter]
                means[parameter] = state["exp_avg"].fill_(changed * parameter.numel()).clone()
                optimizer.state[parameter] = state
        for parameter, state in optimizer.state.items():
            assert state["exp_avg"].data_ptr() == homes[parameter]
            assert torch.equal(state["exp_avg"], means[parameter])


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A runtime of CUDA that is not here."""
    runtime = Mock(cudaHostRegister=Mock(return_value=0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_what_is_offloaded_is_pinned_in_place_until_it_is_gone(runtime: Mock) -> None:
    """What shares a page with others is left as it is."""
    large, small = torch.zeros(PINNED_BYTES // 4), torch.zeros(PINNED_BYTES // 4 - 1)
    start = large.data_ptr()
    assert pinned(large) is large
    assert pinned(small) is small
    runtime.cudaHostRegister.assert_called_once_with(start, PINNED_BYTES, 0)
    runtime.cudaHostUnregister.assert_not_called()
    del large
    runtime.cudaHostUnregister.assert_called_once_with(start)
    states = OptimState8bit.zeros((4, PINNED_BYTES // 4))
    assert pinned(states) is states
    runtime.cudaHostRegister.assert_called_with(states.codes.data_ptr(), PINNED_BYTES, 0)


def test_memory_that_cannot_be_pinned_is_used_as_it_is(runtime: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.cudaHostRegister.return_value, large = 2, torch.zeros(PINNED_BYTES)
    monkeypatch.setattr(torch, "zeros", Mock(side_effect=RuntimeError("the error that CUDA still has")))
    with pytest.warns(UserWarning, match="slower"):
        assert pinned(large) is large
    del large
    runtime.cudaHostUnregister.assert_not_called()


@pytest.mark.parametrize("shares", [False, True])
def test_on_a_shared_gpu_what_is_free_is_given_back(monkeypatch: pytest.MonkeyPatch, *, shares: bool) -> None:
    given_back = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    with Offload(nn.Linear(2, 2), None, CUDA, shares_device=shares).on_device():
        assert not given_back, "only at the end of a phase"
    assert given_back == [True] * shares


def test_on_cpu_what_autograd_saves_stays_and_on_gpus_it_is_copied() -> None:
    x = torch.ones(3, requires_grad=True)
    places = []
    for device in ("cpu", "cuda"):
        with saved_in_cpu_memory(device):
            y = x.exp()
        places.append(y.grad_fn._saved_result.data_ptr() == y.data_ptr())  # type: ignore[union-attr]
    assert places == [True, False], "without a GPU the copy is in memory that is not pinned"
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3).exp())


# --- the process of a rank -------------------------------------------------------------------------------------------
MIB = 1 << 20
RANKS = 4
FILE_BYTES = 32 * MIB
CLEAR = Path("/proc/self/clear_refs")
needs_a_peak = pytest.mark.skipif(not os.access(CLEAR, os.W_OK), reason="the kernel does not start a peak anew")


def peak(work: Callable[[], Any]) -> tuple[Any, int]:
    """What `work` returns, and the most bytes that the process held meanwhile beside those that it held before."""

    def status(name: str) -> int:
        (number,) = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(number) * 1024

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
    ones, floats = torch.ones(length), ("old_log_probs", "ref_log_probs", "advantages")
    ids = {"prompts": np.arange(PROMPT) % 90 + 3, "responses": np.arange(length) % 90 + 3}
    columns = {name: Ragged.from_rows([row], torch.int32) for name, row in ids.items()}
    columns["response_mask"] = Ragged.from_rows([ones], torch.int8)
    return DataProto.from_dict(columns | {name: Ragged.from_rows([-ones], torch.float32) for name in floats})


def largest(rank: int, path: str) -> dict[str, list[tuple[int, int]]]:
    """Of the log-probs, with the comparison of layouts before them, and of an optimizer step; by layout and length."""
    found: dict[str, list[tuple[int, int]]] = {"shared": [], "padded": []}
    for layout, sizes in found.items():
        for length in (700, 1400):
            engine, data = trainable_engine(path, layout=layout, gradient_checkpointing=True), response_of(length)
            sizes.append(tuple(largest_tensor(partial(work, engine, data, 1)) for work in (log_probs, step)))
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


SHARES = [
    (None, 1, None, ["ppo_micro_batch_size_per_gpu=1:", "data.max_response_length"]),
    (4000, 4, ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", 1000), ["full"]),  # split by four ranks
]


@pytest.mark.parametrize(("tokens", "ranks", "setting", "parts"), SHARES)
def test_a_pass_of_one_sequence_or_of_a_share(tokens: int | None, ranks: int, setting: Any, parts: list[str]) -> None:
    limits = PassLimits("actor_rollout_ref.actor.ppo_", 1, tokens)
    with refuses(OutOfMemory, *parts) as caught, smaller_passes(limits, ranks=ranks):
        raise OutOfMemory("full")
    assert setting is None or caught.value.setting == setting  # type: ignore[attr-defined]


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), remedied("x"), within_memory("y"):
        raise ZeroDivisionError


def one_rank(rank: int, path: str) -> None:
    """An engine names the pass, its tokens and the rest, whatever finds no room."""
    data = random_batch(num_groups=2, n=4)

    def told(part: str, work: Callable[..., Any]) -> str:
        engine = trainable_engine(path)
        if part != "check":
            log_probs(engine, data)  # the comparison of layouts is over
        if part == "_plain":
            engine.forward.head = None
        setattr(engine.optimizer if part == "step" else engine.forward, part, full)
        with pytest.raises(OutOfMemory) as caught:
            work(engine, data, 4)
        return f"{caught.value.message} | {caught.value.remedy}"

    says(told("_plain", log_probs), "forward pass", "micro-batch 1 of 2", " tokens, 4 sequences", "CUDA")
    update = told("_plain", step)
    says(update, "forward and backward pass", "micro-batch 1 of 2")
    assert update.endswith(" | "), "whoever knows the keys adds what to do"
    says(told("step", step), "optimizer step", "CUDA", "optimizer_offload=true")
    says(told("check", log_probs), "layouts", "rows of ")


def test_an_engine_names_the_pass_its_tokens_and_the_rest(tmp_path: Path) -> None:
    run_ranks(1, one_rank, random_model("Qwen3", tmp_path, head_dim=8))
