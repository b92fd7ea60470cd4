"""What the installed torch and vLLM can do: heads on CPU, parsers of tool calls, the build."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_dist.agents import ToolAgent
from grpo_dist.engines.base import ToolCall
from grpo_dist.engines.vllm import installed
from grpo_dist.engines.vllm.installed import attention_problem, build_problem, head_sizes, parser_names, vllm_parser
from grpo_dist.errors import ConfigError
from tests.agents.speaking import MESSAGES, TOOLS, Speaker, call, parts, play, tokenizer_of
from tests.messages import refuses, says


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
    monkeypatch.setattr("grpo_dist.engines.vllm.installed.find_spec", lambda name: None)
    assert attention_problem(llama_like("llama")) == ""


KEY = "tool_parser"
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
XML = """<tool_call>
<function=add>
<parameter=a>
2
</parameter>
<parameter=b>
3
</parameter>
</function>
</tool_call>"""


def parsed(name: str, text: str) -> list[tuple[str, Any]]:
    tokenizer = tokenizer_of()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])  # which Qwen's tokenizers have
    found = vllm_parser(name, tokenizer, SCHEMAS, key=KEY)(text)
    return [(each.name, json.loads(each.arguments)) for each in found]


def test_the_names_are_those_that_vllm_knows() -> None:
    from vllm.tool_parsers import ToolParserManager

    assert parser_names() == ToolParserManager.list_registered()


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("hermes", "It is 5.", []),
        ("hermes", "So:\n" + call("add", '{"a": 2, "b": 3}') * 2, [("add", {"a": 2, "b": 3})] * 2),
        ("hermes", "<tool_call>\nadd(2, 3)\n</tool_call>", []),
        ("qwen3_xml", f"<think>\nI add.\n</think>\n\n{XML}", [("add", {"a": 2, "b": 3})]),
        ("qwen3_xml", "It is 5.", []),
        ("pythonic", "[add(a=2, b=3), add(a=4, b=5)]", [("add", {"a": 2, "b": 3}), ("add", {"a": 4, "b": 5})]),
    ],
)
def test_calls_are_found(name: str, text: str, found: list[tuple[str, Any]]) -> None:
    assert parsed(name, text) == found


def test_a_parser_does_not_remember_the_turn_before() -> None:
    parse = vllm_parser("hermes", tokenizer_of(), SCHEMAS, key=KEY)
    for _ in range(2):
        assert parse(call("add", '{"a": 2}')) == [ToolCall("add", '{"a": 2}')]
        assert list(parse("5")) == []


@pytest.mark.parametrize("name", ["hermess", "llama3_json"])
def test_a_parser_that_is_not_there_or_needs_other_tokens(name: str) -> None:
    with refuses(ConfigError, f"{KEY}={name}"):
        vllm_parser(name, tokenizer_of(), SCHEMAS, key=KEY)


def test_an_episode_in_hermes_form_is_the_conversation_that_qwen3_renders(tmp_path: Path) -> None:
    """Two calls at once, a call that cannot be read, one of a tool that is not there, and the answer."""
    (tmp_path / "mine.py").write_text(TOOLS)
    kwargs = {"tools": [f"{tmp_path}/mine.py:add", f"{tmp_path}/mine.py:divide"], "tool_parser": "hermes"}
    two = [("add", {"a": 2, "b": 3}), ("divide", {"a": 1, "b": 0})]
    said = ["\n".join(call(name, json.dumps(given)) for name, given in two), "<tool_call>\nadd\n</tool_call>"]
    said += [call("sum", "{}"), "<think>\nSo it is.\n</think>\n\n5"]
    tokenizer, variables = tokenizer_of(), dict(ToolAgent.template_kwargs(kwargs))
    episode = play(ToolAgent(**kwargs), Speaker(tokenizer, *said), variables)
    assert [text for mask, text in parts(episode) if mask] == [f"{text}<|im_end|>" for text in said]
    told = [text for mask, text in parts(episode) if not mask]
    errors = [each.split("\n<tool_response>\n")[-1].partition("\n</tool_response>")[0] for each in told]
    assert [text.partition(":")[0] for text in errors] == ["Error"] * 3
    assert episode.metrics == {"tool_calls": 4, "tool_errors": 3}
    whole: list[dict[str, Any]] = [*MESSAGES]
    functions = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in two]
    whole += [{"role": "assistant", "content": "", "tool_calls": functions}]
    whole += [{"role": "tool", "content": "5"}, {"role": "tool", "content": errors[0]}]
    for text, error in zip(said[1:], [*errors[1:], None], strict=True):
        whole += [{"role": "assistant", "content": text}, *([{"role": "tool", "content": error}] if error else [])]
    rendered = tokenizer.apply_chat_template(whole, tokenize=False, **variables)
    assert tokenizer.decode(episode.prompt_ids + episode.token_ids) + "\n" == rendered


def pretend(monkeypatch: pytest.MonkeyPatch, *, cuda: str | None, vllm: str | None) -> None:
    def version(name: str) -> str:
        if vllm is None:
            raise PackageNotFoundError(name)
        return vllm

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(installed, "version", version)


@pytest.mark.parametrize(
    ("device", "cuda", "vllm"),
    [("cpu", None, None), ("cuda", "13.0", "0.32.0"), ("cpu", "13.0", None), ("cpu", "13.0", "0.32.0+cpu")],
)
def test_a_build_that_fits(monkeypatch: pytest.MonkeyPatch, device: str, cuda: str | None, vllm: str | None) -> None:
    pretend(monkeypatch, cuda=cuda, vllm=vllm)
    assert build_problem(device) == ""


def test_gpus_with_the_build_for_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda=None, vllm=None)
    told = build_problem("cuda")
    says(told, torch.__version__, "make setup DEVICE=gpu", "trainer.n_gpus_per_node=0")


def test_cpu_with_the_build_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda="13.0", vllm="0.32.0")
    told = build_problem("cpu")
    says(told, "CUDA 13.0", "cluster=single_gpu", "make setup DEVICE=cpu")
