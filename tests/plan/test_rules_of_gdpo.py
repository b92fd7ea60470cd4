"""What gdpo refuses before a run: the parts of a reward that it would not see."""

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import load_config
from tests.messages import says

GDPO, KEYS = "algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys"
NAMED = [GDPO, f"{KEYS}=[acc,style]"]
OVERLONG = "reward.overlong_buffer.enable=true"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            [*NAMED, "algorithm.use_kl_in_reward=true"],
            ["algorithm.use_kl_in_reward=true", GDPO, "actor_rollout_ref.actor.use_kl_loss=true"],
        ),
        ([GDPO], [f"{KEYS}=null", "custom_reward_function.path=null", "grpo_dist.rewards.weighted"]),
        ([*NAMED, OVERLONG], [f"{KEYS}=[acc,style]", OVERLONG, "overlong_penalty"]),
        ([GDPO, f"{KEYS}=[]"], [f"{KEYS}=[]", "null"]),
        ([GDPO, f"{KEYS}=[acc,style,acc]"], [KEYS, "acc twice"]),
        ([*NAMED, "algorithm.gdpo_reward_weights=[1,2,3]"], ["algorithm.gdpo_reward_weights=[1.0,2.0,3.0]", KEYS]),
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
