"""Rules on a teacher behind an endpoint; test_rules_of_roles.py has those on other references."""

from __future__ import annotations

import pytest

from grpo_dist.plan.commands import load_config
from grpo_dist.plan.roles import roles_of
from tests.config.refusals import broken, refused
from tests.messages import says

ENDPOINT = "actor_rollout_ref.ref.model.endpoint"
URL = f"{ENDPOINT}.base_url=http://teacher:8000/v1"
TAUGHT = ("recipe=distill", URL, f"{ENDPOINT}.model=big")
ACTOR = "actor_rollout_ref.actor"


def test_no_ranks_hold_a_teacher_that_runs_elsewhere() -> None:
    config = load_config([*TAUGHT])[0]
    assert config.needs_reference
    assert not config.actor_is_reference
    assert "ref" not in [row.name for row in roles_of(config)]
    lora = load_config([*TAUGHT, "actor_rollout_ref.model.lora_rank=2"])[0]
    assert not lora.actor_is_reference


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        broken(also=[f"{ENDPOINT}.model", "/models"], beside=["recipe=distill", URL]),
        broken(f"{ENDPOINT}.base_url=teacher:8000", also=["http://"], beside=[*TAUGHT]),
        broken(f"{ACTOR}.kl_loss_type=k2", also=[URL, "full"], beside=[*TAUGHT]),
        broken("algorithm.use_kl_in_reward=true", also=[URL, "false"], beside=[*TAUGHT]),
        broken(
            also=[URL, "ref.model.path", "null"],
            beside=[*TAUGHT, "actor_rollout_ref.ref.model.path=builtin:tiny-qwen3"],
        ),
        broken(
            also=[URL, "ref_model_sync_steps=1", "-1"], beside=[*TAUGHT, "actor_rollout_ref.ref.ref_model_sync_steps=1"]
        ),
        broken("algorithm.self_distillation.enable=true", also=[URL], beside=[*TAUGHT]),
        broken(
            also=[URL, "default_agent_loop=external", "tool_agent"],
            beside=[*TAUGHT, "actor_rollout_ref.rollout.agent.default_agent_loop=external"],
        ),
    ],
)
def test_what_is_refused(overrides: list[str], parts: list[str]) -> None:
    says(refused(*overrides), *parts)
