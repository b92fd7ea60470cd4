"""The optimizer and its schedule, and what moves when: the meta device stands in for a GPU, and nothing is there."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torchao.optim.subclass_8bit import OptimState8bit

from grpo_dist.config.schema_roles import OptimConfig
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.optimizer import (
    PINNED_BYTES,
    Offload,
    build_optimizer,
    check_overrides,
    keep_settings,
    lr_ratio,
    pinned,
    saved_in_cpu_memory,
)
from grpo_dist.engines.train.sharded_tensors import local_shard, whole
from grpo_dist.errors import ConfigError
from tests.messages import refuses
from tests.models import objective, random_batch, random_model, scheduled, trainable_engine
from tests.ranks import run_ranks

STEPS = 12  # of the whole run


def settings(**changes: Any) -> OptimConfig:
    values = {"lr": 0.5, "weight_decay": 0.0, "warmup": 4, "lr_scheduler_type": "constant", "min_lr_ratio": 0.0}
    return scheduled(**(values | changes))


RISE = {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0}


@pytest.mark.parametrize(
    ("kind", "changes", "total", "expected"),
    [
        ("constant", {}, STEPS, RISE | {10_000: 1.0}),
        # a quarter of 8 decay steps: cos 45 degrees; it stays at the end value
        ("cosine", {"min_lr_ratio": 0.1}, STEPS, RISE | {6: 0.1 + 0.45 * (1 + 2**-0.5), 8: 0.55, 12: 0.1, 99: 0.1}),
        ("linear", {"min_lr_ratio": 0.1}, STEPS, RISE | {6: 0.1 + 0.9 * 0.75, 8: 0.55, 12: 0.1, 99: 0.1}),
        ("cosine", {}, 4, RISE | {5: 0.0}),  # of warm-up only
        ("constant", {"warmup": 0}, STEPS, {0: 1.0}),
        ("cosine", {"warmup": 0}, STEPS, {0: 1.0}),
    ],
)
def test_the_rate_at_each_step(kind: str, changes: dict, total: int, expected: dict[int, float]) -> None:
    """A linear warm-up of four steps that ends at the peak, and what follows."""
    own = settings(lr_scheduler_type=kind, **changes)
    assert {step: lr_ratio(step, own, total) for step in expected} == pytest.approx(expected)


def test_optimizer_and_schedule_move_by_the_rate_and_decay_is_decoupled() -> None:
    """AdamW's first steps with a constant gradient move a weight by the rate; of a zero one 2 * (1 - 0.125 * 0.1)."""
    weights = [nn.Parameter(torch.tensor([value])) for value in (1.0, 2.0)]
    frozen = nn.Parameter(torch.tensor([1.0]), requires_grad=False)
    optimizer, schedule = build_optimizer([weights[0], frozen], settings(), STEPS)
    moved = []
    for _ in range(3):
        before = weights[0].item()
        weights[0].grad = torch.tensor([2.0])
        optimizer.step()
        schedule.step()
        moved.append(before - weights[0].item())
    assert moved == pytest.approx([0.125, 0.25, 0.375], rel=1e-5)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    weights[1].grad = torch.zeros(1)
    decaying, _schedule = build_optimizer(weights[1:], settings(weight_decay=0.1), STEPS)
    decaying.step()
    assert weights[1].item() == pytest.approx(2 * (1 - 0.0125))


def test_settings_survive_a_saved_state_and_the_place_in_the_schedule_is_the_saved_one() -> None:
    """After 6 of 12 steps, 4 of them warm-up, a quarter of the decay is behind: 0.75, then 0.625 of the peak."""
    own = {"lr": 0.1, "weight_decay": 0.3, "betas": (0.5, 0.6), "override_optimizer_config": {"eps": 1e-3}}
    weights = [nn.Parameter(torch.tensor([2.0])) for _ in range(2)]
    old, old_schedule = build_optimizer(weights[:1], settings(lr_scheduler_type="linear"), STEPS)
    for _ in range(6):
        old.step()
        old_schedule.step()
    optimizer, schedule = build_optimizer(weights[1:], settings(lr_scheduler_type="linear", **own), STEPS)
    with keep_settings(optimizer, schedule):
        optimizer.load_state_dict(old.state_dict())
        schedule.load_state_dict(old_schedule.state_dict())
    [group] = optimizer.param_groups
    assert (schedule.get_last_lr(), group["lr"]) == ([group["lr"]], pytest.approx(0.075))
    optimizer.step()
    schedule.step()
    assert group["lr"] == pytest.approx(0.0625)
    assert [group[name] for name in ("weight_decay", "betas", "initial_lr", "eps")] == [0.3, (0.5, 0.6), 0.1, 1e-3]


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit"])
def test_a_setting_by_name_reaches_the_step(name: str) -> None:
    """With eps equal to the gradient, the first step moves a weight by half of the rate."""
    weight = nn.Parameter(torch.tensor([1.0]))
    named = settings(warmup=0, optimizer=name, override_optimizer_config={"eps": 2.0})
    optimizer, _schedule = build_optimizer([weight], named, STEPS)
    weight.grad = torch.tensor([2.0])
    optimizer.step()
    assert weight.item() == pytest.approx(1 - 0.5 / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype", "entries", "parts"),
    [
        ("AdamW", torch.float32, {"epz": 1}, ("{epz:1}", "eps", "fused")),
        ("AdamW", torch.float32, {"eps": -1}, ("{eps:-1}", "-1")),
        ("AdamW", torch.float32, {"foreach": True}, ("{foreach:true}", "`fused`")),
        ("AdamW", torch.float32, {"amsgrad": True}, ("{amsgrad:true}", "maximize")),
        ("AdamW", torch.bfloat16, {"maximize": True}, ("{maximize:true}", "eps")),
        ("AdamW8bit", torch.float32, {"fused": False}, ("{fused:false}", "block_size")),
    ],
)
def test_what_the_optimizer_does_not_take_is_refused(name: str, dtype: Any, entries: dict, parts: tuple) -> None:
    with refuses(ConfigError, "optim.override_optimizer_config", *parts):
        check_overrides(
            settings(optimizer=name, override_optimizer_config=entries), dtype, "optim.override_optimizer_config"
        )


META, ALL = torch.device("meta"), ["parameters", "optimizer_states"]


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


def places_in_memory(model: nn.Module) -> list[int]:
    return [local_shard(weight).data_ptr() for weight in model.parameters()]


def read_on_meta(rank: int, path: str) -> dict[str, Any]:
    """What a sharded engine has on the meta device, where values are lost, and after it."""
    engine = trainable_engine(path)
    offload, model = Offload(engine.model, None, META, parameters=True), engine.model
    data = random_batch(num_groups=4, n=2).index(list(range(8))[rank :: torch.distributed.get_world_size()])
    before = engine.compute_log_probs(data, PassLimits("", 2)).values.numpy().copy()
    places = []
    for _ in range(2):
        with offload.on_device(reads=True):
            places.append({str(weight.device) for weight in model.parameters()})
    places.append({str(weight.device) for weight in model.parameters()})
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(nn.Module, "to", Mock(side_effect=ValueError("full")))
        with pytest.raises(ValueError, match="full"), offload.on_device(reads=True):
            pass
    found = {"places": places, "trains": all(weight.requires_grad for weight in model.parameters())}
    found["alike"] = np.array_equal(engine.compute_log_probs(data, PassLimits("", 2)).values.numpy(), before)
    with pytest.MonkeyPatch.context() as monkeypatch, torch.no_grad():
        as_if_on_gpu(monkeypatch)
        with offload.on_device():
            next(model.parameters()).fill_(7)
    return found | {"a later change stays": bool((local_shard(next(model.parameters())) == 7).all())}


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_were_only_read_are_back_from_a_device_that_has_lost_them(ranks: int, tmp_path: Path) -> None:
    """And a device that has no room for them leaves nothing that a later phase might take for the weights."""
    for found in run_ranks(ranks, read_on_meta, random_model("Qwen3", tmp_path / "model")):
        assert found.pop("places") == [{"meta"}, {"meta"}, {"cpu"}]
        assert found == {"trains": True, "alike": True, "a later change stays": True}


def trained_away(rank: int, path: str, away: bool) -> dict[str, Any]:
    """An engine's weights after two updates and a pass between, which find them on a device that is a copy."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        torch.manual_seed(1)
        engine = trainable_engine(path, param_offload=away)
        data = random_batch(num_groups=4, n=2).index(list(range(8))[rank :: torch.distributed.get_world_size()])
        as_if_on_gpu(monkeypatch)
        engine.offload.device = torch.device("cuda" if away else "cpu")
        engine.offload.away()
        stayed = []
        for update in (True, False, True):
            before = places_in_memory(engine.model)
            with engine.on_device(reads=not update):
                if update:
                    engine.train_mini_batch(data, objective(), PassLimits("", 2))
                else:
                    computed = engine.compute_log_probs(data, PassLimits("", 2)).values.numpy().copy()
            stayed.append(places_in_memory(engine.model) == before)
        weights = {name: tensor.numpy().copy() for name, tensor in engine.full_parameters("float32")}
    return {"weights": weights, "log-probs": computed, "stayed": stayed}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.deep)])
def test_a_sharded_model_trains_alike_wherever_its_weights_wait(ranks: int, tmp_path: Path) -> None:
    path = random_model("Qwen3", tmp_path / "model")
    for stayed, away in zip(*(run_ranks(ranks, trained_away, path, value) for value in (False, True)), strict=True):
        assert all(np.array_equal(away["weights"][name], weight) for name, weight in stayed["weights"].items())
        assert np.array_equal(away["log-probs"], stayed["log-probs"])
        assert away["stayed"] == [True, True, True]


def test_weights_that_were_on_the_device_before_the_first_phase_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "to", lambda model, device: model)
    model = nn.Linear(2, 2, device=META)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, at: torch.zeros(x.shape, device=at))
    with Offload(model, None, META, parameters=True).on_device():
        pass
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    ("phase", "device", "offloaded", "sent", "moved"),
    [
        (lambda of: of.on_device(), META, ALL, ["meta"], []),  # only the update needs the states
        (lambda of: of.on_device(weights=False), META, ALL, [], []),  # a block that streams
        (lambda of: of.on_device(optimizer=True), META, ["optimizer_states"], [], [META]),
        (lambda of: of.states_on_device(), META, ALL, [], [META]),
        (lambda of: of.on_device(optimizer=True), META, [], [], []),
        (lambda of: of.states_on_device(), META, ["parameters"], [], []),
        (lambda of: of.on_device(optimizer=True), torch.device("cpu"), ALL, [], []),
    ],
)
def test_what_comes_for_a_phase_and_an_error_sends_away(
    phase: Any, device: torch.device, offloaded: list, sent: list, moved: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, went, moves = nn.Linear(2, 2), [], []
    monkeypatch.setattr(nn.Module, "to", lambda model, at: went.append(str(at)))
    monkeypatch.setattr("grpo_dist.engines.train.optimizer.move_states", lambda *args: moves.append(args[1]) or {})
    offload = Offload(model, stepped(model), device, **dict.fromkeys(offloaded, True))

    def work() -> None:
        assert (went, moves) == (sent, moved)
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"), phase(offload):
        work()
    assert went == sent
    assert not moved or moves == [META, torch.device("cpu")]


def test_what_streams_is_taken_to_the_device() -> None:
    assert whole(torch.ones(2), META, torch.bfloat16).device == META


def test_states_come_back_into_the_places_that_they_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order the optimizer has them by then."""
    model = nn.Linear(2, 2)
    optimizer = stepped(model)
    offload = Offload(model, optimizer, torch.device("cuda"), optimizer_states=True)
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


def test_what_is_offloaded_is_pinned_in_place_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a runtime of CUDA that is not here; what shares a page with others is left as it is."""
    runtime = Mock(cudaHostRegister=Mock(return_value=0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    large, small = torch.zeros(PINNED_BYTES // 4), torch.zeros(PINNED_BYTES // 4 - 1)
    start = large.data_ptr()
    assert pinned(large) is large
    assert pinned(small) is small
    runtime.cudaHostRegister.assert_called_once_with(start, PINNED_BYTES, 0)
    runtime.cudaHostUnregister.assert_not_called()
    del large
    runtime.cudaHostUnregister.assert_called_once_with(start)
    runtime.cudaHostRegister.reset_mock()
    states = OptimState8bit.zeros((4, PINNED_BYTES // 4))
    assert pinned(states) is states
    runtime.cudaHostRegister.assert_called_once_with(states.codes.data_ptr(), PINNED_BYTES, 0)


def test_memory_that_cannot_be_pinned_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, large = Mock(cudaHostRegister=Mock(return_value=2)), torch.zeros(PINNED_BYTES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", Mock(side_effect=RuntimeError("the error that CUDA still has")))
    with pytest.warns(UserWarning, match="slower"):
        assert pinned(large) is large
    del large
    runtime.cudaHostUnregister.assert_not_called()


@pytest.mark.parametrize("shares", [False, True])
def test_on_a_shared_gpu_what_is_free_is_given_back(monkeypatch: pytest.MonkeyPatch, *, shares: bool) -> None:
    """Also where nothing is offloaded."""
    given_back = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    with Offload(nn.Linear(2, 2), None, torch.device("cuda"), shares_device=shares).on_device():
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
