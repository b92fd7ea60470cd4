"""Chat template, length limit, truncation. A byte-level tokenizer makes ids readable: one per byte."""

from dataclasses import replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from grpo_dist.assets import resolve_model_path
from grpo_dist.data import Prompt, load_tokenizer, tokenize_prompts
from grpo_dist.data.prompts import add_system_prompt
from grpo_dist.data.tokenize import check_token_ids, named_rows
from grpo_dist.errors import DataError
from tests.messages import refuses

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ suffix }}"
)


def byte_tokenizer(template: str | None = TEMPLATE, post: str | None = None) -> PreTrainedTokenizerFast:
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if post:
        special = [("<s>", 256), ("</s>", 257)]
        tokenizer.post_processor = processors.TemplateProcessing(single=post, special_tokens=special)
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def built_in() -> Any:
    return load_tokenizer(resolve_model_path("builtin:tiny-qwen3"), trust_remote_code=False)


def prompt(content: str, role: str = "user", index: int = 0) -> Prompt:
    return Prompt(index, "gsm8k", [{"role": role, "content": content}], "2", {}, f"a.jsonl, line {index + 1}")


def tokenize(prompts: list[Prompt], tokenizer: PreTrainedTokenizerFast | None = None, **changes: object):
    settings: dict[str, object] = {"max_prompt_length": 1000, "truncation": "error", "filter_overlong_prompts": False}
    settings |= {"apply_chat_template_kwargs": {}, **changes}
    return tokenize_prompts(prompts, tokenizer or byte_tokenizer(), **settings)  # type: ignore[arg-type]


def texts(tokenized: list, tokenizer: PreTrainedTokenizerFast | None = None) -> list[str]:
    return [(tokenizer or byte_tokenizer()).decode(t.token_ids) for t in tokenized]


def test_template_generation_prompt_and_extra_variables() -> None:
    source = prompt("1+1? é 両")
    tokenized, overlong = tokenize([source], apply_chat_template_kwargs={"suffix": "<think>"})
    assert texts(tokenized) == ["<user>1+1? é 両<assistant><think>"]
    assert tokenized[0].token_ids.dtype == np.int32
    assert tokenized[0].prompt is source
    assert overlong == []
    closing = byte_tokenizer(post="<s> $A </s>")
    tokenized, _ = tokenize([prompt("x")], closing)
    assert texts(tokenized, closing) == ["<user>x<assistant>"], "no special tokens of the tokenizer"


def test_base_model_without_template_joins_contents_and_drops_the_closing_eos() -> None:
    tokenizer = byte_tokenizer(template=None, post="<s> $A </s>")
    source = Prompt(0, "d", [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}], "2", {}, "")
    tokenized, _ = tokenize([source], tokenizer)
    assert texts(tokenized, tokenizer) == ["<s>Add.\n1+1="]
    with refuses(DataError, "data.apply_chat_template_kwargs={'thinking': False, 'api_key': '***'}", "chat template"):
        tokenize([source], tokenizer, apply_chat_template_kwargs={"thinking": False, "api_key": "SECRET123"})


def test_overlong_prompts_are_filtered_or_cut() -> None:
    short, long = prompt("x"), prompt("x" * 50, index=1)
    limit = len("<user>x<assistant>")  # exactly at the limit stays
    tokenized, overlong = tokenize([long, short, long], max_prompt_length=limit, filter_overlong_prompts=True)
    assert [t.prompt for t in tokenized] == [short]
    assert overlong == [long, long]
    with refuses(DataError, "data.max_prompt_length=5", "all 2", "a.jsonl, line 1"):
        tokenize([prompt("x"), prompt("y", index=1)], max_prompt_length=5, filter_overlong_prompts=True)
    tokenizer = byte_tokenizer(template="{{ messages[0].content }}")
    source = [prompt("abcdefgh")]
    for truncation, limit, expected in (
        ("left", 5, "defgh"),
        ("right", 5, "abcde"),
        ("middle", 5, "abfgh"),
        ("middle", 6, "abcfgh"),
        ("middle", 1, "h"),
        ("left", 8, "abcdefgh"),
    ):
        tokenized, overlong = tokenize(source, tokenizer, truncation=truncation, max_prompt_length=limit)
        assert texts(tokenized) == [expected]
        assert overlong == ([] if limit == 8 else source), "what was cut is reported"
    with refuses(DataError, "data.max_prompt_length=5", "a.jsonl, line 3", "8 tokens"):
        tokenize([prompt("x"), prompt("abcdefgh", index=2)], tokenizer, max_prompt_length=5)
    with refuses(DataError, "data.truncation=centre"):
        tokenize(source, tokenizer, max_prompt_length=5, truncation="centre")


def begun(text: str, index: int = 0) -> Prompt:
    asked = prompt("1+1?", index=index)
    return replace(asked, messages=[*asked.messages, {"role": "assistant", "content": text}])


def test_a_begun_turn_is_gone_on_from() -> None:
    """As TRL does: nothing closes it, and no other one is opened."""
    closing = byte_tokenizer("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}")
    found, _ = tokenize([begun("Let me see: ")], closing)
    assert texts(found, closing) == ["<user>1+1?</s>\n<assistant>Let me see: "]
    trimming = byte_tokenizer("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}")
    assert texts(tokenize([begun("Let me see: ")], trimming)[0], trimming) == ["<user>1+1?</s><assistant>Let me see:"]
    base = byte_tokenizer(None)
    assert texts(tokenize([begun("Let me see:")], base)[0], base) == ["1+1?\nLet me see:"]
    deleting = byte_tokenizer("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    with refuses(DataError, "a.jsonl, line 4", "final message"):
        tokenize([begun("Let me see:", index=3)], deleting)


def test_rows_that_a_template_or_a_vocabulary_refuses_are_named() -> None:
    with refuses(DataError, "line 1", "no tokens"):
        tokenize([prompt("x")], byte_tokenizer(template="{{ '' }}"))
    rows = [("a.jsonl, line 1", 24), ("a.jsonl, line 2", 25)]
    check_token_ids(rows, 26, setting="model.path=my/model")
    with refuses(DataError, "model.path=my/model", "a.jsonl, line 2", "token 25", "below 25", "vocab_size"):
        check_token_ids(rows, 25, setting="model.path=my/model")
    assert named_rows(list("abcde")) == "a; b; c; d; e"
    assert named_rows(list("abcdefg")) == "a; b; c; d; e; and 2 more"


SYSTEM_REFUSED = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE


def test_who_is_to_blame_is_named() -> None:
    """The setting without which the row can be rendered, and the row only where it is the row."""
    gemma, rows = byte_tokenizer(SYSTEM_REFUSED), [prompt("x", index=4)]
    added, _ = add_system_prompt(rows, "Be brief.")
    with refuses(DataError, "data.system_prompt='Be brief.'", "TemplateError", "a.jsonl, line 5", "null") as error:
        tokenize(added, gemma)
    assert str(error.value).startswith("data.system_prompt=")
    own = [replace(rows[0], messages=added[0].messages)]
    with refuses(DataError, "a.jsonl, line 5", "TemplateError", "messages") as error:
        tokenize(own, gemma)
    assert "data." not in str(error.value), "neither key is set"

    strict = byte_tokenizer("{% if level %}{{ level + 1 }}{% endif %}" + TEMPLATE)
    with refuses(DataError, "data.apply_chat_template_kwargs={'level': 'x'}", "a.jsonl, line 5"):
        tokenize(rows, strict, apply_chat_template_kwargs={"level": "x"})
    both, _ = add_system_prompt([prompt("x", role="tool")], "Be brief.")
    with refuses(DataError, "a.jsonl, line 1", "tools here", "messages"):
        tokenize(both)
    for broken in ("{% for m in messages %}", "{{ messages[0].parts[0].text }}"):
        with refuses(DataError, "chat template", "a.jsonl, line 5", "another model"):
            tokenize(rows, byte_tokenizer(broken))
