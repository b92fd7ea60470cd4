"""One reward function or a list of them: how they are named, and which namings are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist.config.load import readable_config
from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import load_config
from grpo_dist.plugins.names import WEIGHTED_FUNCTION
from tests.config.read_back import read_back
from tests.config.refusals import broken
from tests.messages import refuses

PATH, NAME, WEIGHTS, KWARGS = (f"custom_reward_function.{key}" for key in ("path", "name", "weights", "reward_kwargs"))


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file rewards.py in the current folder; its absolute path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").touch()
    return f"{tmp_path}/rewards.py"


def load(*overrides: str) -> RunConfig:
    return load_config(list(overrides))[0]


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_one_function(prefix: str, file: str) -> None:
    named = load(f"{PATH}={prefix}rewards.py:correct", f"{KWARGS}={{a: 1}}")
    assert named.reward_code == (f"{file}:correct", "correct", {"a": 1})
    verls = load(f"{PATH}={prefix}rewards.py", f"{NAME}=correct")
    assert verls.reward_code == (file, "correct", {})
    assert load(f"{PATH}=my_package.rewards:correct").reward_code[0] == "my_package.rewards:correct"
    assert load().reward_code == (None, "compute_score", {})


def test_a_list_is_a_weighted_sum(file: str) -> None:
    config = load(f"{PATH}=[rewards.py:correct,pkg.rewards:short,null]", f"{WEIGHTS}=[1,0.5,2]")
    path, name, reward_kwargs = config.reward_code
    assert (path, name) == (WEIGHTED_FUNCTION, "compute_score")
    assert reward_kwargs["functions"] == [
        {"path": f"{file}:correct", "weight": 1.0},
        {"path": "pkg.rewards:short", "weight": 0.5},
        {"path": None, "label": "built_in", "weight": 2.0},
    ]
    assert config.reward_paths == ("rewards.py", "pkg.rewards", None)
    assert config.needs_ground_truth
    again = read_back(readable_config(config))
    assert again.reward_code == config.reward_code


def test_an_entry_may_say_more(file: str) -> None:
    entry = "{path: rewards.py:short, weight: 0.5, label: brief, reward_kwargs: {limit: 9}}"
    functions = load(f"{PATH}=[rewards.py:correct,{entry}]").reward_code.reward_kwargs["functions"]
    more = {"weight": 0.5, "label": "brief", "reward_kwargs": {"limit": 9}}
    assert functions == [{"path": f"{file}:correct"}, {"path": f"{file}:short", **more}]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        broken(f"{PATH}=rewards.py:correct", f"{NAME}=short"),
        broken(f"{WEIGHTS}=[1.0]", also=["path=[...]"], beside=[f"{PATH}=rewards.py"]),
        broken(
            also=[f"{WEIGHTS}=[1.0]", "rewards.py:b"], beside=[f"{PATH}=[rewards.py:a,rewards.py:b]", f"{WEIGHTS}=[1]"]
        ),
        broken(f"{NAME}=a", also=["file.py:function"], beside=[f"{PATH}=[rewards.py]"]),
        broken(
            also=[f"{KWARGS}={{x:1}}", "reward_kwargs: {...}"], beside=[f"{PATH}=[rewards.py:a]", f"{KWARGS}={{x: 1}}"]
        ),
        broken(
            also=[f"{WEIGHTS}=[2.0]", "weights twice"],
            beside=[f"{PATH}=[{{path: rewards.py:a, weight: 1}}]", f"{WEIGHTS}=[2]"],
        ),
        broken(f"{PATH}=[]", also=["1"]),
        broken(also=[f"{PATH}=rewrads.py:", "file"], beside=[f"{PATH}=[rewards.py:a,rewrads.py:b]"]),
        broken(also=[f"{PATH}=rewrads.py:", "file"], beside=[f"{PATH}=rewrads.py:b"]),
        broken(also=[f"{PATH}=1", "text"], beside=[f"{PATH}=[1]"]),
        broken(also=["reward_model.enable=false"], beside=[f"{PATH}=[grpo_dist.rewards.reward_model:compute_score]"]),
    ],
)
def test_namings_that_are_refused(overrides: list[str], parts: list[str]) -> None:
    with refuses(ConfigError, *parts):
        load(*overrides)


def test_a_sampler_is_named_in_the_same_way(file: str) -> None:
    key, name = "data.sampler.class_path", "data.sampler.class_name"
    assert load(f"{key}=rewards.py:Mine").data.sampler.code == ("rewards.py", "Mine")
    assert load(f"{key}=rewards.py", f"{name}=Mine").data.sampler.code == ("rewards.py", "Mine")
    assert load().data.sampler.code is None
    with refuses(ConfigError, f"{key}=rewards.py:Mine", f"{name}=Other"):
        load(f"{key}=rewards.py:Mine", f"{name}=Other")
    with refuses(ConfigError, f"{key}=rewards.py", "file.py:Class"):
        load(f"{key}=rewards.py")
