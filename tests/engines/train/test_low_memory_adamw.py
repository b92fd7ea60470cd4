"""AdamW with 8-bit states, and with bf16 weights: single steps by hand, rounding, and engines that stop and go on."""

import contextlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grpo_dist.engines.train.checkpoint import ShardWriter, training_state
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.optimizer import build_optimizer
from grpo_dist.engines.train.sharded_tensors import in_numbers, local_shard
from grpo_dist.errors import ConfigError
from tests.engines.train.plain import flat, save
from tests.engines.train.test_checkpoint import engine_with_schedule, train
from tests.messages import refuses
from tests.models import random_model, scheduled
from tests.ranks import run_ranks
from tests.shards import all_tensors, tensor_bytes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SIZE = 64  # of a square weight: 4,096 numbers, the fewest that become codes
# As often as they are negative, the largest number of a block is coded by -1; the widest gaps of codes, halved.
SIGNED_ERROR, UNSIGNED_ERROR = (1 - 0.978906) / 2, (0.9964844 - 0.9894531) / 2


def weight(dtype: torch.dtype = torch.float32, value: float | None = None) -> nn.Parameter:
    torch.manual_seed(3)
    filled = torch.randn(SIZE, SIZE) if value is None else torch.full((SIZE, SIZE), value)
    return nn.Parameter(filled.to(dtype))


def built(parameter: nn.Parameter, name: str = "AdamW8bit", **changes: Any) -> Optimizer:
    settings = {"warmup": 0, "lr_scheduler_type": "constant", "weight_decay": 0.0, "optimizer": name}
    return build_optimizer([parameter], scheduled(**(settings | changes)), 100)[0]


def take(optimizer: Optimizer, parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient.to(parameter.dtype)
    optimizer.step()


# --- single steps --------------------------------------------------------------------------------------------------
def test_steps_are_adamws_within_the_error_of_the_codes() -> None:
    """The first step is exact, since it sees no code yet; codes are off by half of the widest gap at most."""
    rate, decay, (beta, beta_sq) = 0.01, 0.1, (0.9, 0.999)
    parameter, gradients = weight(), torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(5)).double()
    optimizer = built(parameter, lr=rate, weight_decay=decay)
    by_hand, mean, square = parameter.detach().double(), *torch.zeros(2, SIZE, SIZE).double()
    for count, gradient in enumerate(gradients, start=1):
        take(optimizer, parameter, gradient.float())
        mean, square = beta * mean + (1 - beta) * gradient, beta_sq * square + (1 - beta_sq) * gradient**2
        update = (mean / (1 - beta**count)) / ((square / (1 - beta_sq**count)).sqrt() + 1e-8)
        by_hand = by_hand * (1 - rate * decay) - rate * update
        off = (parameter.detach() - by_hand).abs()
        assert off.max() < (1e-6 if count == 1 else 5 * rate), count
        assert off.mean() < (1e-6 if count == 1 else 0.05 * rate), count
        for name, exact, error in (("exp_avg", mean, SIGNED_ERROR), ("exp_avg_sq", square, UNSIGNED_ERROR)):
            coded = in_numbers(optimizer.state[parameter][name])
            largest = exact.view(-1, 256).abs().amax(1, keepdim=True)
            # an earlier step's error decays with its number
            assert ((coded - exact).view(-1, 256).abs() / largest).max() < count * error * 1.2
    assert type(optimizer.param_groups[0]["lr"]) is float


# --- single steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("AdamW8bit", torch.float32), ("AdamW", torch.bfloat16)])
def test_without_torchao_it_is_told_what_to_install(name: str, dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "grpo_dist.engines.train.low_memory_adamw", None)
    with refuses(ConfigError, f"optim.optimizer={name}", str(dtype), "pip install 'torchao>=0.18,<0.19'"):
        built(weight(dtype), name)
    built(weight(), "AdamW")


@pytest.mark.deep
@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit"])
def test_the_second_moment_beside_bf16_weights_decays(name: str) -> None:
    """A bf16 number has 8 bits, and times 0.999 it is rounded to itself: states in bf16 would stay for good."""
    parameter = weight(torch.bfloat16)
    optimizer = built(parameter, name)
    for count in range(101):
        take(optimizer, parameter, torch.full((SIZE, SIZE), float(count == 0)))
    square = in_numbers(optimizer.state[parameter]["exp_avg_sq"])
    torch.testing.assert_close(square, torch.full((SIZE, SIZE), 1e-3 * 0.999**100), rtol=1e-4, atol=0)


# --- rounding ------------------------------------------------------------------------------------------------------
@pytest.mark.deep
@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit"])
def test_updates_that_are_too_small_for_bf16_count_on_average(name: str) -> None:
    """50 updates by 1e-4 of weights of 1, of which the next smaller is 1 - 2**-8: rounded as usual none would move.

    The mean of 4,096 has a standard deviation of 2**-8 * sqrt(50 * 0.0256 / 4096) = 7e-5.
    """
    moved = []
    for kind, dtype in ((name, torch.float32), (name, torch.bfloat16), ("", torch.bfloat16)):
        parameter = weight(dtype, 1.0)
        optimizer = built(parameter, kind, lr=1e-4) if kind else torch.optim.AdamW([parameter], 1e-4, weight_decay=0.0)
        for _ in range(50):
            take(optimizer, parameter, torch.ones(SIZE, SIZE))
        moved.append(1 - parameter.detach().float().mean().item())
    assert moved == [pytest.approx(5e-3, rel=1e-3), pytest.approx(5e-3, abs=3e-4), 0.0]


def test_rounding_is_of_the_step_and_of_nothing_else() -> None:
    """Two optimizers round alike, whatever else is drawn; the next step rounds otherwise; and what is drawn stays."""
    first, second = weight(torch.bfloat16, 1.0), weight(torch.bfloat16, 1.0)
    optimizers = built(first, "AdamW", lr=1e-3), built(second, "AdamW", lr=1e-3)
    fell = []
    for _ in range(2):
        before = first.detach().clone()
        torch.manual_seed(7)
        take(optimizers[0], first, torch.ones(SIZE, SIZE))
        drawn = torch.rand(3)
        torch.manual_seed(8)
        torch.rand(5)
        take(optimizers[1], second, torch.ones(SIZE, SIZE))
        torch.manual_seed(7)
        assert torch.equal(torch.rand(3), drawn)
        assert torch.equal(first, second)
        fell.append(first.detach() < before)
    assert 0.2 < (fell[0] & fell[1]).sum() / fell[0].sum() < 0.32, "a quarter of those that fell, and not all"


@pytest.mark.long
def test_compiled_kernels_round_by_the_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: contextlib.nullcontext())
    after = []
    for seed in (1, 2):
        parameter = weight(torch.bfloat16, 1.0)
        optimizer = built(parameter, lr=1e-3)
        torch.manual_seed(seed)
        for _ in range(3):
            take(optimizer, parameter, torch.ones(SIZE, SIZE))
        after.append(parameter.detach())
    assert torch.equal(*after)
    assert 1 - after[0].float().mean().item() == pytest.approx(3e-3, abs=3e-4)


# --- states that go out and come back --------------------------------------------------------------------------------
@pytest.mark.deep
@pytest.mark.parametrize(("dtype", "part"), [(torch.float32, 1 << 22), (torch.bfloat16, 10_240)])
def test_numbers_become_the_codes_that_they_were(dtype: torch.dtype, part: int, monkeypatch: Any) -> None:
    """2,400 blocks of all sizes, with zeros, and of one number. torchao's own codes lose it where -1 is the largest."""
    monkeypatch.setattr("grpo_dist.engines.train.low_memory_adamw.PART", part)
    generator, shape = torch.Generator().manual_seed(1), (3, 800, 256)
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer, other = built(parameter), built(parameter)
    take(optimizer, parameter, torch.zeros(shape))
    numbers = torch.randn(2400, 256, generator=generator) * torch.randn(2400, 256, generator=generator).mul(3).exp()
    numbers *= torch.logspace(-20, 8, 2400)[:, None]
    numbers[::7], numbers[3::7, 1:], numbers[5::7, ::2] = 0.0, 0.0, 0.0
    state = optimizer.state[parameter]
    for name, given in (("exp_avg", numbers), ("exp_avg_sq", numbers.square())):
        state[name].copy_(given.view(shape))
    saved = optimizer.state_dict()
    saved["state"] = {0: {name: in_numbers(value) for name, value in saved["state"][0].items()}}
    other.load_state_dict(saved)
    for name in ("exp_avg", "exp_avg_sq"):
        was, now = state[name], other.state[parameter][name]
        assert saved["state"][0][name].dtype == now.dtype == torch.float32
        assert torch.equal(was.codes, now.codes)
        assert torch.equal(was.scale, now.scale)


# --- engines -------------------------------------------------------------------------------------------------------
KINDS = {"8-bit": ("AdamW8bit", "fp32"), "8-bit, bf16": ("AdamW8bit", "bf16"), "bf16": ("AdamW", "bf16")}


def engine(path: str, optimizer: str, dtype: str, **sharding: Any) -> FSDPEngine:
    return engine_with_schedule(path, {"optimizer": optimizer}, model_dtype=dtype, **sharding)


def states(made: FSDPEngine) -> list[Tensor]:
    shards = [local_shard(value) for state in made.optimizer.state.values() for value in state.values()]
    return [part for shard in shards for part in ((shard.codes, shard.scale) if hasattr(shard, "codes") else (shard,))]


def assert_alike(first: FSDPEngine, second: FSDPEngine) -> None:
    np.testing.assert_array_equal(flat(second), flat(first))
    for one, other in zip(states(first), states(second), strict=True):
        assert torch.equal(one, other)


def stopped(rank: int, ranks: int, path: str, folder: Path) -> dict[str, Any]:
    """Of each kind of optimizer: a save before the first step, and one after two, from which another engine goes on."""
    found: dict[str, Any] = {}
    for name, kind in KINDS.items():
        made, again = engine(path, *kind), engine(path, *kind)
        before = flat(made)
        save(made, folder / f"{name} {ranks} new")
        np.testing.assert_array_equal(flat(made), before)
        for number in range(2):
            train(made, rank, number)
        size = made.checkpoint_bytes()
        save(made, folder / f"{name} {ranks}")
        again.load_checkpoint(folder / f"{name} {ranks}")
        assert_alike(made, again)
        assert train(made, rank, 2) == train(again, rank, 2)
        assert_alike(made, again)
        coded = any(hasattr(local_shard(state["exp_avg"]), "codes") for state in made.optimizer.state.values())
        assert coded == name.startswith("8-bit")
        copy = engine(path, *kind, fsdp_size=1)  # which each rank holds whole (HSDP)
        for number in range(3):
            train(copy, rank, number)
        held = [local_shard(parameter).detach() for parameter in copy.model.parameters()] + states(copy)
        found[name] = size, [shard.float().numpy().copy() for shard in held]
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    folder = tmp_path_factory.mktemp("low memory")
    path = random_model("Qwen3", folder / "model", hidden_size=64, intermediate_size=128)
    found = {ranks: run_ranks(ranks, stopped, ranks, path, folder) for ranks in (1, 2)}
    return {"folder": folder, "path": path} | found


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_a_run_goes_on_bit_for_bit(saved: dict[Any, Any], name: str, ranks: int) -> None:
    """Weights, codes, scales and the rounding of the next step; files hold float32 states, as many as was said.

    Copies of the weights stay alike after steps on different rows.
    """
    folder = saved["folder"] / f"{name} {ranks}"
    for size, copy in (result[name] for result in saved[ranks]):
        assert all(map(np.array_equal, copy, saved[ranks][0][name][1]))
        assert size == sum(size for key, size in tensor_bytes(folder).items() if not key.endswith(".step"))
    assert {value.dtype for key, value in all_tensors(folder).items() if "exp_avg" in key} == {torch.float32}


def switched(rank: int, path: str, folder: Path) -> None:
    """From each checkpoint of two ranks a step with each optimizer; what AdamW8bit then saves, AdamW reads."""
    for name, (_, dtype) in KINDS.items():
        plain, coded = engines = [engine(path, optimizer, dtype) for optimizer in ("AdamW", "AdamW8bit")]
        norms, moves = [], []
        for made in engines:
            made.load_checkpoint(folder / f"{name} 2")
            start = flat(made)
            norms.append(train(made, rank, 2)["actor/grad_norm"])
            moves.append(flat(made) - start)
        assert norms[0] == norms[1], "the weights are the saved ones"
        assert 1e-4 < np.abs(moves[0]).mean() < 1e-2
        assert np.abs(moves[0] - moves[1]).mean() < 0.1 * np.abs(moves[0]).mean(), name
        save(coded, folder / f"{name} back")
        plain.load_checkpoint(folder / f"{name} back")
        np.testing.assert_array_equal(flat(plain), flat(coded))
        train(plain, rank, 3)


@pytest.mark.deep
def test_two_ranks_checkpoint_goes_on_on_one_with_either_optimizer(saved: dict[Any, Any]) -> None:
    run_ranks(1, switched, saved["path"], saved["folder"])


def of_earlier_versions(rank: int, path: str, folder: Path) -> None:
    """A checkpoint whose states have the type of the weights, with a tied output layer; and what is read from it."""
    made, again = engine(path, "AdamW", "bf16"), engine(path, "AdamW", "bf16")
    train(made, rank, 0)
    state = training_state(made.model, made.optimizer, made.schedule)
    state["model"]["lm_head.weight"] = state["model"]["model.embed_tokens.weight"]
    for moments in state["optimizer"]["state"].values():
        moments |= {name: moments[name].bfloat16() for name in ("exp_avg", "exp_avg_sq")}
    (writer := ShardWriter()).begin_save(state, folder)
    writer.finished(wait=True)
    again.load_checkpoint(folder)
    np.testing.assert_array_equal(flat(again), flat(made))
    for was, now in zip(states(made), states(again), strict=True):
        assert torch.equal(was.bfloat16().float(), now)


@pytest.mark.deep
def test_checkpoints_of_earlier_versions_are_read(saved: dict[Any, Any], tmp_path: Path) -> None:
    run_ranks(2, of_earlier_versions, saved["path"], tmp_path / "earlier")
    assert "model.lm_head.weight" in tensor_bytes(tmp_path / "earlier")
