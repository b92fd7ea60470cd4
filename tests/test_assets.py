"""The built-in model: found by name, loads like any model, and starts where GRPO has something to improve."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo_dist
from grpo_dist.assets import expanded, is_file, is_folder, is_on_the_hub, resolve_model_path
from grpo_dist.cli.trained import find_trained
from grpo_dist.errors import ConfigError
from grpo_dist.main import run_command
from grpo_dist.plan.commands import GRPO
from grpo_dist.plan.model_shape import model_config_at_hand
from grpo_dist.tasks import arithmetic
from grpo_dist.tasks.gsm8k import compute_score
from scripts import make_tiny_model as script
from tests.messages import refuses, says

TINY = Path(resolve_model_path("builtin:tiny-qwen3"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY)


def test_a_model_is_built_in_a_folder_or_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TINY.parent == Path(grpo_dist.__file__).parent / "assets"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model_path("~/no/model") == f"{tmp_path}/no/model"
    assert resolve_model_path("/some/where") == "/some/where"
    assert resolve_model_path(str(tmp_path)) == str(tmp_path)
    on_the_hub = [is_on_the_hub(name) for name in ("Qwen/Qwen3-0.6B", "builtin:tiny-qwen3", str(tmp_path))]
    assert on_the_hub == [True, False, False]


def test_a_revision_of_a_model_on_the_hub(elsewhere: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cached = tmp_path / "hub" / "models--me--sums"
    for revision, commit in {"v1": "a" * 40, "main": "b" * 40}.items():
        shutil.copytree(TINY, cached / "snapshots" / commit)
        (cached / "refs").mkdir(exist_ok=True)
        (cached / "refs" / revision).write_text(commit)
    found = {name: Path(resolve_model_path(f"me/sums{name}")).name[0] for name in ("", "@v1", "@" + "a" * 40)}
    assert found == {"": "b", "@v1": "a", "@" + "a" * 40: "a"}
    assert find_trained("me/sums@v1").folder.name == "a" * 40
    keys = {"actor_rollout_ref.model.path": "me/sums@v1", "actor_rollout_ref.ref.model.path": "me/sums@main"}
    keys |= {"reward_model.enable": "true", "reward_model.model.path": "me/sums@v2"}
    keys |= {"trainer.dry_run": "true", "recipe": "distill"}
    assert run_command(GRPO, [f"{key}={value}" for key, value in keys.items()]) == 2
    told = capsys.readouterr()
    says(told.out, "model: me/sums@v1:", "teacher: me/sums@main:")
    says(told.err, "reward_model.model.path=me/sums@v2:", "revision")
    (tmp_path / "me" / "sums@v1").mkdir(parents=True)
    assert resolve_model_path("me/sums@v1") == "me/sums@v1", "a folder comes first"
    assert model_config_at_hand("Qwen/Qwen3-8B@main") == model_config_at_hand("Qwen/Qwen3-8B")


@pytest.mark.parametrize("name", ["tiny", "", "../assets/tiny-qwen3", "__pycache__", "tiny-qwen3/"])
def test_unknown_builtin_names_list_the_known_ones(name: str) -> None:
    with refuses(ConfigError, f"actor_rollout_ref.model.path=builtin:{name}:", "builtin:tiny-qwen3"):
        resolve_model_path(f"builtin:{name}")


def test_the_folder_is_small_and_complete(model: Any, tokenizer: Any) -> None:
    files = {file.name: file.stat() for file in TINY.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"} <= files.keys()
    assert sum(stat.st_size for stat in files.values()) < 3_000_000
    assert all(stat.st_mode & 0o044 == 0o044 for stat in files.values()), "others cannot read the installed model"
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


def test_special_tokens_chat_template_and_the_script_that_makes_them(tokenizer: Any, tmp_path: Path) -> None:
    assert tokenizer.encode("<|im_start|>7<|im_end|><|endoftext|>") == [1, ord("7") + 3, 2, 0]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.decode([1, ord("7") + 3, 2, 0], skip_special_tokens=True) == "7"
    said = [("system", "Add."), ("user", "345+678=?"), ("assistant", "#### 1023")]
    turns = [{"role": role, "content": content} for role, content in said]
    asked = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n345+678=?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(turns, tokenize=False) == asked + "#### 1023<|im_end|>\n"
    assert tokenizer.apply_chat_template(turns[:2], tokenize=False, add_generation_prompt=True) == asked
    script.make_tokenizer().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes()


def test_the_chat_template_has_tools_in_hermes_form(tokenizer: Any) -> None:
    add = {"name": "add", "parameters": {"properties": {"a": {}, "b": {}}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    turns = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "tool_calls": [call]}]
    turns += [{"role": "tool", "content": "3"}]
    text = tokenizer.apply_chat_template(turns, tools=[{"type": "function", "function": add}], tokenize=False)
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    told = ["system\nTools: add(a, b)", "user\n1+2?", f"assistant\n{written}", "tool\n3"]
    assert text == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in told)


def test_styles_of_the_warm_start_that_holds_questions_out(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert arithmetic.worked_answer(345, 678) == "5+8=13 4+7+1=12 3+6+1=10 #### 1023"
    assert arithmetic.worked_answer(120, 304) == "0+4=4 2+0=2 1+3=4 #### 424"
    direct = [script.direct_response(*numbers) for numbers in ((345, 678), (120, 304), (945, 144))]
    assert direct == ["#### 913", "#### 424", "#### 1089"]
    a, b = script.operands(arithmetic.rows("validation")[0])
    examples, draws = script.Examples(tokenizer), iter([(a, b), (b, a), (345, 678)])
    monkeypatch.setattr(arithmetic, "draw_question", lambda rng: next(draws))
    ids, labels = examples.batch(1, worked=False)
    assert "345+678" in tokenizer.decode(ids[0])
    assert tokenizer.decode(labels[0][labels[0] != script.IGNORED]) == "#### 913<|im_end|>"


@pytest.mark.deep
def test_greedy_is_direct_and_sampling_shows_the_worked_style(model: Any, tokenizer: Any) -> None:
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


@pytest.mark.parametrize("path", ["x" * 5000, "a\x00b", "\ud800", "~no_such_user_here/x", "/" * 5000 + "gone"])
def test_what_can_be_looked_at_and_what_cannot(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (is_file(tmp_path / "file"), is_file("~/file"), is_file(tmp_path)) == (True, True, False)
    assert (is_folder(str(tmp_path)), is_folder("~/file")) == (True, False)
    assert [expanded(each) for each in ("~/file", "file")] == [tmp_path / "file", Path("file")]
    assert (is_file(path), is_folder(path)) == (False, False)

    def refuse(path: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.stat", refuse)
    assert (is_file("/root/x"), is_folder("/root")) == (False, False)
