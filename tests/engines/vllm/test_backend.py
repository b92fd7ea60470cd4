"""What the installed torch and vLLM can do: heads on CPU, parsers of tool calls, the build."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_dist.engines import base
from grpo_dist.engines.base import compiler_problem
from grpo_dist.engines.vllm import backend
from grpo_dist.engines.vllm.backend import VLLMBackend, attention_problem, head_sizes
from tests.messages import says


def test_the_sizes_are_those_of_the_installed_build() -> None:
    known = head_sizes("cpu_attn.py")
    assert {32, 64, 96, 128, 256} <= set(known)
    assert not {8, 16, 72} & set(known)
    assert head_sizes("mla/cpu_mla.py") == [512 + 64]
    assert head_sizes("of_another_version.py") == []


def llama_like(model_type: str, **changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2}
    return {"model_type": model_type, **sizes, **changes}


LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
WHOLE_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (llama_like("llama"), 16),
        (llama_like("llama", head_dim=None, hidden_size=288), 72),
        (llama_like("phi3"), 16),
        (llama_like("gemma2", head_dim=16, sliding_window=32), 16),
        ({"model_type": "gemma3", "text_config": llama_like("gemma3_text", head_dim=16)}, 16),
        (llama_like("gpt_oss", head_dim=16, sliding_window=32), 16),
        ({"model_type": "gpt2", "n_embd": 64, "n_head": 4}, 16),
        ({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", "global_head_dim": 48}}, 48),
        (llama_like("deepseek_v3", **LATENT), 16),
    ],
)
def test_heads_of_other_sizes(config: dict[str, Any], size: int) -> None:
    says(attention_problem(config), size, "head_dim", 32, 128)


@pytest.mark.parametrize(
    "config",
    [
        llama_like("llama", head_dim=32),
        llama_like("llama", hidden_size=128),
        llama_like("gemma"),  # whose heads are of 256 where config.json does not say
        llama_like("qwen3"),
        {"model_type": "gemma4"},
        {"model_type": "gpt2"},
        llama_like("deepseek_v3", **WHOLE_LATENT),
        {"model_type": "minicpm3"},  # latents of 288, of which vLLM makes whole keys of 96
        {"model_type": "mamba"},
        {"model_type": "of_its_own", "hidden_size": 64, "num_attention_heads": 4},
    ],
)
def test_what_the_build_computes_or_judges_itself(config: dict[str, Any]) -> None:
    assert attention_problem(config) == ""


def test_sparse_attention_needs_a_gpu() -> None:
    says(attention_problem({"model_type": "deepseek_v32"}), "index_topk", "GPUs")


def test_what_cannot_be_read_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_dist.engines.vllm.backend.find_spec", lambda name: None)
    assert attention_problem(llama_like("llama")) == ""


def test_the_names_are_those_that_vllm_knows() -> None:
    from vllm.tool_parsers import ToolParserManager

    assert VLLMBackend().parser_names() == ToolParserManager.list_registered()


def pretend(monkeypatch: pytest.MonkeyPatch, *, cuda: str | None, vllm: str | None) -> None:
    def version(name: str) -> str:
        if vllm is None:
            raise PackageNotFoundError(name)
        return vllm

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(backend, "version", version)
    monkeypatch.setattr(base, "compiler_problem", lambda: "")  # whatever this machine has


@pytest.mark.parametrize(
    ("device", "cuda", "vllm"),
    [("cpu", None, None), ("cuda", "13.0", "0.32.0"), ("cpu", "13.0", None), ("cpu", "13.0", "0.32.0+cpu")],
)
def test_a_build_that_fits(monkeypatch: pytest.MonkeyPatch, device: str, cuda: str | None, vllm: str | None) -> None:
    pretend(monkeypatch, cuda=cuda, vllm=vllm)
    assert VLLMBackend().needs(device) == ""


def test_gpus_with_the_build_for_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda=None, vllm=None)
    told = VLLMBackend().needs("cuda")
    says(told, torch.__version__, "make setup DEVICE=gpu", "trainer.n_gpus_per_node=0")


def test_cpu_with_the_build_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda="13.0", vllm="0.32.0")
    told = VLLMBackend().needs("cpu")
    says(told, "CUDA 13.0", "cluster=single_gpu", "make setup DEVICE=cpu")


def test_nothing_is_missing_here_or_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gcc").touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(base.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler_problem() == ""
    (tmp_path / "gcc").unlink()
    says(compiler_problem(), "gcc", "CC", "apt-get")
    monkeypatch.setenv("CC", "/opt/cc")
    assert compiler_problem() == ""
    (tmp_path / "Python.h").unlink()
    says(compiler_problem(), f"{tmp_path}/Python.h", "python3-dev")
