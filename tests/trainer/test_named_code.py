"""Functions and classes that a config names are imported before anything starts."""

from __future__ import annotations

from pathlib import Path

from grpo_dist.config.load import load_config
from grpo_dist.errors import ConfigError
from grpo_dist.trainer.named_code import import_reward, resolve_names
from tests.messages import refuses

EXAMPLE = Path(__file__).parents[2] / "examples" / "curriculum" / "easiest_first.py"
REWARD = "custom_reward_function.path"


def test_a_sampler_class_that_is_not_there() -> None:
    keys = (f"data.sampler.class_path={EXAMPLE}", "data.sampler.class_name=HardestFirst")
    with refuses(ConfigError, "HardestFirst", "'EasiestFirst'"):
        resolve_names(load_config(list(keys))[0])


def test_an_agent_loop_is_imported_and_checked_before_workers_start() -> None:
    file, key = EXAMPLE.parents[1] / "calculator" / "calculator.py", "actor_rollout_ref.rollout.agent"
    resolve_names(load_config([f"{key}.default_agent_loop={file}:Calculator"])[0])
    for overrides, text in (
        ([f"{key}.default_agent_loop={file}:Calculater"], "'Calculator'"),
        ([f"{key}.default_agent_loop={file}:evaluate"], "class"),
        ([f"{key}.default_agent_loop={file}:Calculator", f"{key}.agent_kwargs={{calls: 1}}"], "argument 'calls'"),
    ):
        with refuses(ConfigError, text):
            resolve_names(load_config(overrides)[0])


def test_a_reward_file_is_imported_and_whatever_it_does_is_a_mistake_of_the_config(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    name = (f"{REWARD}={file}", "custom_reward_function.name=score")
    for source, told in (
        ("import nothing_of_the_kind", "nothing_of_the_kind"),
        ("import os; os._exit(3)", "exit code 3"),
        ("def scores(*args): return 1", "'score'"),
    ):
        file.write_text(source)
        with refuses(ConfigError, file, told):
            import_reward(load_config(list(name))[0])
    file.write_text("def score(data_source, solution_str, ground_truth, extra_info): raise ValueError")
    import_reward(load_config(list(name))[0])


def test_where_the_agent_loop_gives_the_reward_a_function_that_is_named_must_count(tmp_path: Path) -> None:
    """Without one, rows need neither a ground truth nor a data source that is known."""
    (tmp_path / "game.py").write_text(
        "from grpo_dist.agents import AgentLoop\n\n\nclass Game(AgentLoop):\n    gives_reward = True\n\n"
        "    async def run(self, episode): ...\n"
    )
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1"
    )
    agent = "actor_rollout_ref.rollout.agent"
    loop, named = f"{agent}.default_agent_loop={tmp_path}/game.py:Game", f"{REWARD}={tmp_path}/mine.py"
    needs = import_reward(load_config([loop])[0])
    assert (needs.asked, needs.ground_truth) == (False, False)
    with refuses(ConfigError, f"{REWARD}={tmp_path}/mine.py", f"{agent}.reward_function_weight"):
        import_reward(load_config([loop, named])[0])
    assert import_reward(load_config([loop, named, f"{agent}.reward_function_weight=0.5"])[0]).asked
    assert import_reward(load_config([loop, f"{agent}.reward_function_weight=0.5"])[0]).ground_truth
