"""One reward function or a list of them: how they are named, and which namings are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist.config.load import readable_config
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.names import WEIGHTED_FUNCTION
from tests.config.read_back import read_back
from tests.messages import refuses
from tests.plan.asked import load, rows

PATH, NAME, WEIGHTS, KWARGS = (f"custom_reward_function.{key}" for key in ("path", "name", "weights", "reward_kwargs"))


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file rewards.py in the current folder; its absolute path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").touch()
    return f"{tmp_path}/rewards.py"


def test_one_function(file: str) -> None:
    for prefix in ("", "file://"):
        named = load(f"{PATH}={prefix}rewards.py:correct", f"{KWARGS}={{a: 1}}")
        assert named.reward_code == (f"{file}:correct", "correct", {"a": 1})
        assert load(f"{PATH}={prefix}rewards.py", f"{NAME}=correct").reward_code == (file, "correct", {})
    assert load(f"{PATH}=my_package.rewards:correct").reward_code[0] == "my_package.rewards:correct"
    assert load().reward_code == (None, "compute_score", {})


def test_a_list_is_a_weighted_sum_and_an_entry_may_say_more(file: str) -> None:
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
    assert read_back(readable_config(config)).reward_code == config.reward_code
    entry = "{path: rewards.py:short, weight: 0.5, label: brief, reward_kwargs: {limit: 9}}"
    functions = load(f"{PATH}=[rewards.py:correct,{entry}]").reward_code.reward_kwargs["functions"]
    more = {"weight": 0.5, "label": "brief", "reward_kwargs": {"limit": 9}}
    assert functions == [{"path": f"{file}:correct"}, {"path": f"{file}:short", **more}]


REFUSED = """
F.path=rewards.py:correct  F.name=short
F.weights=[1.0] | path=[...] | F.path=rewards.py
| F.weights=[1.0]  rewards.py:b | F.path=[rewards.py:a,rewards.py:b]  F.weights=[1]
F.name=a | file.py:function | F.path=[rewards.py]
| F.reward_kwargs={x:1}  reward_kwargs: {...} | F.path=[rewards.py:a]  F.reward_kwargs={x: 1}
| F.weights=[2.0]  weights twice | F.path=[{path: rewards.py:a, weight: 1}]  F.weights=[2]
F.path=[] | 1
| F.path=rewrads.py:  file | F.path=[rewards.py:a,rewrads.py:b]
| F.path=rewrads.py:  file | F.path=rewrads.py:b
| F.path=1  text | F.path=[1]
| reward_model.enable=false | F.path=[grpo_dist.rewards.reward_model:compute_score]
data.sampler.class_path=rewards.py:Mine  data.sampler.class_name=Other
data.sampler.class_path=rewards.py | file.py:Class
""".replace("F.", "custom_reward_function.")


@pytest.mark.parametrize(("run", "parts"), rows(REFUSED))
def test_namings_that_are_refused(run: list[str], parts: list[str]) -> None:
    with refuses(ConfigError, *parts):
        load(*run)


def test_a_sampler_is_named_in_the_same_way() -> None:
    key, name = "data.sampler.class_path", "data.sampler.class_name"
    assert load(f"{key}=rewards.py:Mine").data.sampler.code == ("rewards.py", "Mine")
    assert load(f"{key}=rewards.py", f"{name}=Mine").data.sampler.code == ("rewards.py", "Mine")
    assert load().data.sampler.code is None
