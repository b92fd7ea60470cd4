"""Functions and classes that a config names are imported before anything starts, and its own ones tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist.checks.all_checks import check_all
from grpo_dist.checks.own_code import import_reward, own_functions, resolve_names, try_sampler
from grpo_dist.data.sampler import CustomSampler
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.plan.commands import load_config
from tests.messages import refuses

ESTIMATOR, KL = "algorithm.adv_estimator", "algorithm.kl_penalty"
LOSS, KL_LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode", "actor_rollout_ref.actor.kl_loss_type"
N = "actor_rollout_ref.rollout.n"
EXAMPLES = Path(__file__).parents[2] / "examples"
BOUNDS = "algorithm.rollout_correction.rollout_is_threshold"
REWARD = "custom_reward_function.path"
GROUPS_DIFFER = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc")
BY_DEVIATION = (
    "s = batch.scores.reshape(-1, 3); a = (s - s.mean(1, True)) / s.std(1, keepdim=True); "
    "return batch.on_tokens(a.flatten()), batch.on_tokens(a.flatten())"
)


def own(folder: Path, body: str, needs: str = "()") -> str:
    """A function in a file, as the config names it."""
    lines = "\n".join(f"    {line}" for line in body.split("; "))
    file = folder / "mine.py"
    file.write_text(f"import torch\n\n\ndef f(batch, config):\n{lines}\n\n\nf.needs = {needs}\n")
    return f"{file}:f"


def attempt(*overrides: str) -> list[str]:
    """Try what the config names; gives what was tried."""
    tried = []
    for named, call in own_functions(load_config(list(overrides))[0]):
        call()
        tried.append(named)
    return tried


@pytest.mark.parametrize(
    ("key", "body", "parts"),
    [
        (ESTIMATOR, "return batch.scores, batch.scores", ["torch.float64", "(6,)", "(6, 4)", "batch.on_tokens"]),
        (ESTIMATOR, "raise KeyError('gamma')", ["KeyError", "gamma", "mine.py"]),
        (ESTIMATOR, "return batch.need('values', 'values', 'x'), 1", ["values"]),
        (ESTIMATOR, BY_DEVIATION, ["nan", "[3, 0]"]),  # of a group of equal scores
        (KL, "return (batch - config).sum(-1)", ["shape (6,)", "(6, 4)"]),
        (KL_LOSS, "return (batch - config).detach()", ["gradient", "log_probs"]),
        (KL_LOSS, "return batch / 0", ["-inf"]),
        (LOSS, "return batch.advantages, {}", ["gradient", "batch.log_probs"]),
        (LOSS, "return config['clip_range'] * batch.log_probs, {}", ["KeyError", "clip_range"]),
    ],
)
def test_what_would_end_a_run_is_refused_in_its_words(key: str, body: str, parts: list[str], tmp_path: Path) -> None:
    """Two prompts with three responses of up to four tokens."""
    name = own(tmp_path, body)
    with refuses(ConfigError, f"{key}={name}", *parts):
        attempt(f"{key}={name}", f"{N}=3", "algorithm.use_kl_in_reward=true")


@pytest.mark.parametrize(
    ("overrides", "body", "needs"),
    [
        ([f"{ESTIMATOR}=NAME", f"{N}=3", *GROUPS_DIFFER], BY_DEVIATION, "()"),  # such groups do not train
        (
            [f"{ESTIMATOR}=NAME"],
            "b = batch.optional['reward_baselines']; a = batch.on_tokens(batch.scores - b); "
            "return a - batch.need('values', 'values', 'x') * batch.optional['step_mask'], a",
            "('reward_baselines', 'values', 'step_mask')",
        ),
        ([f"{KL}=NAME", "algorithm.use_kl_in_reward=true"], "return (batch - config).abs()", "()"),
        ([f"{KL_LOSS}=NAME"], "return batch - config", "()"),
        ([f"{LOSS}=NAME"], "return -batch.weighted(batch.log_ratio.exp() * batch.advantages), batch.ppo_kl()", "()"),
        (
            [f"{LOSS}=NAME", "algorithm.rollout_correction.rollout_is=token"],
            "assert batch.rollout_is_weights is not None; return batch.weighted(batch.log_probs), {}",
            "()",
        ),
    ],
)
def test_what_a_run_takes_is_taken(overrides: list[str], body: str, needs: str, tmp_path: Path) -> None:
    name = own(tmp_path, body, needs)
    given = [each.replace("NAME", name) for each in overrides]
    assert attempt(*given) == given[:1]


@pytest.mark.parametrize(
    "overrides",
    [[], [f"{KL}=NAME"], [f"{KL_LOSS}=NAME", "actor_rollout_ref.actor.use_kl_loss=false"]],
)
def test_what_is_not_called_is_not_tried(overrides: list[str], tmp_path: Path) -> None:
    assert attempt(*(each.replace("NAME", own(tmp_path, "raise OSError")) for each in overrides)) == []


def test_an_estimator_of_components_is_left_to_the_run(tmp_path: Path) -> None:
    """Their names are the reward function's, which is not asked."""
    name = own(tmp_path, "return batch.optional['reward_components']['right']", "('reward_components',)")
    assert attempt(f"{ESTIMATOR}={name}") == []


@pytest.mark.deep
def test_all_that_is_wrong_is_told_before_ray_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a run as by a dry run."""
    monkeypatch.chdir(tmp_path)
    name, told = own(tmp_path, "return None"), []
    config, _ = load_config([f"{ESTIMATOR}={name}", f"{LOSS}={name}", "data.val_files=null"])
    for dry_run in (True, False):
        with refuses(ConfigError, f"{ESTIMATOR}={name}", f"{LOSS}={name}"):
            check_all(config, told.append, dry_run=dry_run)


SAMPLER = """
class Mine:
    def __init__(self, prompts, batch_size, seed):
        self.start, self.size, self.scores = 0, batch_size, {}

    def next_batch(self):
        self.start += self.size
        return list(range(self.start - self.size, self.start))

    def update(self, scores_by_index):
        assert all(len(scores) == 3 for scores in scores_by_index.values())
        self.scores.update(scores_by_index)

    def state_dict(self):
        return {"start": self.start}

    def load_state_dict(self, state):
        self.start = state["start"]
"""


@pytest.mark.parametrize(
    ("right", "wrong", "parts"),
    [
        ("", "", []),
        ("self.start += self.size", "return None", ["next_batch", "positions"]),
        ("self.scores.update(scores_by_index)", "raise KeyError(7)", ["update", "KeyError"]),
        ('{"start": self.start}', "{1: self.start}", ["state_dict", "JSON"]),
        ('state["start"]', 'state["begin"]', ["load_state_dict", "begin"]),
    ],
)
def test_a_sampler_chooses_learns_and_goes_back(right: str, wrong: str, parts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SAMPLER.replace(right, wrong))
    config, _ = load_config([f"{N}=3"])
    sampler = CustomSampler(str(file), "Mine", [None] * 6, 2, seed=0)  # type: ignore[list-item]  # any six prompts
    if parts:
        with refuses(DataError, f"{file}:Mine", *parts):
            try_sampler(config, sampler)
    else:
        try_sampler(config, sampler)
        assert sampler.next_batch().tolist() == [0, 1]


# --- names ----------------------------------------------------------------------------------------------------
AGENT = "actor_rollout_ref.rollout.agent"
LOOP, CALCULATOR = f"{AGENT}.default_agent_loop", EXAMPLES / "calculator" / "calculator.py"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            [f"data.sampler.class_path={EXAMPLES}/curriculum/easiest_first.py", "data.sampler.class_name=HardestFirst"],
            ["HardestFirst", "'EasiestFirst'"],
        ),
        ([f"{ESTIMATOR}=json:lods"], [f"{ESTIMATOR}=json:lods", "'loads'"]),
        ([f"{LOSS}=gspoo"], ["loss_mode=gspoo", "'gspo'"]),
        ([f"{KL_LOSS}=json:lods"], ["json:lods", "'loads'"]),
        ([f"{BOUNDS}=many"], [f"{BOUNDS}=many", "lower_upper"]),
        ([f"{LOOP}=single_turn_agnt"], ["default_agent_loop=single_turn_agnt", "'single_turn_agent'"]),
        ([f"{LOOP}=grpo_dist.agents:AgentLop"], ["grpo_dist.agents:AgentLop", "'AgentLoop'"]),
        ([f"{LOOP}={CALCULATOR}:evaluate"], ["class"]),
        ([f"{LOOP}={CALCULATOR}:Calculator", f"{AGENT}.agent_kwargs={{calls: 1}}"], ["argument 'calls'"]),
    ],
)
def test_names_are_imported_and_checked_before_workers_start(overrides: list[str], parts: list[str]) -> None:
    with refuses(ConfigError, *parts):
        resolve_names(load_config(overrides)[0])
    resolve_names(load_config([f"{LOOP}={CALCULATOR}:Calculator"])[0])


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


def test_gdpo_has_components_to_compare(tmp_path: Path) -> None:
    """A reward of several functions has; one that declares none must be told which of its values are meant."""
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return 0"
    )
    functions = f"{{path: {EXAMPLES}/rewards/graded.py}}, {{path: {EXAMPLES}/rewards/xml_tags.py, label: tags}}"
    weighted = ("grpo_dist.rewards.weighted", f"custom_reward_function.reward_kwargs={{functions: [{functions}]}}")

    def asked(path: object, *overrides: str) -> None:
        import_reward(load_config(["algorithm.adv_estimator=gdpo", f"{REWARD}={path}", *overrides])[0])

    with refuses(ConfigError, "algorithm.gdpo_reward_keys=null", "grpo_dist.rewards.weighted"):
        asked(tmp_path / "mine.py")
    asked(*weighted)


def test_where_the_agent_loop_gives_the_reward_a_function_that_is_named_must_count(tmp_path: Path) -> None:
    """Without one, rows need neither a ground truth nor a data source that is known."""
    (tmp_path / "game.py").write_text(
        "from grpo_dist.agents import AgentLoop\n\n\nclass Game(AgentLoop):\n    gives_reward = True\n\n"
        "    async def run(self, episode): ...\n"
    )
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1"
    )
    loop, named = f"{LOOP}={tmp_path}/game.py:Game", f"{REWARD}={tmp_path}/mine.py"
    needs = import_reward(load_config([loop])[0])
    assert (needs.asked, needs.ground_truth) == (False, False)
    with refuses(ConfigError, f"{REWARD}={tmp_path}/mine.py", f"{AGENT}.reward_function_weight"):
        import_reward(load_config([loop, named])[0])
    assert import_reward(load_config([loop, named, f"{AGENT}.reward_function_weight=0.5"])[0]).asked
    assert import_reward(load_config([loop, f"{AGENT}.reward_function_weight=0.5"])[0]).ground_truth
