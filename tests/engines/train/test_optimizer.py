import pytest
import torch

from grpo_dist.engines.settings import OptimizerSettings
from grpo_dist.engines.train.optimizer import build_optimizer, keep_settings, lr_ratio


def settings(**changes: object) -> OptimizerSettings:
    values = {
        "lr": 0.5,
        "weight_decay": 0.0,
        "betas": (0.9, 0.999),
        "lr_scheduler_type": "constant",
        "num_warmup_steps": 4,
        "num_training_steps": 12,
        "min_lr_ratio": 0.0,
    }
    return OptimizerSettings(**(values | changes))  # type: ignore[arg-type]


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    assert [lr_ratio(step, settings()) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = settings(lr_scheduler_type="cosine")
    assert [lr_ratio(step, cosine) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert lr_ratio(0, settings(num_warmup_steps=0)) == 1.0
    assert lr_ratio(0, settings(num_warmup_steps=0, lr_scheduler_type="cosine")) == 1.0


def test_constant_stays() -> None:
    assert lr_ratio(10_000, settings()) == 1.0


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (4, 1.0),
        (6, 0.1 + 0.9 * 0.5 * (1 + 2**-0.5)),  # a quarter of 8 decay steps: cos 45 degrees
        (8, 0.1 + 0.9 * 0.5),
        (12, 0.1),
        (99, 0.1),  # stays at the end value, never rises again
    ],
)
def test_cosine_from_the_peak_to_the_minimum(step: int, expected: float) -> None:
    assert lr_ratio(step, settings(lr_scheduler_type="cosine", min_lr_ratio=0.1)) == pytest.approx(expected)


@pytest.mark.parametrize(("step", "expected"), [(4, 1.0), (6, 0.1 + 0.9 * 0.75), (8, 0.55), (12, 0.1), (99, 0.1)])
def test_linear_from_the_peak_to_the_minimum(step: int, expected: float) -> None:
    assert lr_ratio(step, settings(lr_scheduler_type="linear", min_lr_ratio=0.1)) == pytest.approx(expected)


def test_a_run_of_warm_up_only() -> None:
    short = settings(lr_scheduler_type="cosine", num_training_steps=4)
    assert [lr_ratio(step, short) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 0.0]


def test_optimizer_and_schedule_move_by_the_rate() -> None:
    """AdamW's first steps with a constant gradient move a weight by the learning rate."""
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    frozen = torch.nn.Parameter(torch.tensor([1.0]), requires_grad=False)
    optimizer, schedule = build_optimizer([weight, frozen], settings())
    moved = []
    for _ in range(3):
        before = weight.item()
        weight.grad = torch.tensor([2.0])
        optimizer.step()
        schedule.step()
        moved.append(before - weight.item())
    assert moved == pytest.approx([0.125, 0.25, 0.375], rel=1e-5)
    assert frozen.item() == 1.0
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]


def test_weight_decay_is_decoupled() -> None:
    """A zero gradient leaves only w <- w (1 - lr * decay): 2 * (1 - 0.125 * 0.1)."""
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer, _ = build_optimizer([weight], settings(weight_decay=0.1))
    weight.grad = torch.zeros(1)
    optimizer.step()
    assert weight.item() == pytest.approx(2 * (1 - 0.0125))


def loaded_into(built: OptimizerSettings) -> tuple[dict, float, float]:
    """(group, rate now, rate a step later) of an optimizer that takes over 6 steps of one with other settings."""
    old, old_schedule = build_optimizer([torch.nn.Parameter(torch.tensor([2.0]))], settings(lr_scheduler_type="linear"))
    for _ in range(6):
        old.step()
        old_schedule.step()
    optimizer, schedule = build_optimizer([torch.nn.Parameter(torch.tensor([2.0]))], built)
    with keep_settings(optimizer, schedule):
        optimizer.load_state_dict(old.state_dict())
        schedule.load_state_dict(old_schedule.state_dict())
    [group] = optimizer.param_groups
    now = group["lr"]
    assert schedule.get_last_lr() == [now]
    optimizer.step()
    schedule.step()
    return group, now, group["lr"]


def test_settings_survive_a_saved_state_and_the_place_in_the_schedule_is_the_saved_one() -> None:
    """After 6 of 12 steps, 4 of them warm-up, a quarter of the decay is behind: 0.75, then 0.625 of the peak."""
    group, now, later = loaded_into(settings(lr=0.1, weight_decay=0.3, betas=(0.5, 0.6), lr_scheduler_type="linear"))
    assert (now, later) == (pytest.approx(0.075), pytest.approx(0.0625))
    assert (group["weight_decay"], group["betas"], group["initial_lr"]) == (0.3, (0.5, 0.6), 0.1)


def test_the_same_settings_go_on_as_if_nothing_had_happened() -> None:
    _, now, later = loaded_into(settings(lr_scheduler_type="linear"))
    assert (now, later) == (0.5 * 0.75, 0.5 * 0.625)
