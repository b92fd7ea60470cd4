"""The built-in model: found by name, loads like any model, and starts where GRPO has something to improve.

Paths that cannot be looked at are not there; nothing raises.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from grpo_dist.assets import expanded, is_file, is_folder, is_on_the_hub, resolve_model_path
from grpo_dist.errors import ConfigError
from grpo_dist.tasks import arithmetic
from grpo_dist.tasks.gsm8k import compute_score
from tests.messages import refuses

TINY = Path(resolve_model_path("builtin:tiny-qwen3"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[1] / "scripts" / "make_tiny_model.py"
    spec = importlib.util.spec_from_file_location("make_tiny_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY)


def test_builtin_names_resolve_inside_the_package() -> None:
    import grpo_dist

    assert TINY.parent == Path(grpo_dist.__file__).parent / "assets"
    assert (TINY / "model.safetensors").is_file()


def test_a_model_that_is_no_folder_is_on_the_hub(tmp_path: Path) -> None:
    assert is_on_the_hub("Qwen/Qwen3-0.6B")
    assert not is_on_the_hub("builtin:tiny-qwen3")
    assert not is_on_the_hub(str(tmp_path))


def test_folders_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model_path("~/no/model") == f"{tmp_path}/no/model"
    assert resolve_model_path("/some/where") == "/some/where"
    assert resolve_model_path(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("name", ["tiny", "", "../assets/tiny-qwen3", "__pycache__", "tiny-qwen3/"])
def test_unknown_builtin_names_list_the_known_ones(name: str) -> None:
    with refuses(ConfigError, f"actor_rollout_ref.model.path=builtin:{name}:", "builtin:tiny-qwen3"):
        resolve_model_path(f"builtin:{name}")


def test_resolving_imports_nothing_heavy() -> None:
    program = (
        "import sys; from grpo_dist.assets import resolve_model_path as r; r('builtin:tiny-qwen3');"
        "print(sorted({'torch', 'transformers', 'huggingface_hub', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_folder_is_small_and_complete() -> None:
    files = {file.name: file.stat() for file in TINY.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert {"chat_template.jinja", "model.safetensors", "README.md"} <= set(files)
    assert sum(stat.st_size for stat in files.values()) < 3_000_000
    assert all(stat.st_mode & 0o044 == 0o044 for stat in files.values()), "others cannot read the installed model"


def test_config(model: Any, tokenizer: Any) -> None:
    config = json.loads((TINY / "config.json").read_text())
    generation = json.loads((TINY / "generation_config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["head_dim"] == 32  # the smallest that vLLM's CPU attention takes
    assert config["vocab_size"] == len(tokenizer) == 256
    for ids in (config, generation):
        assert (ids["eos_token_id"], ids["pad_token_id"]) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert model.dtype == torch.float32
    assert model.num_parameters() == 476_224
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize(
    "text", ["612", "Grüße, 世界 🙂\n\t\x00", "  two  spaces ", "\ufdff\U0010ffff" + "".join(map(chr, range(0x800)))]
)
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == [byte + 3 for byte in text.encode()]
    assert tokenizer.decode(ids) == text


def test_special_tokens(tokenizer: Any) -> None:
    assert tokenizer.encode("<|im_start|>7<|im_end|><|endoftext|>") == [1, ord("7") + 3, 2, 0]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.decode([1, ord("7") + 3, 2, 0], skip_special_tokens=True) == "7"


def test_chat_template(tokenizer: Any) -> None:
    turns = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "345+678=?"},
        {"role": "assistant", "content": "#### 1023"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert text == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n345+678=?<|im_end|>\n"
        "<|im_start|>assistant\n#### 1023<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(turns[:2], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n345+678=?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_script_makes_the_shipped_tokenizer(script: ModuleType, tmp_path: Path) -> None:
    script.make_tokenizer().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes()


def test_styles_of_the_warm_start(script: ModuleType) -> None:
    assert arithmetic.worked_answer(345, 678) == "5+8=13 4+7+1=12 3+6+1=10 #### 1023"
    assert arithmetic.worked_answer(120, 304) == "0+4=4 2+0=2 1+3=4 #### 424"
    assert script.direct_response(345, 678) == "#### 913"
    assert script.direct_response(120, 304) == "#### 424"
    assert script.direct_response(945, 144) == "#### 1089"


def test_warm_start_holds_the_validation_questions_out(
    script: ModuleType, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = script.operands(arithmetic.rows("validation")[0])
    examples = script.Examples(tokenizer)
    draws = iter([(a, b), (b, a), (345, 678)])
    monkeypatch.setattr(arithmetic, "draw_question", lambda rng: next(draws))
    ids, labels = examples.batch(1, worked=False)
    assert "345+678" in tokenizer.decode(ids[0])
    assert tokenizer.decode(labels[0][labels[0] != script.IGNORED]) == "#### 913<|im_end|>"


def test_greedy_is_direct_and_sampling_shows_the_worked_style(script: ModuleType, model: Any, tokenizer: Any) -> None:
    torch.manual_seed(0)
    rows = arithmetic.rows("validation")
    greedy = script.respond(model, tokenizer, rows, sample=False)
    sampled = script.respond(model, tokenizer, rows, sample=True)

    def score(row: dict[str, Any], text: str) -> float:
        return compute_score("arithmetic", text, row["reward_model"]["ground_truth"], {})["score"]

    assert all(text.startswith("#### ") for text in greedy)
    assert 0.20 <= sum(map(score, rows, greedy)) / len(rows) <= 0.40
    worked = [score(row, text) for row, text in zip(rows, sampled, strict=True) if "=" in text]
    assert 0.15 <= len(worked) / len(rows) <= 0.35  # 0.25 +- 3 standard errors
    assert sum(worked) / len(worked) > 0.8  # 0.94 of 640 worked responses


def test_files_folders_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert is_file(tmp_path / "file")
    assert is_file("~/file")
    assert not is_folder("~/file")
    assert is_folder(str(tmp_path))
    assert not is_file(tmp_path)
    assert expanded("~/file") == tmp_path / "file"
    assert expanded("file") == Path("file")


@pytest.mark.parametrize("path", ["x" * 5000, "a\x00b", "\ud800", "~no_such_user_here/x", "/" * 5000 + "gone"])
def test_what_cannot_be_looked_at(path: str) -> None:
    assert not is_file(path)
    assert not is_folder(path)


def test_a_folder_that_may_not_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.stat", refuse)
    assert not is_file("/root/x")
    assert not is_folder("/root")
