"""The agents of an episode and whom they are compared with; averages and weights that a run moves from step to step."""

from typing import Any

import pytest
import torch

from grpo_dist.algorithms import compute_advantage
from grpo_dist.algorithms.advantage.inputs import ATTEMPTS, AgentSequences, agent_id, mean_scores, name_fault
from grpo_dist.algorithms.controllers import AgentBaselines, EntropyController, KLController, score_metrics

# Three episodes of one prompt: the agent a in all of them, b in two; 0 is put in.
A, B = agent_id("a"), agent_id("b")
AGENTS = torch.tensor([[A, A, 0, B, A], [B, 0, A, 0, 0], [A, 0, 0, 0, 0]])
REWARDS = torch.tensor([[0.0, 1, 0, 6, 2], [0, 0, 1, 0, 0], [2, 0, 0, 0, 0]])
ARGUMENTS: dict[str, Any] = {"token_level_rewards": REWARDS, "response_mask": (AGENTS > 0).float(), "index": ["a"] * 3}
PLAIN = {"norm_adv_by_std_in_grpo": False}


def test_agents_are_compared_with_those_of_their_name() -> None:
    """Agent a earns 1 + 2, 1 and 2, its mean is 2; agent b earns 6 and 0, mean 3. All of an agent's tokens train."""
    for values in compute_advantage("grpo", agent_ids=AGENTS, **ARGUMENTS, config=PLAIN):
        assert values.tolist() == [[1, 1, 0, 3, 1], [-3, 0, -1, 0, 0], [0, 0, 0, 0, 0]]
    steps = torch.tensor([[0, 1, 0, 1, 1], [1, 0, 1, 0, 0], [1, 0, 0, 0, 0]])
    process, _ = compute_advantage("grpo_process", agent_ids=AGENTS, step_mask=steps, **ARGUMENTS, config=PLAIN)
    # steps of agent a: 1, 2, 1, 2, less their mean 1.5; a token gets those that follow it in its own agent's turns
    assert process.tolist() == [[0, 0, 0, 3, 0.5], [-3, 0, -0.5, 0, 0], [0.5, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    "estimator", ["grpo", "rloo", "grpo_process", "gigpo", "optimal_token_baseline", "rae", "distill", "gae"]
)
def test_one_agent_in_each_response_changes_nothing(estimator: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, mask = torch.rand(6, 4, generator=generator), (torch.rand(6, 4, generator=generator) > 0.3).float()
    arguments = {"token_level_rewards": rewards, "response_mask": mask, "index": list("aaabbb")}
    arguments |= {name: torch.rand(6, 4, generator=generator) for name in ("values", "gradient_norms")}
    arguments |= {"step_mask": torch.eye(6, 4), "turn_states": mask.long()}
    alone = compute_advantage(estimator, agent_ids=torch.full((6, 4), agent_id("")), **arguments)
    for one, other in zip(alone, compute_advantage(estimator, **arguments), strict=True):
        assert one.equal(other)


def test_a_name_and_an_attempt_make_a_number() -> None:
    solver = agent_id("solver")
    assert [agent_id(f"solver:{k}") - solver for k in (0, 1, 254)] == [1, 2, 255]
    assert (solver - 1) % ATTEMPTS == 0
    others = [agent_id(name) for name in ("", "solver:", ":1", "solver:x", "proposer", "a:b:1")]
    assert len({(number - 1) // ATTEMPTS for number in (solver, *others)}) == 7, "other names"
    assert all(0 < number < 2**31 for number in others)
    assert not name_fault("solver:254")
    for part in ("solver:255", "254"):
        assert part in name_fault("solver:255")


def test_attempts_are_compared_within_their_episode() -> None:
    """A proposer against that of the other episode; two solvers with each other, since their problem is another."""
    p, first, second = agent_id("proposer"), agent_id("solver:0"), agent_id("solver:1")
    ids = torch.tensor([[p, first, second], [p, second, first]])
    rewards = torch.tensor([[4.0, 1.0, 0.0], [0.0, 5.0, 3.0]])
    arguments: dict[str, Any] = {"token_level_rewards": rewards, "response_mask": torch.ones(2, 3), "index": ["x"] * 2}
    advantages, _ = compute_advantage("grpo", agent_ids=ids, config=PLAIN, **arguments)
    assert advantages.tolist() == [[2.0, 0.5, -0.5], [-2.0, 1.0, -1.0]]
    groups = AgentSequences.of(ids).groups(["x", "x"])
    assert len(set(groups)) == 3


def test_each_agent_is_compared_with_its_own_average() -> None:
    """Of RAE: 3 less 2 and 6 less 0 in the first episode; agents that are not known yet have 0."""

    def rae(baselines: dict[int, float], agents: torch.Tensor | None = None, **config: Any) -> list[list[float]]:
        config["agent_baselines"] = baselines
        return compute_advantage("rae", agent_ids=agents, config=config, **ARGUMENTS)[0].tolist()

    a, sources = (A - 1) // ATTEMPTS, torch.tensor([0, 4, 4])
    assert rae({a: 2.0}, AGENTS) == [[1, 1, 0, 6, 1], [0, 0, -1, 0, 0], [0, 0, 0, 0, 0]]
    assert [row[0] for row in rae({0: 0.5})] == [8.5, 0.5, 1.5]
    # 4 * 2^32 is the number of the agent without a name in the data source 4
    assert [row[0] for row in rae({0: 0.5, 4 * 2**32: 1.0}, sources=sources)] == [8.5, 0, 1]
    own = rae({4 * 2**32 + a: 2.0}, AGENTS, sources=sources)
    assert own == [[3, 3, 0, 6, 3], [0, 0, -1, 0, 0], [0, 0, 0, 0, 0]]


def test_mean_scores_by_agent_and_source() -> None:
    sources, a, b = torch.tensor([1, 1, 2]), (A - 1) // ATTEMPTS, (B - 1) // ATTEMPTS
    assert mean_scores(REWARDS, AGENTS) == {a: (2.0, 3), b: (3.0, 2)}
    assert mean_scores(REWARDS, None) == {0: (4.0, 3)}
    assert mean_scores(REWARDS, None, sources) == {2**32: (5.0, 2), 2**33: (2.0, 1)}
    of_both = {2**32 + a: (2.0, 2), 2**33 + a: (2.0, 1), 2**32 + b: (3.0, 2)}
    assert mean_scores(REWARDS, AGENTS, sources) == of_both


# --- what a run moves from step to step ------------------------------------------------------------------------------
def test_the_sequences_of_a_step_count_together() -> None:
    """Twice the score 1 with decay 1/2: 1 - 1/4; then once 0; the other agent has played once."""
    baselines = AgentBaselines(0.5)
    assert baselines.metrics() == {}
    baselines.update(score_metrics({0: (1.0, 2), 7: (-1.0, 1)}))
    assert baselines.values == {0: 0.75, 7: -0.5}
    baselines.update(score_metrics({0: (0.0, 1)}) | {"actor/lr": 1.0})
    assert baselines.values == pytest.approx({0: 0.375, 7: -0.5})
    assert AgentBaselines.recorded(baselines.metrics() | {"actor/lr": 1.0}) == baselines.values


@pytest.mark.parametrize(
    ("coef", "options", "entropies", "weights", "after"),
    [
        # c goes 0.01, 0.005, 0.01, 0.015, 0.01; it acts up to the target
        (0.01, {"target": 0.2, "delta": 0.005}, [0.5, 0.1, 0.2, 0.3], [0, 0, 0.01, 0.015, 0], 0.01),
        (0.0, {"target": 0.2}, [1.0, 0.0], [0, 0, 0.005], 0.005),  # never negative
        (0.01, {}, [0.0], [0.01, 0.01], 0.01),  # without a target it is fixed
    ],
)
def test_the_weight_moves_towards_the_target(
    coef: float, options: dict[str, float], entropies: list[float], weights: list[float], after: float
) -> None:
    controller, found = EntropyController(coef, **options), []
    for entropy in entropies:
        found.append(controller.weight)
        controller.update(entropy)
    assert [*found, controller.weight] == pytest.approx(weights)
    assert controller.coef == pytest.approx(after)
    assert controller.entropy == (entropies[-1] if options else None)


@pytest.mark.parametrize(("kl", "error"), [(0.11, 0.1), (0.05, -0.2), (1.0, 0.2), (0.1, 0.0)])
def test_the_coefficient_of_the_kl_adapts(kl: float, error: float) -> None:
    """Target 0.1: the relative error, at most 0.2 either way, times 500 sequences over a horizon of 1000."""
    controller, fixed = KLController(0.2, target_kl=0.1, horizon=1000), KLController(0.2)
    for each in (controller, fixed):
        each.update(kl, 500)
    assert controller.coef == pytest.approx(0.2 * (1 + error / 2))
    assert fixed.coef == 0.2
