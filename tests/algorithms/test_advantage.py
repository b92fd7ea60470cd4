"""Advantage estimators on numbers worked out on paper; tests/fuzz has verl's, and their formulas on random batches."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_dist.algorithms import compute_advantage
from grpo_dist.algorithms.advantage import ADVANTAGE, STD_EPS
from grpo_dist.algorithms.targets import turn_states
from grpo_dist.errors import BatchError, ConfigError
from tests.messages import refuses

NAN = float("nan")
GROUP_RELATIVE = ("grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "grpo_process")
GROUP_RELATIVE += ("maxrl", "lite_ppo", "scale_rl", "a2po")
PLAIN = {"norm_adv_by_std_in_grpo": False}
ROOT = 2**0.5
VALUE = math.log((math.e**2 + 3) / 4)


def of(name: str, rewards: list[list[float]], mask: Any = None, **more: Any) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of rows of rewards, without a mask all trained, without an index one group."""
    given = torch.tensor(rewards)
    trained = torch.ones_like(given) if mask is None else torch.as_tensor(mask)
    arguments = {"index": ["a"] * len(rewards)} | more
    return compute_advantage(name, token_level_rewards=given, response_mask=trained, **arguments)


def outcome(rewards: list[float]) -> tuple[Tensor, Tensor]:
    """Rewards on the last of 3 tokens; the mask covers 1, 2, 3, 3, ... tokens."""
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 0]] + [[1.0, 1, 1]] * (len(rewards) - 2))[: len(rewards)]
    rows = torch.zeros_like(mask)
    rows[torch.arange(len(rewards)), mask.sum(-1).long() - 1] = torch.tensor(rewards)
    return rows, mask


def advantage(name: str, scores: list[float], index: Any, **more: Any) -> list[float]:
    """The advantage of each response's first token."""
    rewards, mask = outcome(scores)
    if name == "grpo_process":
        more["step_mask"] = rewards.cumsum(-1).diff(dim=-1, prepend=rewards[:, :1] * 0) != 0
    advantages, _ = compute_advantage(name, token_level_rewards=rewards, response_mask=mask, index=list(index), **more)
    assert torch.equal(advantages, advantages[:, :1] * mask), "the same on every token"
    return advantages[:, 0].tolist()


@pytest.mark.parametrize(
    ("name", "scores", "index", "config", "expected"),
    [
        # mean 1/4, sample variance (9 + 1 + 1 + 1) / 16 / 3 = 1/4, std 1/2
        ("grpo", [1.0, 0, 0, 0], "aaaa", {}, [x / (0.5 + STD_EPS) for x in (0.75, -0.25, -0.25, -0.25)]),
        ("grpo", [1.0, 0, 0, 0], [7] * 4, PLAIN, [0.75, -0.25, -0.25, -0.25]),  # Dr. GRPO
        # the others' means are 0, 1.5, 1.5; and of groups whose rows take turns
        ("rloo", [3.0, 0, 0], "aaa", {}, [3, -1.5, -1.5]),
        ("rloo", [3.0, 1, 0, 5], "abab", {}, [3, -4, -3, 4]),
        # only the best counts, by its lead of 2, over the standard deviation 2; two best have no lead
        ("grpo_passk", [5.0, 3, 1], "aaa", {}, [2 / (2 + STD_EPS), 0, 0]),
        ("grpo_passk", [5.0, 3, 5, 2, 7], "aaabb", PLAIN, [0, 0, 0, 0, 5]),
        # lengths 1, 2, 3: baseline (6 + 6 + 0) / 6 = 2
        ("opo", [6.0, 3, 0], "aaa", {}, [4, 1, -2]),
        # 4 responses, 1 non-zero, alpha 4; divided by f_norm 2
        ("gpg", [1.0, 0, 0, 0], "aabb", {"f_norm": 2.0}, [1, -1, 0, 0]),
        # mean 1/4; a group without a success, or with a negative mean, teaches nothing
        ("maxrl", [1.0, 0, 0, 0], "aaaa", {}, [3, -1, -1, -1]),
        ("maxrl", [0.0, 0, 1, -3], "aabb", {}, [0, 0, 0, 0]),
        # means 3 and 1, differences 1, -1, 0, 0: the scores deviate by sqrt((4 + 0 + 1 + 1) / 3) = sqrt 2 over the
        # batch, the differences by sqrt(2 / 3)
        ("lite_ppo", [4.0, 2, 1, 1], "aabb", {}, [1 / (ROOT + STD_EPS), -1 / (ROOT + STD_EPS), 0, 0]),
        ("scale_rl", [4.0, 2, 1, 1], "aabb", {}, [1.5**0.5, -(1.5**0.5), 0, 0]),
        # lengths 1 and 2: centred 1 and -1, -1; mean -1/3, sample variance 4/3
        ("reinforce_plus_plus_baseline", [3.0, 1], "aa", {}, [4 / 3 / (4 / 3) ** 0.5, -2 / 3 / (4 / 3) ** 0.5]),
        # V = beta ln((e^(2 / beta) + 3) / 4); near beta = 0 it is the best one's, where exp(2000) would overflow
        ("a2po", [2.0, 0, 0, 0], "aaaa", {"a2po_beta": 1.0}, [2 - VALUE, -VALUE, -VALUE, -VALUE]),
        ("a2po", [2.0, 0, 0, 0], "aaaa", {"a2po_beta": 1e-3}, [1e-3 * math.log(4)] + [1e-3 * math.log(4) - 2] * 3),
    ],
)
def test_scores_by_hand(name: str, scores: list[float], index: Any, config: dict, expected: list[float]) -> None:
    assert advantage(name, scores, index, config=config) == pytest.approx(expected, rel=2e-6, abs=1e-7)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_equal_rewards_and_single_responses_teach_nothing(name: str) -> None:
    """0.1 has no exact float: the mean of three must still be itself."""
    assert advantage(name, [0.1, 0.1, 0.1, 2.0], "aaab") == [0] * 4


# --- returns -----------------------------------------------------------------------------------------------------
def test_gae_passes_over_a_tools_words_and_reads_no_value_there() -> None:
    options = {"gamma": 0.9, "lam": 0.5}
    expected = of("gae", [[0.0, 2.0]], values=torch.tensor([[1.0, 3.0]]), config=options)
    values = torch.tensor([[1.0, NAN, 3.0, math.inf]])
    found = of("gae", [[0.0, 0.0, 2.0, 0.0]], [[1.0, 0.0, 1.0, 0.0]], values=values, config=options)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[:, [0, 2]], theirs)
        assert not ours[:, [1, 3]].any()


# --- components --------------------------------------------------------------------------------------------------
def gdpo(components: dict[str, list[float]], index: str = "aa", **config: Any) -> Tensor:
    scores = {name: torch.tensor(values) for name, values in components.items()}
    return of("gdpo", [[0.0]] * len(index), index=list(index), reward_components=scores, config=config)[0]


def test_gdpo_by_hand() -> None:
    """Two components, each normalised to +-1/sqrt 2 in its group; the small one weighs 3."""
    components = {"big": [100.0, 0.0], "small": [0.0, 1.0]}
    assert gdpo(components).tolist() == [[0], [0]]
    weighted = gdpo(components, gdpo_reward_keys=["small", "big"], gdpo_reward_weights=[3.0, 1.0])
    torch.testing.assert_close(weighted, torch.tensor([[-1.0], [1.0]]) / ROOT)
    with refuses(ConfigError, "1 weights", "2"):
        gdpo(components, gdpo_reward_weights=[1.0])
    with refuses(ConfigError, "algorithm.gdpo_reward_keys", "huge", "big, small"):
        gdpo(components, gdpo_reward_keys=["huge"])


def test_gdpo_makes_no_signal_of_rounding() -> None:
    """Four groups in which y = 1000 - x / 4 takes back what x gives, up to the rounding of float32; z is constant."""
    x = torch.tensor([0.1, 0.7, 0.2, 0.9, 0.3, 0.4, 0.8, 0.5, 0.6, 0.25, 0.15, 0.35])
    z = torch.tensor([0.1, 0.1, 0.1]).repeat(4) + torch.tensor([0.0, 1e-8, -1e-8]).repeat(4)
    components = {"x": x.tolist(), "y": (1000 - x / 4).tolist(), "z": z.tolist()}
    assert not gdpo(components, "aaabbbcccddd").any()
    weighted = gdpo(components, "aaabbbcccddd", gdpo_reward_weights=[1.0, 0.5, 1.0])
    assert weighted.std().item() == pytest.approx(1)
    torch.testing.assert_close(weighted, gdpo({"x": x.tolist()}, "aaabbbcccddd"), atol=1e-2, rtol=0)


# --- steps and turns ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("trained", [1.0, 0.0])
def test_grpo_process_without_a_steps_end_is_one_step(trained: float) -> None:
    """Rewards 3 = 1 + 2 without an end, 1 on one: mean 2, std sqrt 2. A row without tokens that train still counts."""
    steps, mask = torch.tensor([[0, 0, 0], [0, 1, 0]]), [[trained, trained, 0], [1, 1, 0]]
    advantages, _ = of("grpo_process", [[1.0, 2, 0], [0, 1, 0]], mask, step_mask=steps)
    torch.testing.assert_close(advantages, torch.tensor([[trained, trained, 0], [-1, -1, 0]]) / (ROOT + STD_EPS))


def test_gigpo_by_hand() -> None:
    """Scores 1 and 0, less 1/2. With gamma 1/2 the turns of the first return 1/2 and 1, those of the second 0."""
    mask = torch.tensor([[1.0, 1, 0, 1, 0, 0], [1, 0, 1, 0, 1, 0]])
    states = turn_states(torch.tensor([[5, 6, 9, 7, 0, 0], [5, 9, 8, 3, 4, 0]]), mask)
    assert states.tolist() == [[1, 1, 0, 2, 0, 0], [1, 0, 2, 0, 3, 0]], "at the beginning, after 9, after 3"
    rewards = [[0, 0, 0, 0.75, 0.25, 0], [0.0] * 6]  # a part lies behind the turn that it is for
    config = {**PLAIN, "gamma": 0.5}
    advantages, _ = of("gigpo", rewards, mask, turn_states=states, config=config)
    assert advantages.tolist() == [[0.75, 0.75, 0, 1, 0, 0], [-0.75, 0, -1, 0, -0.5, 0]]
    elsewhere, _ = of("gigpo", rewards, mask, turn_states=states, config=config, index=["a", "b"])
    assert not elsewhere.any(), "other prompts are other states"
    assert not of("gigpo", rewards, mask * 0, turn_states=states * 0, config=config)[0].any()


@pytest.mark.parametrize("agents", [None, torch.full((2, 4), 1)])
def test_gigpo_tells_two_tries_at_a_turn_apart(agents: Tensor | None) -> None:
    """Rewards 1 and 0 of two tries: they return 1 and 0, less 1/2; both episodes have the same score."""
    follows = torch.tensor([[-1, 0, -1, 2]] * 2)
    states = turn_states(torch.tensor([[5, 6, 7, 8], [4, 3, 2, 1]]), torch.ones(2, 4), follows)
    advantages, _ = of("gigpo", [[0.0, 1, 0, 0]] * 2, turn_states=states, config=PLAIN, agent_ids=agents)
    assert advantages.tolist() == [[0.5, 0.5, -0.5, -0.5]] * 2


# --- all of them -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ADVANTAGE.names())
def test_bf16_empty_responses_and_masked_rows(name: str) -> None:
    """float32 comes out, finite, 0 off the mask; the last row has no token that trains."""
    rewards = torch.tensor([[0.0, 1.0], [0.5, 0.0], [0.0, 0.25], [0.0, 0.0]], dtype=torch.bfloat16)
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]])
    columns: dict[str, Any] = {"values": torch.zeros(4, 2, dtype=torch.bfloat16), "reward_baselines": torch.zeros(4)}
    columns |= dict.fromkeys(("entropies", "gradient_norms"), torch.full((4, 2), NAN).where(mask == 0, 1.0).bfloat16())
    columns |= {"turn_states": mask, "step_mask": rewards != 0, "reward_components": {"all": rewards.sum(-1)}}
    index = torch.tensor([0, 0, 1, 1])
    for values in compute_advantage(name, token_level_rewards=rewards, response_mask=mask, index=index, **columns):
        assert values.dtype == torch.float32
        assert torch.isfinite(values).all()
        assert not values[mask == 0].any()


MISSING = {"gae": "values", "remax": "reward_baselines", "grpo_process": "step_mask", "gdpo": "reward_components"}
MISSING |= {"rl_zvp": "entropies", "optimal_token_baseline": "gradient_norms", "gigpo": "turn_states"}


def test_mistakes_are_named() -> None:
    rewards, mask = [[1.0, 0], [0, 0]], torch.ones(2, 2)
    for name, argument in MISSING.items():
        with refuses(BatchError, f"`{argument}`"):
            of(name, rewards)
    with refuses(BatchError, "`index`"):
        compute_advantage("grpo", token_level_rewards=mask, response_mask=mask)
    with refuses(BatchError, "1 entries", "2"):
        of("grpo", rewards, index=["a"])
    with refuses(BatchError, "response_mask", "(2, 3)", "token_level_rewards (2, 2)"):
        of("grpo", rewards, torch.ones(2, 3))
    with refuses(ConfigError, "algorithm.adv_estimator=grp", "'grpo'"):
        of("grp", rewards)
