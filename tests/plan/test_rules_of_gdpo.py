"""What gdpo refuses before a run: the parts of a reward that it would not see."""

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import load_config
from tests.config.refusals import broken
from tests.messages import says

GDPO, KEYS = "algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys"
NAMED = [GDPO, f"{KEYS}=[acc,style]"]
OVERLONG = "reward.overlong_buffer.enable=true"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        broken(
            "algorithm.use_kl_in_reward=true", also=[GDPO, "actor_rollout_ref.actor.use_kl_loss=true"], beside=[*NAMED]
        ),
        broken(also=[f"{KEYS}=null", "custom_reward_function.path=null", "grpo_dist.rewards.weighted"], beside=[GDPO]),
        broken(OVERLONG, also=[f"{KEYS}=[acc,style]", "overlong_penalty"], beside=[*NAMED]),
        broken(f"{KEYS}=[]", also=["null"], beside=[GDPO]),
        broken(also=[KEYS, "acc twice"], beside=[GDPO, f"{KEYS}=[acc,style,acc]"]),
        broken(
            also=["algorithm.gdpo_reward_weights=[1.0,2.0,3.0]", KEYS],
            beside=[*NAMED, "algorithm.gdpo_reward_weights=[1,2,3]"],
        ),
    ],
)
def test_refused(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    assert len(str(caught.value).splitlines()) == 2, "one problem"
    says(caught, *parts)


@pytest.mark.parametrize(
    "overrides",
    [
        [*NAMED, "algorithm.gdpo_reward_weights=[1,2]"],
        [GDPO, f"{KEYS}=[acc,overlong_penalty]", OVERLONG],
        [GDPO, "custom_reward_function.path=grpo_dist.rewards.weighted", OVERLONG],
        ["algorithm.use_kl_in_reward=true", OVERLONG],
    ],
)
def test_legal(overrides: list[str]) -> None:
    assert load_config(overrides)[0].algorithm.gamma == 1.0
