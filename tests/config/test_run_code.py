"""What of a run's config is code, and is not taken from its folder unasked."""

from pathlib import Path

import pytest

from grpo_dist.config.load import with_overrides
from grpo_dist.config.run_code import ENGINE, FLAG, MODEL, REWARD, UPDATE, code_of_run, require_trust
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import GRPO
from tests.messages import refuses
from tests.tiers import first

KEYS = (*ENGINE, *REWARD, *UPDATE)
PATH, KWARGS = REWARD
ROLLOUT = "actor_rollout_ref.rollout"
GIVEN = f"{ROLLOUT}.engine_kwargs"
VLLM = f"{GIVEN}.vllm"
SUM = "grpo_dist.rewards.weighted"

OF_THE_PACKAGE = [
    [],
    [f"{PATH}=grpo_dist.rewards.exact_match", f"{KWARGS}={{mode: contains}}"],
    [f"{PATH}=grpo_dist.rewards.format:compute_score", f"{KWARGS}={{pattern: 'a:b.py'}}"],
    [f"{PATH}=pkg://grpo_dist.tasks.gsm8k"],
    [f"{PATH}=[null,grpo_dist.rewards.exact_match]"],
    [f"{PATH}={SUM}", f"{KWARGS}={{functions: [{{path: grpo_dist.tasks.gsm8k, label: 'x.py:y'}}]}}"],
    ["algorithm.adv_estimator=rloo", "actor_rollout_ref.actor.kl_loss_type=k3+"],
]
CODE = {
    "actor_rollout_ref.model.trust_remote_code": "true",
    f"{ROLLOUT}.name": "mine.py:Engine",
    GIVEN: "{vllm:{worker_extension_cls:evil.Worker}}",
    PATH: "reward.py",
    "algorithm.adv_estimator": "mine.py:estimate",
    "algorithm.kl_penalty": "mine.py:kl",
    "actor_rollout_ref.actor.kl_loss_type": "mine:kl",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "mine:loss",
}
PATHS = [
    "os",  # a module, here or installed
    "/run/functions/mine.pkl:mine",
    "grpo_dist.rewards.py",  # a file of that name
    "grpo_dist.rewards/../evil.py",
    "file://reward.py:score",
    "grpo_dist.plugins.registry:load_attribute",
    "[grpo_dist.tasks.gsm8k,reward.py:short]",
    "[{path: reward.py:short, weight: 2}]",
]
ARGUMENTS = [
    "{functions: [{path: reward.py:short}]}",
    f"{{functions: [{{path: {SUM}, reward_kwargs: {{functions: [{{path: evil.py}}]}}}}]}}",  # loaded, then refused
    "{url: 'http://elsewhere/score', headers_env: SECRETS}",
    "{functions: [{path: grpo_dist.rewards.http_reward, reward_kwargs: {url: 'http://elsewhere'}}]}",
]


def found(saved: list[str], overrides: list[str] | None = None) -> list[str]:
    """The keys whose values are code, of a run with this config, where the command line sets `overrides`."""
    values = with_overrides({}, saved, GRPO).model_dump(mode="json")
    config, given = (with_overrides(each, overrides or [], GRPO) for each in (values, {}))
    return [line.partition("=")[0] for line in code_of_run(config, KEYS, given)]


@pytest.mark.deep
def test_what_is_in_the_package_is_not() -> None:
    assert [overrides for overrides in OF_THE_PACKAGE if found(overrides)] == []


@pytest.mark.deep
@pytest.mark.parametrize("key", CODE)
def test_code_is_found_unless_the_command_line_says_the_same(key: str) -> None:
    code = [f"{key}={CODE[key]}"]
    assert (found(code), found(code, code), found([], code)) == ([key], [], [])
    config = with_overrides({}, code, GRPO)
    assert [line.partition("=")[0] for line in code_of_run(config, KEYS)] == [key]


@pytest.mark.parametrize("path", first(PATHS, PATHS[0]))
def test_reward_functions_that_are_not_of_the_package(path: str) -> None:
    assert found([f"{PATH}={path}"]) == [PATH]
    assert found([f"{PATH}={path}"], [f"{PATH}=reward.py"]) == [], "the user's own is asked instead"


@pytest.mark.deep
@pytest.mark.parametrize("text", ARGUMENTS)
def test_what_a_function_of_the_package_is_to_load_or_ask(text: str) -> None:
    saved = [f"{PATH}={SUM}", f"{KWARGS}={text}"]
    assert found(saved) == [KWARGS]
    assert found(saved, [f"{KWARGS}={{}}"]) == [KWARGS], "which adds nothing to it"
    assert found(saved, saved) == []


def test_the_refusal_names_file_values_and_flag() -> None:
    require_trust(Path("run/config.yaml"), [])
    values = [f"{key}={CODE[key]}" for key in (MODEL[0], GIVEN)]
    code = code_of_run(with_overrides({}, values, GRPO), KEYS)
    with refuses(ConfigError, "run/config.yaml", *values, FLAG, "key=value"):
        require_trust(Path("run/config.yaml"), code)
    [escaped] = code_of_run(with_overrides({}, [(PATH, "a\x1b[2Jb.py")], GRPO), REWARD)
    assert escaped == f"{PATH}=a\\x1b[2Jb.py", "it comes from somebody else's file"
    assert found([f"{VLLM}.block_size=32"], [f"{VLLM}.max_num_seqs=4"]) == [GIVEN]
    assert found([f"{VLLM}.block_size=32"], [f"{VLLM}.block_size=16"]) == []
