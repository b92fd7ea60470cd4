"""Sessions with the command, which finds before Ray starts what would end a run; each check: the files beside."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.assets import resolve_model_path
from grpo_dist.checks import all_checks
from grpo_dist.checks.all_checks import Machine
from grpo_dist.main import main, reward_model, sft
from grpo_dist.plan.commands import load_config
from grpo_dist.trainer.record import run_lock
from tests.adapters import write_adapter
from tests.messages import says
from tests.tiers import first
from tests.trainer.checkpoints import unverified

TINY = Path(resolve_model_path("builtin:tiny-qwen3"))
PATH, REWARD, RUN_DIR = "actor_rollout_ref.model.path", "custom_reward_function.path", "trainer.default_local_dir"
ACTOR, ROLLOUT, TEACHER = (f"actor_rollout_ref.{each}" for each in ("actor", "rollout", "ref.model.path"))
LENGTHS = ("data=arithmetic", "data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=2", "data.val_files=null")
COUNT = 476_224  # parameters of the built-in model
pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def dry_run(capsys: pytest.CaptureFixture[str]):
    """Runs `... trainer.dry_run=true`; gives the checks that passed and the message."""

    def command(*overrides: str, code: int = 0, main: Any = main) -> tuple[list[str], str]:
        assert main([*overrides, "trainer.dry_run=true"]) == code
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        assert shown.err == "" if code == 0 else shown.err.startswith("\nerror: ")
        checked = shown.out.partition("checked on this machine\n")[2]
        return [line.strip() for line in checked.splitlines()], shown.err

    return command


def rows(*texts: str, **changes: Any) -> str:
    row = {"data_source": "gsm8k", "reward_model": {"ground_truth": "2"}} | changes
    return "".join(json.dumps(row | {"prompt": text}) + "\n" for text in texts)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text(rows("1+1?", "2+2?"))
    return tmp_path / "rows.jsonl"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def change(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def other_tokens(model: Path) -> None:
    words = json.loads((model / "tokenizer.json").read_text())["model"]
    vocab = {text: number + 1000 * (text == "+") for text, number in words["vocab"].items()}
    change(model / "tokenizer.json", model=words | {"vocab": vocab})


# --- what is right is said -------------------------------------------------------------------------------------------
def test_the_built_in_job_is_right(dry_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a critic too, but not with a tracker that cannot start."""
    lines, _ = dry_run("trainer.profile_steps=[2,25,26,40]")
    says(lines, "prompts", 8000, 200)
    says(lines, "steps", 25)
    says(lines, "builtin:tiny-qwen3", "qwen3", "35 tensors", "1 file")
    says(lines, f"{PATH}: built", f"{COUNT:,}")
    says(lines, "trainer.profile_steps", "25 steps", "[26, 40]")
    assert not Path("runs").exists(), "nothing is written"
    lines, _ = dry_run("recipe=ppo", "algorithm.adv_estimator=gae")
    says(lines, "critic.model.path: built", f"{COUNT + 128:,}")
    monkeypatch.setitem(sys.modules, "grpo_dist.tracking.tensorboard", None)
    message = dry_run("trainer.logger=[console,tensorboard]", code=2)[1]
    says(message, "trainer.logger", "'tensorboard'", "package", "remove 'tensorboard'")


def test_own_model_rows_reward_and_names_are_right(dry_run, file: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from grpo_dist.agents import AgentLoop\n"
        "def score(data_source, solution_str, ground_truth, extra_info): raise ValueError\n"
        "def advantage(batch, config): return batch.response_mask, batch.response_mask\n"
        "class Loop(AgentLoop):\n    async def run(self, episode): pass\n"
    )
    mine = (f"{REWARD}=mine.py", "custom_reward_function.name=score", "algorithm.adv_estimator=mine.py:advantage")
    loop = f"{ROLLOUT}.agent.default_agent_loop=mine.py:Loop"
    lines, _ = dry_run(*LENGTHS, f"data.train_files={file}", f"{PATH}={model}", *mine, loop)
    says(lines, "reward: mine.py", "check-env")
    says(lines, f"algorithm.adv_estimator={tmp_path}/mine.py:advantage", "tried")
    says(lines, "prompts", 2, 0)
    assert not any("profile" in line for line in lines)


def test_for_distillation_prompts_are_enough(dry_run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1?"}\n{"prompt": "2+2?"}\n')
    taught = ("recipe=distill", *LENGTHS, "data.train_files=prompts.jsonl")
    lines, _ = dry_run(*taught, f"{TEACHER}={model}")
    says(lines, f"teacher: {model}", "qwen3", "35 tensors")
    says(lines, f"{TEACHER}: built")
    says(lines, "reward: grpo_dist.rewards.optional")
    _, message = dry_run("recipe=distill", f"{ACTOR}.kl_loss_type=k2", f"{TEACHER}={{gsm8k: {model}}}", code=2)
    says(message, TEACHER, "'arithmetic'")
    other_tokens(model)
    _, message = dry_run(*taught, f"{TEACHER}={model}", code=2)
    says(message, f"{TEACHER}={model}", f"{PATH}=builtin:tiny-qwen3", "tokens")


SFT = ("data.train_max_samples=64", "data.val_files=null", "trainer.total_training_steps=1", "trainer.test_freq=-1")
LORA = [
    (main, ("actor_rollout_ref.model.lora_rank=4",), "actor_rollout_ref.model.target_modules"),
    (sft, (*SFT, "model.lora_rank=4"), "model.target_modules"),
]


@pytest.mark.parametrize("row", first(LORA, LORA[0]), ids=["main", "sft"])
def test_factors_of_lora_are_counted_and_refused_before_ray_starts_where_they_do_not_fit(
    dry_run, row: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Of rank 4, of a projection from 128 to 128, in three layers."""
    command, lora, setting = row
    factors = 3 * 4 * (128 + 128)
    says(dry_run(*lora, f"{setting}=[q_proj]", main=command)[0], f"{COUNT + factors:,}", f"{factors:,} of them")
    says(dry_run(*lora, f"{setting}=[query]", code=2, main=command)[1], setting, "query", "all-linear")
    # Without a dry run too; here those of an output layer that is tied to the embedding.
    monkeypatch.setattr("grpo_dist.run.run.prepare", lambda *arguments: pytest.fail("Ray starts"))
    assert command([*lora, f"{setting}=[q_proj,lm_head]"]) == 2
    says(capsys.readouterr().err, setting, "lm_head", "model.embed_tokens", "tie_word_embeddings")
    assert not list(Path().iterdir())


def test_an_adapter_to_go_on_from(dry_run, tmp_path: Path) -> None:
    key = "actor_rollout_ref.model.lora_adapter_path"
    lines, _ = dry_run(f"{key}={write_adapter(tmp_path / 'adapter')}")
    says(lines, "builtin:tiny-qwen3", tmp_path / "adapter", "rank 4", "alpha 8", "4 layers")
    wider = write_adapter(tmp_path / "wider", {"model.layers.0.self_attn.q_proj": (256, 128)})
    _, told = dry_run(f"{key}={wider}", code=2)
    says(told, f"{key}={wider}", "model.layers.0.self_attn.q_proj", "256", "(128, 128)")


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_all_that_is_wrong_or_missing_is_told_at_once(dry_run, tmp_path: Path) -> None:
    names = (f"{REWARD}=pkg.gone", "algorithm.adv_estimator=json:lods", f"{RUN_DIR}=/dev/null/run")
    lines, message = dry_run(*names, "data.train_batch_size=9000", f"{ACTOR}.ppo_mini_batch_size=9000", code=2)
    says(message, "4 problems", "pkg.gone", "'pkg'", "algorithm.adv_estimator=json:lods", "'loads'")
    says(message, f"{RUN_DIR}=/dev/null/run", "written", "data.train_batch_size=9000", "8000 rows", "most 8000")
    says(lines, "model", "builtin:tiny-qwen3")  # what is right is said
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_3")
    models = (f"{PATH}=./gone", f"{TEACHER}={{a: builtin:tiny-qwen3, b: a/b/gone}}", "critic.model.path=builtin:none")
    message = dry_run("recipe=ppo", *models, "data.train_files=gone.parquet", code=2)[1]
    says(message, "4 problems", f"{PATH}=./gone", "folder", Path.cwd(), "a/b/gone", "critic.model.path=builtin:none")
    says(message, "builtin:tiny-qwen3", "data.train_files=gone.parquet")
    says(dry_run(*resume, code=2)[1], f"trainer.resume_from_path={tmp_path}/global_step_3", "folder")
    epz = ("data.max_prompt_length=1", "data.val_files=null", "critic.optim.override_optimizer_config.epz=1")
    message = dry_run("recipe=ppo", *epz, code=2)[1]
    says(message, "2 problems", "critic.optim.override_optimizer_config={epz:1}", "eps")
    says(message, "data.max_prompt_length=1", "8000 prompts", "raise")
    message = dry_run(*LENGTHS, "data.train_files=rows.csv", code=2)[1]
    says(message, "data.train_files=rows.csv", ".parquet, .jsonl or .json")
    mine = (f"model.path={tmp_path}", "data.train_files=gone.jsonl", "data.max_length=64")
    message = dry_run(*mine, code=2, main=sft)[1]
    says(message, "2 problems", f"model.path={tmp_path}", "config.json", "data.train_files=gone.jsonl")


def test_every_row_counts_and_columns_that_would_change_the_task(dry_run, file: Path) -> None:
    """Also the last of many, those that are too long, and without a model: a batch is filled by what is left."""
    train = (*LENGTHS, f"data.train_files={file}")
    file.write_text(rows(*["1+1?"] * 300) + "no JSON\n")
    says(dry_run(*train, code=2)[1], "line 301", "valid JSON")
    file.write_text(rows("1+1?", "2" * 100, "3" * 100))
    says(dry_run(*train, code=2)[1], "data.train_batch_size=2", "1 rows")
    file.write_text(rows("1+1?", "2" * 100, "2+2?"))
    says(dry_run(*train)[0], "1 of 3", "data.max_prompt_length=64")
    file.write_text(rows("1+1?", "2+2?", data_source="unknown"))
    says(dry_run(*train, code=2)[1], "data_source", "'unknown'")
    file.write_text(rows("1+1?", ""))
    message = dry_run(*train, f"{PATH}=nobody/nothing", code=2)[1]
    says(message, "2 problems", "data.train_files", f"{file}, line 2", "prompt", "empty")
    says(message, f"{PATH}=nobody/nothing", "hub")
    file.write_text(rows("1+1?", "2+2?", agent_name="tool_agent", extra_info={"tools_kwargs": {"calc": {"x": 1}}}))
    checked, _ = dry_run(*LENGTHS, f"data.train_files={file}")
    says(checked, "data.train_files", "agent_name=tool_agent", "2 of 2", "rollout.agent.default_agent_loop")
    says(checked, "data.train_files", "extra_info.tools_kwargs", "2 of 2")
    file.write_text(rows("1+1?") + rows("<image> 2+2?", images=[{"path": "1.png"}]))
    says(dry_run(*LENGTHS, f"data.train_files={file}", code=2)[1], "data.train_files", f"{file}, line 2", "images")


def test_a_damaged_model_and_one_that_cannot_be_served(dry_run, file: Path, model: Path) -> None:
    mine = (*LENGTHS, f"data.train_files={file}", f"{PATH}={model}")
    config = (model / "config.json").read_text()
    change(model / "config.json", head_dim=16)
    says(dry_run(*mine, code=2)[1], f"{PATH}={model}", 16, 32, "head_dim", "trainer.n_gpus_per_node")
    (model / "config.json").write_text(config)
    change(model / "config.json", intermediate_size=512)
    says(dry_run(*mine, code=2)[1], f"{PATH}={model}", "(512, 128)")
    (model / "config.json").write_text(config)
    other_tokens(model)
    message = dry_run(*mine, code=2)[1]
    says(message, f"{PATH}={model}", f"{file}, line 1", "token", "tokenizer", "another model")
    (model / "tokenizer.json").write_text("{")
    says(dry_run(*mine, code=2)[1], f"{PATH}={model}", "load", "tokenizer")
    (model / "model.safetensors").write_bytes(b"")
    says(dry_run(*mine, code=2)[1], f"{PATH}={model}", "model.safetensors", "damaged")


def test_a_hub_model_is_checked_by_its_small_files(dry_run, file: Path, model: Path, tmp_path: Path) -> None:
    """As they lie in the hub's cache; weights are left for the run."""
    snapshot = tmp_path / "hub" / "models--some--one" / "snapshots" / "abc"
    shutil.copytree(model, snapshot)
    (snapshot / "model.safetensors").unlink()
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    mine = (*LENGTHS, f"data.train_files={file}", f"{PATH}=some/one")
    says(dry_run(*mine)[0], "some/one", "qwen3", "weights", "downloaded")
    change(snapshot / "config.json", max_position_embeddings=100)
    says(dry_run(*mine, code=2)[1], "128 tokens", "some/one", "100 positions")


def test_memory_that_this_machine_does_not_have(dry_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV cache of 64 MiB is needed for certain, processes of half a GiB each by the estimate."""
    for gib, code in ((0.06, 2), (1.5, 0)):
        monkeypatch.setattr(all_checks, "check_machine", lambda *args, gib=gib: Machine("a small one", None, gib))
        lines, message = dry_run(code=code)
        says(message if code else lines, f"{PATH}=builtin:tiny-qwen3", "CPU memory", f"{gib:g} GiB", "smaller model")


def test_a_run_directory_with_room_that_nobody_uses(dry_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each parameter in fp32, and AdamW's two numbers for it: 12 bytes."""
    key, checkpoint = f"{RUN_DIR}={tmp_path}", f"{12 * COUNT / 2**30:.3g} GiB"
    monkeypatch.setattr(all_checks, "free_bytes", lambda folder: 12 * COUNT)
    says(dry_run(key)[0], "disk", checkpoint)
    monkeypatch.setattr(all_checks, "free_bytes", lambda folder: 12 * COUNT - 1)
    unverified(load_config([key])[0])
    with run_lock(tmp_path):
        held = (tmp_path / "run.lock").read_text()
        message = dry_run(key, code=2)[1]
        assert (tmp_path / "run.lock").read_text() == held
    says(message, "3 problems", key, "another run", "intact checkpoint", checkpoint)


# --- commands that train one model -----------------------------------------------------------------------------------
ONE_MODEL = [(reward_model, "pairs"), (sft, "conversations")]


@pytest.mark.parametrize(("command", "kind"), ONE_MODEL, ids=["reward_model", "sft"])
def test_the_built_in_run_of_one_model_is_right(dry_run, command: Any, kind: str, tmp_path: Path) -> None:
    lines, _ = dry_run("data.train_max_samples=640", "trainer.total_training_steps=10", main=command)
    says(lines, kind, 640, 200)
    says(lines, "training steps", 10)
    says(lines, "builtin:tiny-qwen3", "qwen3", "35 tensors")
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_own_rows_of_one_model(dry_run, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    told = [{"prompt": "1+1?", "chosen": chosen, "rejected": "3"} for chosen in ("2", "20", "2" * 80)]
    file.write_text("".join(json.dumps(row) + "\n" for row in told))
    mine = (f"data.train_files={file}", "data.max_length=64", "data.train_batch_size=2")
    lines, _ = dry_run(*mine, main=reward_model)
    says(lines, "rows", 2, "pairs", 0)
    says(lines, "1 of 3", "data.max_length=64", f"{file}, line 3")
    says(lines, "training steps", 1)
    refused = dry_run(*mine, "data.train_batch_size=3", f"{RUN_DIR}=/dev/null/run", code=2, main=reward_model)[1]
    says(refused, "2 problems", "/dev/null/run", "data.train_batch_size=3", "2 rows")
    other_tokens(model)
    refused = dry_run(*mine, f"model.path={model}", code=2, main=reward_model)[1]
    says(refused, f"model.path={model}", f"{file}, line 1", "token", "vocab_size")
