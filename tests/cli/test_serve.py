"""`grpo-dist serve`: who may reach it, and a server from its start to its end."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import Usage, load_tokenizer
from grpo_dist.cli.serve import check_host, ready, split
from grpo_dist.cli.trained import engine_for, find_trained
from grpo_dist.errors import ConfigError
from tests.cli.conftest import Call
from tests.messages import refuses, says
from tests.models import rebuilt_by_transformers
from tests.observed import assert_gone
from tests.processes import open_to_others

TINY = "builtin:tiny-qwen3"
TOKEN = "a-token-of-this-test"
SUM = [{"role": "user", "content": "12+34=?"}]


# --- before anything is started -----------------------------------------------------------------------------------
def test_options_behind_dashes_and_the_ready_line() -> None:
    assert split(["run", "--port", "1"]) == (["run", "--port", "1"], [])
    assert split(["run", "--", "--a", "--", "b"]) == (["run"], ["--a", "--", "b"])
    told = ready("http://127.0.0.1:1", "run step 3", "policy", with_token=True)
    says(told, "run step 3", "http://127.0.0.1:1/v1", "Bearer $VLLM_API_KEY")
    assert "VLLM_API_KEY" not in ready("http://127.0.0.1:1", "run", "policy", with_token=False)


def test_other_machines_may_not_ask_without_a_token(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    for host in ("127.0.0.1", "127.3.2.1", "::1", "localhost"):
        check_host(host, "")
    for host in ("0.0.0.0", "::", "192.0.2.1", "myhost", ""):
        check_host(host, "secret")
        with refuses(ConfigError, f"--host {host}", "VLLM_API_KEY", "--api-key", "127.0.0.1"):
            check_host(host, "")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    says(call("serve", TINY, "--host", "0.0.0.0", code=2).err, "--host 0.0.0.0", "--api-key")


def test_a_port_that_is_taken(call: Call) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        says(call("serve", TINY, "--port", port, code=2).err, f"--port {port}", 0)


def test_more_gpus_than_there_are_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = find_trained(TINY, ["cluster=node8", "actor_rollout_ref.rollout.tensor_model_parallel_size=4"])
    with refuses(ConfigError, "trainer.n_gpus_per_node=0"):  # the build for CPU
        engine_for(model)
    monkeypatch.setattr("grpo_dist.engines.base.build_problem", lambda device: "")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with refuses(ConfigError, "actor_rollout_ref.rollout.tensor_model_parallel_size=4", 2, "trainer.n_gpus_per_node=0"):
        engine_for(model)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert (engine_for(model).device, engine_for(model).rollout.tensor_model_parallel_size) == ("cuda", 4)


def test_heads_that_vllm_does_not_compute_on_cpu_are_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(resolve_model_path(TINY), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 16}))
    with refuses(ConfigError, folder, 16, 32, "trainer.n_gpus_per_node"):
        engine_for(find_trained(str(folder), ["trainer.n_gpus_per_node=0"]))


# --- a server -----------------------------------------------------------------------------------------------------
def greedy(folder: Path, messages: list[dict[str, str]], most: int) -> str:
    import torch
    import transformers

    tokenizer = load_tokenizer(str(folder), trust_remote_code=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**ids, do_sample=False, max_new_tokens=most)
    return str(tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.deep
@pytest.mark.ray  # by itself: a real engine
def test_a_server_from_its_start_to_its_end(tmp_path: Path) -> None:
    rebuilt_by_transformers(folder := tmp_path / "huggingface")
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_tokens": 12, "stop": []}
    Usage(7, "2+2=4", {}, sampling).write(folder)
    command = [sys.executable, "-m", "grpo_dist", "serve", str(folder), "actor_rollout_ref.rollout.dtype=fp32"]
    environment = os.environ | {"VLLM_API_KEY": TOKEN, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, "--port", "0"], env=environment, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            told = "".join(line for _, line in zip(range(3), started.stdout, strict=False))
            found = re.search(r"http://127.0.0.1:\d+", told)
            assert found, told
            says(told, found[0], "policy", "curl", "$VLLM_API_KEY")
            answers_as_the_model(found[0], folder)
            ends_with_all_its_processes(found[0], psutil.Process(started.pid))
        finally:
            started.kill()


def client_of(url: str, token: str = TOKEN) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)


def answers_as_the_model(url: str, folder: Path) -> None:
    client = client_of(url)
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200
    assert [model.id for model in client.models.list()] == ["policy"]
    with_prompt = [{"role": "system", "content": "2+2=4"}, *SUM]
    expected = greedy(folder, with_prompt, 12)
    said: Any = client.chat.completions.create(model="policy", messages=SUM)
    assert said.choices[0].message.content == expected
    own: Any = client.chat.completions.create(model="policy", messages=with_prompt, max_tokens=12)
    assert (own.choices[0].message.content, own.usage.prompt_tokens) == (expected, said.usage.prompt_tokens)

    several: Any = client.chat.completions.create(model="policy", messages=SUM, n=3, temperature=1.0, seed=1)
    assert len({choice.message.content for choice in several.choices}) > 1
    stream = client.chat.completions.create(model="policy", messages=SUM, stream=True)
    parts = [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
    assert "".join(part or "" for part in parts) == expected
    assert len(parts) > 3, "token by token"
    digits = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    forced: Any = client.chat.completions.create(model="policy", messages=SUM, response_format=digits)
    assert isinstance(json.loads(forced.choices[0].message.content), int)

    assert client.responses.create(model="policy", input=SUM[0]["content"]).output_text == expected
    anthropic = {"model": "policy", "max_tokens": 12, "messages": SUM}
    answer = httpx.post(f"{url}/v1/messages", json=anthropic, headers={"x-api-key": TOKEN}, timeout=60).json()
    assert answer["content"][0]["text"] == expected

    with pytest.raises(openai.AuthenticationError):
        client_of(url, "another").models.list()
    assert httpx.get(f"{url}/metrics", timeout=60).status_code == 401


def ends_with_all_its_processes(url: str, process: psutil.Process) -> None:
    assert open_to_others(process) == {}, "loopback alone"
    everyone = {process, *process.children(recursive=True)}
    assert len(everyone) > 1, "vLLM's core is a process"
    open_stream = client_of(url).chat.completions.create(
        model="policy", messages=SUM, stream=True, max_tokens=200, extra_body={"ignore_eos": True}
    )
    next(iter(open_stream))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert_gone(everyone)
