"""What is wrong with a model of a run, or with code that its config names, is said before anything starts."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from grpo_dist.assets import resolve_model_path
from grpo_dist.checks.all_checks import Machine, problems_of_model
from grpo_dist.checks.models import (
    CheckedModel,
    check_conversations,
    check_files,
    check_teachers,
    check_tokens,
    check_use,
    checked_models,
)
from grpo_dist.checks.own_code import import_reward, own_functions, resolve_names, try_sampler
from grpo_dist.config.load import load_command
from grpo_dist.config.schema import RunConfig
from grpo_dist.data import Prompt, TokenizedPrompt
from grpo_dist.data.sampler import CustomSampler
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.plan.commands import REWARD_MODEL, SFT, load_config
from grpo_dist.trainer.run_prompts import load_run_prompts
from tests.engines.train.plain import told
from tests.messages import refuses, says
from tests.models import another_builtin_model, builtin_reward_model, policy_folder, random_classifier, random_model

PATH, CRITIC, TEACHER = "reward_model.model.path", "critic.model.path", "actor_rollout_ref.ref.model.path"
POLICY, INPUT = "actor_rollout_ref.model.path", "reward_model.model.input_tokenizer"
TINY = "builtin:tiny-qwen3"
KL = "actor_rollout_ref.actor.kl_loss_type=k2"
RUNS = {
    POLICY: ("model", "data=arithmetic"),
    PATH: ("reward model", "reward_model.enable=true"),
    CRITIC: ("critic", "recipe=ppo"),
    TEACHER: ("teacher", "recipe=distill"),
}


def row_of(key: str, config: Any) -> CheckedModel:
    return next(row for row in checked_models(config) if row.model.title == RUNS[key][0])


def check(key: str, path: object, *overrides: str, weights: bool = True) -> str:
    """Check the model under `key` as a run does, and the tokens that it reads; returns what a dry run says of it."""
    config, _ = load_config([RUNS[key][1], f"{key}={path}", *overrides])
    row = row_of(key, config)
    told = check_use(row, model := check_files(row, weights=weights))
    if row.model.reads_tokens:
        check_tokens(config, row, model, policy_folder(config))
    return told


def rewrite(path: object, **changes: Any) -> None:
    file = Path(str(path)) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# --- every model -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("key", RUNS)
def test_a_file_is_missing(key: str, tmp_path: Path, missing: str) -> None:
    made = builtin_reward_model if key in (PATH, CRITIC) else another_builtin_model
    path = Path(made(tmp_path))
    (path / missing).unlink()
    says(told(check, key, path), "DataError", f"{key}={path}", missing.partition(".")[0])


@pytest.mark.parametrize("key", [CRITIC, TEACHER])
def test_other_tokens_than_the_policys_or_none(key: str, tmp_path: Path, random_models: dict[str, str]) -> None:
    path = another_builtin_model(tmp_path)
    transformers.AutoTokenizer.from_pretrained(random_models["tied"]).save_pretrained(path)
    says(told(check, key, path), "ConfigError", f"{key}={path}", f"{POLICY}={TINY}", "tokens")
    Path(path, "tokenizer.json").unlink()
    says(told(check, key, path), "DataError", f"{key}={path}", "tokenizer")


def test_each_teacher_is_checked(tmp_path: Path, random_models: dict[str, str]) -> None:
    other = another_builtin_model(tmp_path)
    config, _ = load_config(["recipe=distill", KL, f"{TEACHER}={{a: {TINY}, b/c: {other}}}"])
    rows = [row for row in checked_models(config) if row.model.reads_tokens]
    named = [(row.model.title, row.settings.path) for row in rows]
    assert named == [("teacher of a", TINY), ("teacher of b/c", other)]
    for row in rows:
        check_tokens(config, row, check_files(row), policy_folder(config))
    transformers.AutoTokenizer.from_pretrained(random_models["tied"]).save_pretrained(other)
    with refuses(ConfigError, f"{TEACHER}={other}", "b/c"):
        check_tokens(config, rows[1], check_files(rows[1]), policy_folder(config))


def test_each_data_source_has_a_teacher_and_a_server_its_headers() -> None:
    rows = [
        TokenizedPrompt(Prompt(i, source, [], None, {}, f"rows.jsonl, line {i + 1}"), np.zeros(1, np.int32))
        for i, source in enumerate(("a", "b/c", "d", "d"))
    ]
    config, _ = load_config(["recipe=distill", KL, f"{TEACHER}={{a: {TINY}, b/c: other}}"])
    check_teachers(config, rows[:2])
    says(told(check_teachers, config, rows), "DataError", TEACHER, 2, "'d'", "rows.jsonl, line 3")
    check_teachers(load_config([])[0], rows)
    endpoint = "actor_rollout_ref.ref.model.endpoint"
    elsewhere = ("recipe=distill", f"{endpoint}.base_url=http://teacher/v1", f"{endpoint}.model=big")
    check_teachers(load_config([*elsewhere])[0], rows)
    with refuses(ConfigError, f"{endpoint}.headers_env=NOWHERE"):
        check_teachers(load_config([*elsewhere, f"{endpoint}.headers_env=NOWHERE"])[0], rows)


@pytest.mark.parametrize("key", [PATH, CRITIC])
def test_a_model_without_a_head_of_one_output(key: str, tmp_path: Path) -> None:
    tiny = transformers.GPT2Config(vocab_size=32, n_positions=256, n_embd=8, n_layer=1, n_head=2)
    transformers.GPT2ForSequenceClassification(tiny).save_pretrained(tmp_path)
    says(told(check, key, tmp_path), "ConfigError", f"{key}={tmp_path}", "model_type=gpt2")
    rewrite(two := random_classifier(tmp_path / "two", num_labels=2), max_position_embeddings=512)
    says(told(check, key, two), "ConfigError", f"{key}={two}", "score.weight has 2 outputs")


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(("key", "remedy"), [(POLICY, "causal LM"), (TEACHER, PATH)])
def test_a_classifier_where_a_causal_model_is_needed(key: str, remedy: str, tmp_path: Path, weights: bool) -> None:
    """By its weights, and where these are not downloaded by its config.json."""
    path = builtin_reward_model(tmp_path, template=None)
    says(told(check, key, path, weights=weights), "ConfigError", f"{key}={path}", "classifier", remedy)


@pytest.mark.parametrize("key", [POLICY, TEACHER])
def test_code_that_comes_with_it_is_not_run_unless_it_is_trusted(key: str, tmp_path: Path) -> None:
    path = another_builtin_model(tmp_path)
    rewrite(path, model_type="mine", auto_map={"AutoConfig": "mine.Config"})
    says(told(check, key, path), "DataError", f"{key}={path}", f"{key.removesuffix('path')}trust_remote_code=true")


def test_a_model_in_a_few_words_and_its_head(tmp_path: Path) -> None:
    def trained(command: Any, path: object = TINY, *, weights: bool = True) -> str:
        (row,) = checked_models(load_command([f"model.path={path}", "data.max_length=64"], command)[0])
        return check_use(row, check_files(row, weights=weights))

    classifier, two = builtin_reward_model(tmp_path / "one"), random_classifier(tmp_path / "two", num_labels=2)
    says(trained(SFT), "qwen3", "35 tensors", "1 file")
    says(trained(SFT, weights=False), "qwen3", "downloaded")

    for said in (trained(REWARD_MODEL), check(CRITIC, TINY)):
        says(said, "new head")
    for said in (trained(REWARD_MODEL, classifier), check(CRITIC, classifier)):
        says(said, "its head")
    says(told(trained, SFT, classifier), "ConfigError", f"model.path={classifier}", "score.weight", "causal LM")
    says(told(trained, REWARD_MODEL, two), "ConfigError", f"model.path={two}", "score.weight", "2 outputs")


# --- critic and teacher ------------------------------------------------------------------------------------------
def test_a_teacher_of_any_size_but_with_all_outputs_of_the_policy_and_no_others(tmp_path: Path) -> None:
    """With more layers, another width and an output layer of its own, also with rows of padding behind the tokens."""
    check(TEACHER, TINY)
    check(TEACHER, another_builtin_model(tmp_path / "wide", hidden_size=48, num_hidden_layers=5))
    check(TEACHER, another_builtin_model(tmp_path / "padded", vocab_size=320, tie_word_embeddings=False))
    path = another_builtin_model(tmp_path, vocab_size=250)
    says(told(check, TEACHER, path), "ConfigError", f"{TEACHER}={path}", "below 250", f"{POLICY}={TINY}", "256")
    rewrite(path := another_builtin_model(tmp_path), final_logit_softcapping=30.0)
    with refuses(ConfigError, "kl_loss_type=full", f"{TEACHER}={path}", "final_logit_softcapping", "k2"):
        check(TEACHER, path)
    check(TEACHER, path, KL)


def test_positions_of_a_critic_from_the_hub_are_asked_once_its_config_is_here() -> None:
    longer = "actor_rollout_ref.model.override_config.max_position_embeddings=4096"
    config, _ = load_config(["recipe=ppo", f"{CRITIC}=some/critic", "data.max_prompt_length=600", longer])
    row = row_of(CRITIC, config)
    model = check_files(replace(row, settings=replace(row.settings, path=TINY)))
    (problem,) = problems_of_model(config, row, model, Machine("", None))
    says(problem.text, f"{CRITIC}=some/critic", "512 positions", "data.max_prompt_length=600", "override_config")


# --- sequences that are split over ranks -------------------------------------------------------------------------
ACTOR, REF = (f"actor_rollout_ref.{role}.ulysses_sequence_parallel_size" for role in ("actor", "ref"))
SPLIT_CRITIC = "critic.ulysses_sequence_parallel_size"


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([], []),
        ([f"{ACTOR}=8"], [ACTOR, REF]),
        ([f"{ACTOR}=8", f"{REF}=1"], [ACTOR]),
        ([f"{ACTOR}=8", "actor_rollout_ref.actor.use_kl_loss=false"], [ACTOR]),
        ([f"{ACTOR}=8", "actor_rollout_ref.model.lora_rank=4"], [ACTOR]),
        ([f"{REF}=8"], [REF]),
        ([f"{SPLIT_CRITIC}=8", "recipe=ppo", "cluster.critic_world_size=8"], [SPLIT_CRITIC]),
        ([f"{SPLIT_CRITIC}=8"], []),
    ],
)
def test_the_roles_that_split_and_are_there(overrides: list[str], keys: list[str]) -> None:
    """The built-in model's 4 heads do not split over 8 ranks."""
    split = [row for row in checked_models(load_config(overrides)[0]) if row.settings.sequence_parallel_size > 1]
    assert [row.settings.sequence_parallel_key for row in split] == keys
    for row, key in zip(split, keys, strict=True):
        with refuses(ConfigError, f"{key}=8", f"={TINY}", "4 attention heads", "1 or 2 or 4"):
            check_use(row, check_files(row))


def test_heads_of_a_teacher_are_asked_for_under_its_own_key(tmp_path: Path) -> None:
    path = random_model("Qwen3", tmp_path, num_attention_heads=3, num_key_value_heads=3, head_dim=8)
    config, _ = load_config([f"{ACTOR}=2", f"{TEACHER}={path}"])
    policy, teacher = checked_models(config)
    says(check_use(policy, check_files(policy)), "2 ranks")
    with refuses(ConfigError, f"{REF}=2", f"{TEACHER}={path}", "3 attention heads", "1 or 3"):
        check_use(teacher, check_files(teacher))
    (tmp_path / "config.json").write_text("{}")
    says(told(check_files, teacher), "DataError", path)


# --- reward models -----------------------------------------------------------------------------------------------
NULL = f"{INPUT}=null"


def config(path: object, *overrides: str) -> RunConfig:
    few = ("data.train_max_samples=32", "data.val_files=null", "trainer.val_before_train=false")
    return load_config(["reward_model.enable=true", f"{PATH}={path}", *few, *overrides])[0]


def converse(found: RunConfig) -> None:
    policy, row = policy_folder(found), row_of(PATH, found)
    scorer = check_files(row)
    check_use(row, scorer)
    check_conversations(found, policy, scorer, load_run_prompts(found, policy)[0].train)


def test_a_reward_model_that_fits_and_the_tokenizer_that_reads(tmp_path: Path, random_models: dict[str, str]) -> None:
    path, other = builtin_reward_model(tmp_path), f"{INPUT}={random_models['tied']}"
    assert resolve_model_path(config(path).reward_model.model.input_tokenizer or "") == resolve_model_path(TINY)
    for overrides in ([], [NULL]):
        converse(config(path, *overrides))
    says(told(converse, config(path, f"{INPUT}=nowhere/at/all")), "DataError", f"{INPUT}=nowhere/at/all")
    says(told(converse, config(path, other)), "ConfigError", other, f"{POLICY}={TINY}")
    rewrite(path, num_attention_heads="four")
    says(told(check, PATH, path), "DataError", f"{PATH}={path}", "config.json", "num_attention_heads")


def test_a_causal_model_has_no_head(tmp_path: Path) -> None:
    """In a dry run the weights of a hub model are not downloaded, and config.json says whether it has one."""
    good, bad = builtin_reward_model(tmp_path / "good"), random_model("Qwen3", tmp_path / "bad")
    says(told(check, PATH, bad), "ConfigError", f"{PATH}={bad}", "score.weight")
    says(check(PATH, good, weights=False), "downloaded")
    says(told(check, PATH, bad, weights=False), "ConfigError", f"{PATH}={bad}", "Qwen3ForCausalLM")


def test_no_tokenizer_and_tokens_that_are_not_read_as_they_are(tmp_path: Path, random_models: dict[str, str]) -> None:
    path = random_classifier(tmp_path)  # of 96 tokens
    says(told(converse, config(path)), "DataError", f"{PATH}={path}", "tokenizer.json")
    transformers.AutoTokenizer.from_pretrained(random_models["tied"]).save_pretrained(path)
    says(told(converse, config(path, NULL)), "ConfigError", NULL, f"{PATH}={path}", INPUT)
    converse(config(path))  # rendered again
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model_path(TINY))  # of a larger model
    tokenizer.add_tokens(["zzz"] + [f"z{i}" for i in range(96)])
    tokenizer.chat_template = "z0z95"
    tokenizer.save_pretrained(path)
    last = str(tokenizer.convert_tokens_to_ids("z95"))
    says(told(converse, config(path)), "DataError", f"{PATH}={path}", "vocab_size", last, "96")


PROCESS = "reward_model.process.enable=true"
TOKENS = ("reward_model.process.good='1'", "reward_model.process.bad='0'")


def test_models_that_judge_steps(tmp_path: Path) -> None:
    """A head of two outputs, or a causal LM and the tokens by which it judges."""
    two = random_classifier(tmp_path, "Qwen3", "Token", num_labels=2)
    check(PATH, two, PROCESS)
    three = random_classifier(tmp_path / "three", "Qwen3", "Token", num_labels=3)
    says(told(check, PATH, three, PROCESS), "ConfigError", f"{PATH}={three}", "score.weight has 3 outputs")
    converse(config(TINY, PROCESS, *TOKENS))
    says(told(check, PATH, TINY, PROCESS), "ConfigError", f"{PATH}={TINY}", "score.weight")
    with refuses(ConfigError, f"{PATH}={two}", "score.weight", "reward_model.process.good=null"):
        check(PATH, two, PROCESS, *TOKENS)
    with refuses(ConfigError, "reward_model.process.good='12'", "2 tokens"):
        converse(config(TINY, PROCESS, "reward_model.process.good='12'", TOKENS[1]))


ESTIMATOR, KL_IN_REWARD = "algorithm.adv_estimator", "algorithm.kl_penalty"
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
BY_BASELINES = (
    "b = batch.optional['reward_baselines']; a = batch.on_tokens(batch.scores - b); "
    "return a - batch.need('values', 'values', 'x') * batch.optional['step_mask'], a"
)
BY_WEIGHTS = "assert batch.rollout_is_weights is not None; return batch.weighted(batch.log_probs), {}"


def own(folder: Path, body: str, needs: str = "()") -> str:
    """A function in a file, as the config names it."""
    lines = "\n".join(f"    {line}" for line in body.split("; "))
    file = folder / "mine.py"
    file.write_text(f"import torch\n\n\ndef f(batch, config):\n{lines}\n\n\nf.needs = {needs}\n")
    return f"{file}:f"


def attempt(*overrides: str) -> list[str]:
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
        (KL_IN_REWARD, "return (batch - config).sum(-1)", ["shape (6,)", "(6, 4)"]),
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
        ([f"{ESTIMATOR}=NAME"], BY_BASELINES, "('reward_baselines', 'values', 'step_mask')"),
        ([f"{KL_IN_REWARD}=NAME", "algorithm.use_kl_in_reward=true"], "return (batch - config).abs()", "()"),
        ([f"{KL_LOSS}=NAME"], "return batch - config", "()"),
        ([f"{LOSS}=NAME"], "return -batch.weighted(batch.log_ratio.exp() * batch.advantages), batch.ppo_kl()", "()"),
        ([f"{LOSS}=NAME", "algorithm.rollout_correction.rollout_is=token"], BY_WEIGHTS, "()"),
    ],
)
def test_what_a_run_takes_is_taken(overrides: list[str], body: str, needs: str, tmp_path: Path) -> None:
    name = own(tmp_path, body, needs)
    given = [each.replace("NAME", name) for each in overrides]
    assert attempt(*given) == given[:1]


COMPONENTS = "return batch.optional['reward_components']['right']"  # whose names are the reward function's, not asked


@pytest.mark.parametrize(
    ("overrides", "body", "needs"),
    [
        ([], "raise OSError", "()"),
        ([f"{KL_IN_REWARD}=NAME"], "raise OSError", "()"),
        ([f"{KL_LOSS}=NAME", "actor_rollout_ref.actor.use_kl_loss=false"], "raise OSError", "()"),
        ([f"{ESTIMATOR}=NAME"], COMPONENTS, "('reward_components',)"),
    ],
)
def test_what_is_not_called_is_not_tried(overrides: list[str], body: str, needs: str, tmp_path: Path) -> None:
    assert attempt(*(each.replace("NAME", own(tmp_path, body, needs)) for each in overrides)) == []


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
        ("self.scores.update(scores_by_index)", "raise KeyError(7)", ["update", "KeyError"]),
        ('state["start"]', 'state["begin"]', ["load_state_dict", "begin"]),
    ],
)
def test_a_sampler_chooses_learns_and_goes_back(right: str, wrong: str, parts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SAMPLER.replace(right, wrong))
    config, _ = load_config([f"{N}=3"])
    sampler = CustomSampler(str(file), "Mine", [None] * 6, 2, seed=0)  # type: ignore[list-item]  # any six prompts
    with refuses(DataError, f"{file}:Mine", *parts) if parts else nullcontext():
        try_sampler(config, sampler)
    assert parts or sampler.next_batch().tolist() == [0, 1]


# --- names ----------------------------------------------------------------------------------------------------
AGENT = "actor_rollout_ref.rollout.agent"
LOOP, CALCULATOR = f"{AGENT}.default_agent_loop", EXAMPLES / "calculator" / "calculator.py"
SAMPLERS = f"data.sampler.class_path={EXAMPLES}/curriculum"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ([f"{SAMPLERS}/easiest_first.py", "data.sampler.class_name=HardestFirst"], ["HardestFirst", "'EasiestFirst'"]),
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
    """What else a file may do: tests/fuzz/test_rewards.py."""
    (file := tmp_path / "mine.py").touch()
    config = load_config([f"{REWARD}={file}", "custom_reward_function.name=score"])[0]
    for source, part in (("import os; os._exit(3)", "exit code 3"), ("def scores(*args): return 1", "'score'")):
        file.write_text(source)
        says(told(import_reward, config), "ConfigError", file, part)
    file.write_text(SCORE.replace("compute_score", "score"))
    import_reward(config)


SCORE = "def compute_score(data_source, solution_str, ground_truth, extra_info): raise ValueError"


def test_gdpo_has_components_to_compare(tmp_path: Path) -> None:
    """A reward of several functions has; one that declares none must be told which of its values are meant."""
    (tmp_path / "mine.py").write_text(SCORE)
    functions = f"{{path: {EXAMPLES}/rewards/graded.py}}, {{path: {EXAMPLES}/rewards/xml_tags.py, label: tags}}"
    weighted = (
        f"{REWARD}=grpo_dist.rewards.weighted",
        f"custom_reward_function.reward_kwargs={{functions: [{functions}]}}",
    )
    with refuses(ConfigError, "algorithm.gdpo_reward_keys=null", "grpo_dist.rewards.weighted"):
        import_reward(load_config([f"{ESTIMATOR}=gdpo", f"{REWARD}={tmp_path}/mine.py"])[0])
    import_reward(load_config([f"{ESTIMATOR}=gdpo", *weighted])[0])


def test_where_the_agent_loop_gives_the_reward_a_function_that_is_named_must_count(tmp_path: Path) -> None:
    """Without one, rows need neither a ground truth nor a data source that is known."""
    game = "class Game(AgentLoop):\n    gives_reward = True\n\n    async def run(self, episode): ...\n"
    (tmp_path / "game.py").write_text(f"from grpo_dist.agents import AgentLoop\n\n\n{game}")
    (tmp_path / "mine.py").write_text(SCORE)
    loop, named = f"{LOOP}={tmp_path}/game.py:Game", f"{REWARD}={tmp_path}/mine.py"
    needs = import_reward(load_config([loop])[0])
    assert (needs.asked, needs.ground_truth) == (False, False)
    says(told(import_reward, load_config([loop, named])[0]), "ConfigError", named, f"{AGENT}.reward_function_weight")
    assert import_reward(load_config([loop, named, f"{AGENT}.reward_function_weight=0.5"])[0]).asked
    assert import_reward(load_config([loop, f"{AGENT}.reward_function_weight=0.5"])[0]).ground_truth
