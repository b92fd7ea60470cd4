"""What custom estimators and losses return is checked where its author is known."""

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_dist.algorithms import kl_penalty
from grpo_dist.algorithms.advantage import ADVANTAGE, compute_advantage
from grpo_dist.algorithms.policy_loss import compute_policy_loss
from grpo_dist.algorithms.settings import TargetSettings
from grpo_dist.algorithms.targets import compute_targets
from grpo_dist.errors import ConfigError
from tests.messages import refuses
from tests.worker_settings import objective_settings

N, T = 2, 3
MASK = torch.tensor([[1.0, 1, 0], [1, 1, 1]])


def custom(folder: Path, body: str, parameters: str = "batch, config") -> str:
    """A function in a file, as the config names it."""
    lines = "\n".join(f"    {line}" for line in body.split("; "))
    file = folder / "mine.py"
    file.write_text(f"import torch\n\n\ndef f({parameters}):\n{lines}\n")
    return f"{file}:f"


LOSS = {
    "old_log_probs": torch.full((N, T), -1.0),
    "log_probs": torch.full((N, T), -1.0, requires_grad=True),
    "advantages": torch.ones(N, T),
    "response_mask": MASK,
}


def advantages(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = torch.tensor([[0.0, 1, 0], [0, 0, 2]])
    return compute_advantage(name, token_level_rewards=rewards, response_mask=MASK, index=["a", "a"])


def kl(name: str) -> torch.Tensor:
    return kl_penalty(name, torch.full((N, T), -2.0), torch.full((N, T), -1.0))


def policy_loss(name: str) -> Any:
    return compute_policy_loss(LOSS, objective_settings(loss_mode=name))


KEYS = {
    advantages: "algorithm.adv_estimator",
    policy_loss: "actor_rollout_ref.actor.policy_loss.loss_mode",
    kl: "actor_rollout_ref.actor.kl_loss_type",
}


@pytest.mark.parametrize(
    ("used", "returned", "parts"),
    [
        (advantages, "None", ["None", "advantages, returns"]),
        (advantages, "batch.response_mask", ["torch.float32", "shape (2, 3)", "advantages, returns"]),
        (advantages, "(batch.response_mask,) * 3", ["tuple", "length 3"]),
        (advantages, "batch.scores, batch.scores", ["advantages", "torch.float64, shape (2,)", "batch.on_tokens"]),
        (advantages, "batch.response_mask, None", ["returns = None"]),
        (advantages, "batch.response_mask, batch.response_mask.long()", ["returns", "torch.int64"]),
        (advantages, "batch.response_mask + torch.inf, batch.response_mask", ["advantages = inf at [0, 0]", "6 such"]),
        (advantages, "batch.response_mask, batch.response_mask * float('nan')", ["returns = nan at [0, 0]"]),
        (advantages, "batch.response_mask.tolist(), []", ["advantages = list", "length 2"]),
        (policy_loss, "batch.log_probs", ["torch.float32", "token losses, metrics"]),
        (policy_loss, "(batch.log_probs * batch.advantages).sum(), {}", ["token losses", "shape ()", "(2, 3)"]),
        (policy_loss, "None, {}", ["token losses = None"]),
        (policy_loss, "batch.log_probs / (batch.advantages - 1), {}", ["token losses = -inf at [0, 0]", "5 such"]),
        (policy_loss, "batch.log_probs.detach(), {}", ["gradient", "batch.log_probs"]),
        (policy_loss, "batch.log_probs, None", ["metrics = None"]),
        (policy_loss, "batch.log_probs, {'a': batch.advantages}", ["metrics['a']", "shape (2, 3)"]),
        (kl, "None", ["None"]),
        (kl, "(p - q).sum(-1)", ["shape (2,)", "(2, 3)"]),
        (kl, "(p - q).log()", ["nan at [0, 0]"]),
        (kl, "(p > q)", ["torch.bool"]),
    ],
)
def test_what_returns_something_else(tmp_path: Path, used: Any, returned: str, parts: list[str]) -> None:
    name = custom(tmp_path, f"return {returned}", "p, q" if used is kl else "batch, config")
    for form in (name, f"{name}+") if used is kl else (name,):
        with refuses(ConfigError, f"{KEYS[used]}={name}", *parts) as caught:
            used(form)
        assert caught.value.exit_code == 2  # type: ignore[attr-defined]


def test_what_was_right_stays_right(tmp_path: Path) -> None:
    name = custom(tmp_path, "return [batch.scores[:, None] * batch.response_mask, batch.response_mask]")
    assert advantages(name)[0].tolist() == [[1, 1, 0], [2, 2, 2]]
    # The engine tells of them, with the rows.
    name = custom(tmp_path, "return batch.log_probs, {}")
    broken = LOSS | {"log_probs": torch.full((N, T), torch.nan, requires_grad=True)}
    loss, _ = compute_policy_loss(broken, objective_settings(loss_mode=name))
    assert loss.isnan()


def test_an_error_in_an_estimator_shows_its_own_lines(tmp_path: Path) -> None:
    name = custom(tmp_path, "weights = [1.0]; return weights[len(batch.scores)]")
    with refuses(ConfigError, f"algorithm.adv_estimator={name}", "IndexError", "mine.py", "line 6") as caught:
        advantages(name)
    assert "registry.py" not in str(caught.value)
    name = custom(tmp_path, "raise SystemExit(3)")
    with refuses(ConfigError, "SystemExit", "3"):
        policy_loss(name)


def test_a_function_with_other_parameters_is_refused_before_it_is_called(tmp_path: Path) -> None:
    name = custom(tmp_path, "return None", "token_level_rewards, response_mask, index")
    with refuses(ConfigError, f"algorithm.adv_estimator={name}", "batch, config", "token_level_rewards"):
        ADVANTAGE.get(name)
    (tmp_path / "numbers.py").write_text("f = 3\n")
    with refuses(ConfigError, f"algorithm.adv_estimator={tmp_path}/numbers.py:f", "3 (int)"):
        ADVANTAGE.get(f"{tmp_path}/numbers.py:f")


def test_a_kl_estimator_of_the_reward_is_told_by_the_key_that_names_it(tmp_path: Path) -> None:
    name = custom(tmp_path, "return None", "p, q")
    columns = {"token_level_scores": MASK, "response_mask": MASK, "rollout_log_probs": MASK, "ref_log_probs": MASK}
    settings = TargetSettings("grpo", kl_penalty=name, old_log_probs_from="rollout")
    with refuses(ConfigError, f"algorithm.kl_penalty={name}", "None"):
        compute_targets(columns, settings, index=["a", "a"], truncated=torch.zeros(N))
