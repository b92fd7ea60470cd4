from typing import Any

import pytest
import torch

from grpo_dist.algorithms import compute_advantage
from grpo_dist.algorithms.advantage import ADVANTAGE, STD_EPS
from grpo_dist.errors import BatchError, ConfigError
from tests.golden import cases, tensors
from tests.messages import refuses

NAN = float("nan")


def outcome(rewards: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards on the last of 3 tokens; the mask covers 1, 2, 3, 3, ... tokens."""
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 0]] + [[1.0, 1, 1]] * (len(rewards) - 2))[: len(rewards)]
    rows = torch.zeros_like(mask)
    rows[torch.arange(len(rewards)), mask.sum(-1).long() - 1] = torch.tensor(rewards)
    return rows, mask


GROUP_RELATIVE = ("grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "grpo_process")
GROUP_RELATIVE += ("maxrl", "lite_ppo", "scale_rl", "a2po")
# Without a case: verl's gdpo has its own arguments, and it does not have the others.
NOT_VERLS = {"gdpo", "grpo_process", "distill", "maxrl", "lite_ppo", "scale_rl", "rl_zvp", "rae", "gigpo"}
NOT_VERLS |= {"optimal_token_baseline", "a2po"}  # tests/fuzz has its formula
IN_GOLDEN = sorted(set(ADVANTAGE.names()) - NOT_VERLS)


@pytest.mark.parametrize("case", cases("advantage", tuple(IN_GOLDEN)))
def test_equals_verl(case: dict) -> None:
    """Off the mask ours is 0; verl's gae leaves whitened values there, which no loss reads."""
    inputs = tensors(case["inputs"])
    advantages, returns = compute_advantage(case["name"], **inputs, config=case["config"])
    mask = inputs["response_mask"]
    for ours, name in ((advantages, "advantages"), (returns, "returns")):
        torch.testing.assert_close(ours * mask, torch.tensor(case["outputs"][name]) * mask, rtol=1e-5, atol=1e-5)
        assert not ours[mask == 0].any()


def test_grpo_by_hand() -> None:
    """Rewards 1, 0, 0, 0: mean 1/4, sample variance (9 + 1 + 1 + 1) / 16 / 3 = 1/4, std 1/2."""
    rewards, mask = outcome([1.0, 0.0, 0.0, 0.0])
    advantages, _ = compute_advantage("grpo", token_level_rewards=rewards, response_mask=mask, index=["a"] * 4)
    expected = torch.tensor([0.75, -0.25, -0.25, -0.25]) / (0.5 + STD_EPS)
    torch.testing.assert_close(advantages, expected.unsqueeze(-1) * mask)


def test_dr_grpo_leaves_the_std_out() -> None:
    rewards, mask = outcome([1.0, 0.0, 0.0, 0.0])
    advantages, _ = compute_advantage(
        "grpo",
        token_level_rewards=rewards,
        response_mask=mask,
        index=[7] * 4,
        config={"norm_adv_by_std_in_grpo": False},
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.75], [-0.25], [-0.25], [-0.25]]) * mask)


def test_rloo_by_hand() -> None:
    """Rewards 3, 0, 0: the others' means are 0, 1.5, 1.5."""
    rewards, mask = outcome([3.0, 0.0, 0.0])
    advantages, _ = compute_advantage("rloo", token_level_rewards=rewards, response_mask=mask, index=["a"] * 3)
    torch.testing.assert_close(advantages, torch.tensor([[3.0], [-1.5], [-1.5]]) * mask)


def advantage(name: str, scores: list[float], index: list[str], **more: Any) -> list[float]:
    """The advantage of each response's first token."""
    rewards, mask = outcome(scores)
    if name == "grpo_process":
        more["step_mask"] = rewards.cumsum(-1).diff(dim=-1, prepend=rewards[:, :1] * 0) != 0
    advantages, _ = compute_advantage(name, token_level_rewards=rewards, response_mask=mask, index=index, **more)
    assert torch.equal(advantages, advantages[:, :1] * mask), "the same on every token"
    return advantages[:, 0].tolist()


def test_grpo_passk_by_hand() -> None:
    """Scores 5, 3, 1: only the best counts, by its lead of 2, over the standard deviation 2. Two best: no lead."""
    assert advantage("grpo_passk", [5.0, 3.0, 1.0], ["a"] * 3) == pytest.approx([2 / (2 + STD_EPS), 0, 0])
    plain = {"norm_adv_by_std_in_grpo": False}
    assert advantage("grpo_passk", [5.0, 3.0, 5.0, 2.0, 7.0], ["a"] * 3 + ["b"] * 2, config=plain) == [0, 0, 0, 0, 5]


def test_opo_by_hand() -> None:
    """Lengths 1, 2, 3 and scores 6, 3, 0: baseline (6 + 6 + 0) / 6 = 2."""
    assert advantage("opo", [6.0, 3.0, 0.0], ["a"] * 3) == pytest.approx([4, 1, -2])


def test_gpg_by_hand() -> None:
    """Scores 1, 0 and 0, 0: 4 responses, 1 non-zero, alpha 4; divided by f_norm 2."""
    assert advantage("gpg", [1.0, 0, 0, 0], ["a", "a", "b", "b"], config={"f_norm": 2.0}) == pytest.approx(
        [1, -1, 0, 0]
    )


def test_maxrl_by_hand() -> None:
    """Scores 1, 0, 0, 0, mean 1/4: 3 and -1; a group without a success, or with a negative mean, teaches nothing."""
    assert advantage("maxrl", [1.0, 0, 0, 0], ["a"] * 4) == [3, -1, -1, -1]
    assert advantage("maxrl", [0.0, 0, 1, -3], ["a", "a", "b", "b"]) == [0, 0, 0, 0]


def test_the_deviation_of_the_batch_by_hand() -> None:
    """Scores 4, 2 and 1, 1, means 3 and 1, differences 1, -1, 0, 0.

    Over the batch the scores deviate by sqrt((4 + 0 + 1 + 1) / 3) = sqrt 2, the differences by sqrt(2 / 3).
    """
    for name, std in {"lite_ppo": 2**0.5, "scale_rl": (2 / 3) ** 0.5}.items():
        found = advantage(name, [4.0, 2.0, 1.0, 1.0], ["a", "a", "b", "b"])
        assert found == pytest.approx([1 / (std + STD_EPS), -1 / (std + STD_EPS), 0, 0])


def test_rl_zvp_by_hand() -> None:
    """A solved group trains by 0.1 H, a failed one by 0.1 (H - max H), another as with grpo; one alone by 0."""
    rewards, mask = outcome([1.0, 1.0, 0.0, 0.0, 3.0, 1.0, 1.0])
    entropies = torch.tensor([[2.0, 9.0, 9.0]] * 2 + [[1.0, 3.0, 2.0]] * 5)
    arguments = {"token_level_rewards": rewards, "response_mask": mask, "entropies": entropies}
    advantages, _ = compute_advantage("rl_zvp", index=list("aabbccd"), **arguments)
    root = 2**0.5 / (2**0.5 + STD_EPS)
    solved, failed = [[0.2, 0, 0], [0.2, 0.9, 0]], [[-0.2, 0, -0.1]] * 2
    mixed = [[root / 2**0.5] * 3, [-root / 2**0.5] * 3]
    torch.testing.assert_close(advantages, torch.tensor([*solved, *failed, *mixed, [0.0] * 3]))


def test_reinforce_plus_plus_by_hand() -> None:
    """One response, rewards 1, 0, 4, gamma 1/2: returns 2, 2, 4; mean 8/3, sample variance 4/3."""
    rewards, mask = torch.tensor([[1.0, 0.0, 4.0]]), torch.ones(1, 3)
    advantages, returns = compute_advantage(
        "reinforce_plus_plus", token_level_rewards=rewards, response_mask=mask, config={"gamma": 0.5}
    )
    assert returns.tolist() == [[2, 2, 4]]
    expected = [[(g - 8 / 3) / (4 / 3) ** 0.5 for g in (2, 2, 4)]]
    torch.testing.assert_close(advantages, torch.tensor(expected))


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    """Scores 3, 1 in a group, lengths 1 and 2: centred 1 and -1, -1; mean -1/3, sample variance 4/3."""
    expected = [(c + 1 / 3) / (4 / 3) ** 0.5 for c in (1, -1)]
    rewards, mask = outcome([3.0, 1.0])
    advantages, _ = compute_advantage(
        "reinforce_plus_plus_baseline", token_level_rewards=rewards, response_mask=mask, index=["a", "a"]
    )
    torch.testing.assert_close(advantages, torch.tensor([[expected[0]], [expected[1]]]) * mask)


def test_remax_by_hand() -> None:
    """Score 3 against a greedy score of 1, and 0 against 2; with a token reward 1 in the middle, the return falls."""
    assert advantage("remax", [3.0, 0.0], ["a", "b"], reward_baselines=torch.tensor([1.0, 2.0])) == [2, -2]
    rewards = torch.tensor([[0.0, 1.0, 3.0]])
    advantages, returns = compute_advantage(
        "remax", token_level_rewards=rewards, response_mask=torch.ones(1, 3), reward_baselines=torch.tensor([1.0])
    )
    assert returns.tolist() == [[4, 4, 3]]
    assert advantages.tolist() == [[3, 3, 2]]


def test_gae_by_hand() -> None:
    """Rewards 0, 2, values 1, 1, gamma 1, lam 1/2: deltas 0, 1; advantages 0 + 1/2, 1; returns 1.5, 2."""
    arguments = {"token_level_rewards": torch.tensor([[0.0, 2.0]]), "response_mask": torch.ones(1, 2)}
    advantages, returns = compute_advantage("gae", **arguments, values=torch.ones(1, 2), config={"lam": 0.5})
    assert returns.tolist() == [[1.5, 2.0]]
    torch.testing.assert_close(advantages, torch.tensor([[-0.5, 0.5]]) * 2**0.5)  # mean 3/4, sample variance 1/8


def test_gae_passes_over_a_tools_words() -> None:
    """A masked token in the middle changes nothing for the others."""
    plain = {"token_level_rewards": torch.tensor([[0.0, 2.0]]), "response_mask": torch.ones(1, 2)}
    tool = {"token_level_rewards": torch.tensor([[0.0, 0.0, 2.0]]), "response_mask": torch.tensor([[1.0, 0.0, 1.0]])}
    options = {"gamma": 0.9, "lam": 0.5}
    expected = compute_advantage("gae", **plain, values=torch.tensor([[1.0, 3.0]]), config=options)
    found = compute_advantage("gae", **tool, values=torch.tensor([[1.0, 9.0, 3.0]]), config=options)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[:, [0, 2]], theirs)


def test_gae_reads_no_value_off_the_mask() -> None:
    """Not even one that is no number."""
    arguments = {"token_level_rewards": torch.tensor([[0.0, 0, 2, 0]]), "response_mask": torch.tensor([[1.0, 0, 1, 0]])}
    values = torch.tensor([[1.0, 0.0, 3.0, 0.0]])
    noisy = values.where(arguments["response_mask"] > 0, torch.tensor([float("nan"), float("inf")]).repeat(2))
    expected = compute_advantage("gae", **arguments, values=values)
    for ours, wanted in zip(compute_advantage("gae", **arguments, values=noisy), expected, strict=True):
        assert torch.equal(ours, wanted)
    assert expected[1].tolist() == [[2, 0, 2, 0]]


def test_gae_keeps_a_reward_off_the_mask() -> None:
    """The score 2 sits on a rejected last token: for the token before it, it is what the next token would be worth.

    gamma 1/2, lam 1, values 0: advantages 1/2 * (1/2 * 2) and 1/2 * 2, as the returns of REINFORCE++.
    """
    arguments = {"token_level_rewards": torch.tensor([[0.0, 0.0, 2.0]]), "response_mask": torch.tensor([[1.0, 1, 0]])}
    _, returns = compute_advantage("gae", **arguments, values=torch.zeros(1, 3), config={"gamma": 0.5})
    assert returns.tolist() == [[0.5, 1, 0]]
    _, same = compute_advantage("reinforce_plus_plus", **arguments, config={"gamma": 0.5})
    assert returns.tolist() == same.tolist()


def test_gdpo_by_hand() -> None:
    """Two components, each normalised to +-1/sqrt 2 in its group; the second weighs 3. Summed: +-4/sqrt 2, whitened.

    The plain sum of the rewards, 100 + 0 against 0 + 1, would have drowned the second component.
    """
    components = {"big": torch.tensor([100.0, 0.0]), "small": torch.tensor([0.0, 1.0])}
    mask = torch.ones(2, 1)
    arguments = {"token_level_rewards": mask * 0, "response_mask": mask, "index": ["a", "a"]}
    opposed, _ = compute_advantage("gdpo", **arguments, reward_components=components)
    assert opposed.tolist() == [[0], [0]]
    options = {"gdpo_reward_keys": ["small", "big"], "gdpo_reward_weights": [3.0, 1.0]}
    weighted, _ = compute_advantage("gdpo", **arguments, reward_components=components, config=options)
    torch.testing.assert_close(weighted, torch.tensor([[-1.0], [1.0]]) * 0.5**0.5)
    with refuses(ConfigError, "1 weights", "2"):
        compute_advantage("gdpo", **arguments, reward_components=components, config={"gdpo_reward_weights": [1.0]})
    with refuses(ConfigError, "algorithm.gdpo_reward_keys", "huge", "big, small"):
        compute_advantage("gdpo", **arguments, reward_components=components, config={"gdpo_reward_keys": ["huge"]})


def test_gdpo_counts_tokens_in_whitening() -> None:
    """Values +-c, lengths 1 and 2: mean -c / 3, centred 4 c / 3 and -2 c / 3, sample variance 4 / 3 c^2."""
    rewards, mask = outcome([0.0, 0.0])
    arguments = {"token_level_rewards": rewards, "response_mask": mask, "index": ["a", "a"]}
    advantages, _ = compute_advantage("gdpo", **arguments, reward_components={"x": torch.tensor([5.0, -1.0])})
    torch.testing.assert_close(advantages, torch.tensor([[2.0], [-1.0]]) / 3**0.5 * mask)


def test_gdpo_leaves_out_a_component_that_a_response_has_not() -> None:
    """x is +-1 / sqrt 2 for the two that have it, y is -1, 1, 0: sums -h, h, 0 with h = 1 - 1 / sqrt 2; deviation h.

    The other group has nothing to tell apart; none of its responses has x.
    """
    nan = float("nan")
    components = {"x": torch.tensor([1.0, 0, nan, nan, nan]), "y": torch.tensor([0.0, 2, 1, 7, 7])}
    mask = torch.ones(5, 1)
    arguments = {"token_level_rewards": mask * 0, "response_mask": mask, "index": ["a"] * 3 + ["b"] * 2}
    advantages, _ = compute_advantage("gdpo", **arguments, reward_components=components)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([-1.0, 1, 0, 0, 0]) * 2**0.5)


def test_gdpo_makes_no_signal_of_rounding() -> None:
    """Four groups in which y = 1000 - x / 4 takes back what x gives, up to the rounding of float32; z is constant."""
    x = torch.tensor([0.1, 0.7, 0.2, 0.9, 0.3, 0.4, 0.8, 0.5, 0.6, 0.25, 0.15, 0.35])
    z = torch.tensor([0.1, 0.1, 0.1]).repeat(4) + torch.tensor([0.0, 1e-8, -1e-8]).repeat(4)
    components = {"x": x, "y": 1000 - x / 4, "z": z}
    mask = torch.ones(12, 1)
    arguments = {"token_level_rewards": mask * 0, "response_mask": mask, "index": list("aaabbbcccddd")}
    advantages, _ = compute_advantage("gdpo", **arguments, reward_components=components)
    assert not advantages.any()
    weights = {"gdpo_reward_weights": [1.0, 0.5, 1.0]}
    weighted, _ = compute_advantage("gdpo", **arguments, reward_components=components, config=weights)
    assert weighted.std().item() == pytest.approx(1)
    alone, _ = compute_advantage("gdpo", **arguments, reward_components={"x": x})
    torch.testing.assert_close(weighted, alone, atol=1e-2, rtol=0)


def test_grpo_process_by_hand() -> None:
    """Step rewards 1, 3 and 2, 0, 4 of two responses: mean 2, sample variance (1 + 1 + 0 + 4 + 4) / 4 = 2.5.

    The first response's steps end at tokens 1 and 3, normalised -1 and 1 (over sqrt 2.5): its first two tokens see
    both, the last two the second. The second response's steps end at 0, 1, 2: 0 - 2 + 2, then -2 + 2, then 2. The
    tokens of a step earn together: 0.75 + 0.25, and 5 on the last step less 1 behind its end.
    """
    rewards = torch.tensor([[0.75, 0.25, 0, 3], [2, 0, 5, -1]])
    steps = torch.tensor([[0, 1, 0, 1], [1, 1, 1, 0]])
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 0]])
    advantages, _ = compute_advantage(
        "grpo_process", token_level_rewards=rewards, response_mask=mask, index=["a", "a"], step_mask=steps
    )
    expected = torch.tensor([[0.0, 0, 1, 1], [0, 0, 2, 0]]) / (2.5**0.5 + STD_EPS)
    torch.testing.assert_close(advantages, expected)


def test_grpo_process_without_a_steps_end_is_one_step() -> None:
    """Rewards 3 = 1 + 2 without an end, 1 on one: mean 2, std sqrt 2. A row without tokens that train still counts."""
    rewards, mask = torch.tensor([[1.0, 2, 0], [0, 1, 0]]), torch.tensor([[1.0, 1, 0], [1, 1, 0]])
    steps = torch.tensor([[0, 0, 0], [0, 1, 0]])
    arguments = {"token_level_rewards": rewards, "index": ["a", "a"], "step_mask": steps}
    advantages, _ = compute_advantage("grpo_process", **arguments, response_mask=mask)
    torch.testing.assert_close(advantages, torch.tensor([[1.0, 1, 0], [-1, -1, 0]]) / (2**0.5 + STD_EPS))
    mask[0] = 0
    advantages, _ = compute_advantage("grpo_process", **arguments, response_mask=mask)
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0, 0], [-1, -1, 0]]) / (2**0.5 + STD_EPS))


def test_grpo_process_with_one_step_is_grpo() -> None:
    scores, index = [1.0, 0.0, 0.5, 2.0], ["a", "b", "a", "b"]
    rewards, mask = outcome(scores)
    last = torch.zeros_like(mask)
    last[torch.arange(4), mask.sum(-1).long() - 1] = 1
    arguments = {"token_level_rewards": rewards, "response_mask": mask, "index": index}
    process, _ = compute_advantage("grpo_process", **arguments, step_mask=last)
    torch.testing.assert_close(process, compute_advantage("grpo", **arguments)[0])


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_equal_rewards_and_single_responses_teach_nothing(name: str) -> None:
    """0.1 has no exact float: the mean of three must still be itself."""
    assert advantage(name, [0.1, 0.1, 0.1, 2.0], ["a"] * 3 + ["b"]) == [0] * 4


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "grpo_passk"])
def test_groups_may_be_interleaved(name: str) -> None:
    rewards, mask = outcome([1.0, 0.0, 0.0, 5.0])
    mixed, _ = compute_advantage(name, token_level_rewards=rewards, response_mask=mask, index=["a", "b", "a", "b"])
    order = torch.tensor([0, 2, 1, 3])
    sorted_, _ = compute_advantage(
        name, token_level_rewards=rewards[order], response_mask=mask[order], index=["a", "a", "b", "b"]
    )
    torch.testing.assert_close(mixed[order], sorted_)


@pytest.mark.parametrize(
    ("gamma", "expected"),
    [(0.0, [-1.0, 2.0, 0.0, -4.0]), (0.5, [-1.0, 0.0, 0.0, -4.0]), (1.0, [-3.0, -2.0, 0.0, -4.0])],
)
def test_distill_by_hand(gamma: float, expected: list[float]) -> None:
    """Rewards -1, 2, 0 and -4, the third on a token of an environment: the return is the advantage, neither centred nor
    scaled, and what lies between two trained tokens takes no time.
    """
    rewards, mask = torch.tensor([[-1.0, 2.0, 0.0, -4.0]]), torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    found = compute_advantage("distill", token_level_rewards=rewards, response_mask=mask, config={"gamma": gamma})
    for values in found:
        torch.testing.assert_close(values, torch.tensor([expected]))


@pytest.mark.parametrize("name", ADVANTAGE.names())
def test_bf16_empty_responses_and_masked_rows(name: str) -> None:
    """float32 comes out, finite, 0 off the mask; the last row has no token that trains."""
    rewards = torch.tensor([[0.0, 1.0], [0.5, 0.0], [0.0, 0.25], [0.0, 0.0]], dtype=torch.bfloat16)
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]])
    advantages, returns = compute_advantage(
        name,
        token_level_rewards=rewards,
        response_mask=mask,
        index=torch.tensor([0, 0, 1, 1]),
        values=torch.zeros(4, 2, dtype=torch.bfloat16),
        **dict.fromkeys(("entropies", "gradient_norms"), torch.full((4, 2), NAN).where(mask == 0, 1.0).bfloat16()),
        turn_states=mask,
        reward_baselines=torch.zeros(4),
        step_mask=rewards != 0,
        reward_components={"all": rewards.sum(-1)},
    )
    for values in (advantages, returns):
        assert values.dtype == torch.float32
        assert torch.isfinite(values).all()
        assert not values[mask == 0].any()


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("gae", "values"),
        ("remax", "reward_baselines"),
        ("grpo_process", "step_mask"),
        ("gdpo", "reward_components"),
        ("rl_zvp", "entropies"),
        ("optimal_token_baseline", "gradient_norms"),
        ("gigpo", "turn_states"),
    ],
)
def test_a_missing_input_is_named(name: str, argument: str) -> None:
    rewards, mask = outcome([1.0, 0.0])
    with refuses(BatchError, f"`{argument}`"):
        compute_advantage(name, token_level_rewards=rewards, response_mask=mask, index=["a", "a"])


def test_mistakes_are_named() -> None:
    rewards, mask = outcome([1.0, 0.0])
    with refuses(BatchError, "`index`"):
        compute_advantage("grpo", token_level_rewards=rewards, response_mask=mask)
    with refuses(BatchError, "1 entries", "2"):
        compute_advantage("grpo", token_level_rewards=rewards, response_mask=mask, index=["a"])
    with refuses(BatchError, "response_mask", "(2, 3)", "token_level_rewards (2, 2)"):
        compute_advantage("grpo", token_level_rewards=rewards[:, :2], response_mask=mask, index=["a", "a"])
    with refuses(ConfigError, "algorithm.adv_estimator=grp", "'grpo'"):
        compute_advantage("grp", token_level_rewards=rewards, response_mask=mask, index=["a", "a"])
