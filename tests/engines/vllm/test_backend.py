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
from grpo_dist.engines.vllm.backend import VLLMBackend, attention_problem
from tests.messages import says


def llama_like(model_type: str, **changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2}
    return {"model_type": model_type, **sizes, **changes}


LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
WHOLE_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 8}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (llama_like("llama"), 16),
        (llama_like("llama", head_dim=None, hidden_size=288), 72),
        (llama_like("gemma2", head_dim=16, sliding_window=32), 16),
        ({"model_type": "gemma3", "text_config": llama_like("gemma3_text", head_dim=16)}, 16),
        ({"model_type": "gpt2", "n_embd": 64, "n_head": 4}, 16),
        ({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", "global_head_dim": 48}}, 48),
        (llama_like("deepseek_v3", **LATENT), 16),
        # what the build computes, or judges itself
        (llama_like("llama", head_dim=32), None),
        (llama_like("gemma"), None),  # whose heads are of 256 where config.json does not say
        (llama_like("qwen3"), None),
        (llama_like("deepseek_v3", **WHOLE_LATENT), None),
        ({"model_type": "minicpm3"}, None),  # latents of 288, of which vLLM makes whole keys of 96
        ({"model_type": "mamba"}, None),
        ({"model_type": "of_its_own", "hidden_size": 64, "num_attention_heads": 4}, None),
    ],
)
def test_heads_of_other_sizes_are_refused(
    config: dict[str, Any], size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if size is None:
        assert attention_problem(config) == ""
    else:
        says(attention_problem(config), size, "head_dim", 32, 128)
        monkeypatch.setattr("grpo_dist.engines.vllm.backend.find_spec", lambda name: None)
        assert attention_problem(config) == "", "what cannot be read refuses nothing"


def test_sparse_attention_needs_a_gpu_and_gated_delta_nets_bf16() -> None:
    says(attention_problem({"model_type": "deepseek_v32"}), "index_topk", "GPUs")
    problem = VLLMBackend().model_problem({"linear_key_head_dim": 64}, "cpu", "float32")
    says(problem, "rollout.dtype=float32", "bfloat16")


def test_the_names_are_those_that_vllm_knows() -> None:
    from vllm.tool_parsers import ToolParserManager

    assert VLLMBackend().parser_names() == ToolParserManager.list_registered()


@pytest.mark.parametrize(
    ("device", "cuda", "vllm", "told"),
    [
        ("cpu", None, None, []),
        ("cuda", "13.0", "0.32.0", []),
        ("cpu", "13.0", None, []),
        ("cpu", "13.0", "0.32.0+cpu", []),
        ("cuda", None, None, [torch.__version__, "make setup DEVICE=gpu", "trainer.n_gpus_per_node=0"]),
        ("cpu", "13.0", "0.32.0", ["CUDA 13.0", "cluster=single_gpu", "make setup DEVICE=cpu"]),
    ],
)
def test_the_build_is_one_for_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str, cuda: str | None, vllm: str | None, told: list[str]
) -> None:
    def version(name: str) -> str:
        if vllm is None:
            raise PackageNotFoundError(name)
        return vllm

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(backend, "version", version)
    monkeypatch.setattr(base, "compiler_problem", lambda: "")  # whatever this machine has
    found = VLLMBackend().needs(device)
    assert bool(found) == bool(told)
    if told:
        says(found, *told)


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
