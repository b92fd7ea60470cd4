"""Token ids and masks of conversations: under chat templates of several kinds, and without one."""

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_dist.data import Prompt, tokenize_prompts
from grpo_dist.data.training_rows import Conversation, TrainingExample
from grpo_dist.data.training_tokens import tokenize_chats
from grpo_dist.errors import DataError
from tests.data.test_tokenize import built_in, byte_tokenizer
from tests.messages import refuses

AT = "a.jsonl, line 1"
# A message each, and the generation prompt, of the kind of ...
KINDS = {
    "Qwen2.5": ("<{{ m.role }}>\n{{ m.content }}</s>\n", "<assistant>\n"),
    "Llama-3": ("<{{ m.role }}>\n\n{{ m.content | trim }}</s>", "<assistant>\n\n"),
    "Mistral": ("{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}", ""),
    "Gemma": ("<{{ m.role }}>{{ m.content }}<end>\n", "<assistant>"),
}
# Reasoning is kept in the last message only.
QWEN3 = (
    "<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}</s>",
    "<assistant>",
)
# The generation prompt opens the reasoning, which rendered messages do not have.
R1 = ("<{{ m.role }}>{{ m.content }}</s>", "<assistant>{% if think != false %}<think>{% endif %}")


def template(message: str, generation_prompt: str, behind: str = "") -> str:
    loop = "{% for m in messages %}" + message + "{% endfor %}"
    return loop + "{% if add_generation_prompt %}" + generation_prompt + "{% else %}" + behind + "{% endif %}"


def tokenizer_of(kind: tuple[str, str], behind: str = "") -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(template(*kind, behind))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    return tokenizer


def chat(*contents: str, first: int = 0, line: int = 1) -> Conversation:
    """The user and the assistant in turn; messages of the assistant are trained from position `first`."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return Conversation(f"a.jsonl, line {line}", messages, tuple(i for i in range(1, len(messages), 2) if i >= first))


def tokenize(rows: list[Conversation], tokenizer: Any, **changes: Any) -> tuple[list[TrainingExample], list]:
    settings = {"max_length": 1000, "apply_chat_template_kwargs": {}, "end_ids": (258,)}
    return tokenize_chats(rows, tokenizer, **(settings | changes))  # type: ignore[arg-type]


def one(row: Conversation, tokenizer: Any, **changes: Any) -> TrainingExample:
    (example,), left_out = tokenize([row], tokenizer, **changes)
    assert left_out == []
    return example


def pieces(example: TrainingExample, tokenizer: Any) -> list[str]:
    """The prompt, and the parts of the response that are trained and not trained in turn."""
    cuts = np.flatnonzero(np.diff(example.marks[0])) + 1
    return [tokenizer.decode(example.prompt), *map(tokenizer.decode, np.split(example.responses[0], cuts))]


def prompt_ids(messages: list[dict[str, Any]], tokenizer: Any, **template_kwargs: Any) -> list[int]:
    prompts = [Prompt(0, "sums", messages, "2", {}, AT)]
    options = {"max_prompt_length": 1000, "truncation": "error", "filter_overlong_prompts": False}
    (found,), _ = tokenize_prompts(prompts, tokenizer, apply_chat_template_kwargs=template_kwargs, **options)  # type: ignore[arg-type]
    return found.token_ids.tolist()


TOKENIZERS = {
    "built in": built_in,
    **{kind: lambda kind=kind: tokenizer_of(KINDS[kind]) for kind in KINDS},
    "Qwen3": lambda: tokenizer_of(QWEN3),
    "Phi-3": lambda: tokenizer_of(KINDS["Gemma"], behind="</s>"),
    "none": lambda: byte_tokenizer(template=None),
    "none, and opened": lambda: byte_tokenizer(template=None, post="<s> $A"),
    "none, opened and closed": lambda: byte_tokenizer(template=None, post="<s> $A </s>"),
}
SAID = {"Mistral": " é 2</s>", "Gemma": "é 2<end>", "Phi-3": "é 2<end>", "Qwen3": "<think></think>é 2</s>"}


@pytest.mark.parametrize("kind", list(TOKENIZERS))
def test_prompt_and_response_are_those_of_a_rollout(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    example = one(chat("1+1=?", "é 2"), tokenizer)
    assert example.prompt.tolist() == prompt_ids(chat("1+1=?").messages, tokenizer)
    said = SAID.get(kind, f"é 2{tokenizer.eos_token}")
    assert example.responses[0].tolist() == tokenizer(said, add_special_tokens=False)["input_ids"]
    assert example.marks[0].tolist() == [1] * len(example.responses[0])
    assert (example.prompt.dtype, example.responses[0].dtype, example.marks[0].dtype) == (np.int32, np.int32, np.int8)
    assert example.num_tokens == len(example.prompt) + len(example.responses[0])


def test_of_several_turns_every_answer_up_to_its_end_is_trained() -> None:
    tokenizer = built_in()
    row = chat("1+1=?", "2", "Sure?", "Yes.", "Oh.")
    start = "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n"
    between = "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    assert pieces(one(row, tokenizer), tokenizer) == [start, "2<|im_end|>", between, "Yes.<|im_end|>"]
    later = one(chat("1+1=?", "2", "Sure?", "Yes.", "Oh.", first=2), tokenizer)
    assert pieces(later, tokenizer) == [start + "2<|im_end|>" + between, "Yes.<|im_end|>"]
    assert later.prompt.tolist() == prompt_ids(row.messages[:3], tokenizer)


@pytest.mark.parametrize("kind", [*KINDS, "Phi-3"])
def test_several_turns_under_templates_of_several_kinds(kind: str) -> None:
    """Phi-3's writes the end of sequence behind the last message, where the response has ended before."""
    tokenizer = TOKENIZERS[kind]()
    example = one(chat("a", "b", "c", "d"), tokenizer)
    _, first, _, second = pieces(example, tokenizer)
    assert [first, second] == [SAID.get(kind, "é 2</s>").replace("é 2", text) for text in "bd"]
    whole = tokenizer.apply_chat_template(chat("a", "b", "c", "d").messages, return_dict=False)
    assert [*example.prompt, *example.responses[0]] == whole[: example.num_tokens]


def test_a_call_without_text_is_trained_where_the_template_has_calls() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    row = Conversation(AT, [{"role": "user", "content": "a"}, call], (1,))
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    tokenizer = tokenizer_of(("<{{ m.role }}>{{ m.content }}" + calls + "</s>", "<assistant>"))
    assert pieces(one(row, tokenizer), tokenizer) == ["<user>a</s><assistant>", 'add{"a": 1}</s>']
    for silent in (tokenizer_of(KINDS["Qwen2.5"]), byte_tokenizer(None)):
        with refuses(DataError, AT, "message 2", "calls"):
            one(row, silent)


def test_with_variables_and_without_a_template() -> None:
    tokenizer = tokenizer_of(R1)
    example = one(chat("a", "b"), tokenizer, apply_chat_template_kwargs={"think": False})
    assert pieces(example, tokenizer) == ["<user>a</s><assistant>", "b</s>"]
    assert example.prompt.tolist() == prompt_ids(chat("a").messages, tokenizer, think=False)
    with refuses(DataError, "data.apply_chat_template_kwargs={'think': False}", "chat template"):
        tokenize([chat("a", "b")], byte_tokenizer(template=None), apply_chat_template_kwargs={"think": False})
    tokenizer = byte_tokenizer(template=None, post="<s> $A </s>")
    shots = chat("1+1=", "2", "2+2=", " 4", first=2)
    assert pieces(one(shots, tokenizer), tokenizer) == ["<s>1+1=\n2\n2+2=", " 4</s>"]
    closed = one(chat("1+1=", "2</s>"), tokenizer)
    assert pieces(closed, tokenizer) == ["<s>1+1=", "2</s>"], "one end, also where the text has one"


# --- tokens across the beginning of a message ------------------------------------------------------------------------
def merging_tokenizer(pre_tokenizer: Any, decoder: Any, merge: tuple[str, str], alphabet: str) -> Any:
    """One token per character, and one for a pair of them."""
    vocab = {token: i for i, token in enumerate([*sorted({*alphabet}), "".join(merge), "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[merge]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def test_a_message_that_a_token_would_join_with_the_prompt() -> None:
    """A policy reads the prompt alone, so the newline at its end is a token of its own."""
    alphabet = "".join(pre_tokenizers.ByteLevel.alphabet())
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = merging_tokenizer(pre_tokenizer, decoders.ByteLevel(), ("Ċ", "Ċ"), alphabet)
    tokenizer.chat_template = template(*KINDS["Qwen2.5"])
    (joined,) = tokenizer("\n\n")["input_ids"]
    for text in ("2", "\n2", "\n\n2"):
        row = chat("1", text, "2", "3\n\n3")
        example = one(row, tokenizer, end_ids=())
        assert example.prompt.tolist() == prompt_ids(row.messages[:1], tokenizer)
        written = (f"{text}</s>", "\n<user>\n2</s>\n<assistant>\n", "3\n\n3</s>")
        said = tokenizer(list(written))["input_ids"]
        assert example.responses[0].tolist() == [*said[0], *said[1], *said[2]]
        assert example.marks[0].tolist() == [1] * len(said[0]) + [0] * len(said[1]) + [1] * len(said[2])
        assert (joined in said[0]) == (text == "\n\n2")


def test_a_tokenizer_that_opens_every_text_with_a_space() -> None:
    """It cannot make tokens of a piece alone, and need not where no token lies across the cut."""
    space: Any = {"prepend_scheme": "first"}
    pre_tokenizer, decoder = pre_tokenizers.Metaspace(**space), decoders.Metaspace(**space)
    tokenizer = merging_tokenizer(pre_tokenizer, decoder, ("▁", "2"), "▁12AQ:")
    message = "{% if m.role == 'user' %}Q:{{ m.content }}{% else %}A: {{ m.content }}</s>{% endif %}"
    tokenizer.chat_template = template(message, "A:")
    example = one(chat("1", "2"), tokenizer, end_ids=())
    assert tokenizer.convert_ids_to_tokens(example.prompt.tolist()) == ["▁", "Q", ":", "1", "A", ":"]
    assert tokenizer.convert_ids_to_tokens(example.responses[0].tolist()) == ["▁2", "</s>"]
    tokenizer.chat_template = template(message, "A: ")
    with refuses(DataError, AT, "'2</s>'"):
        tokenize([chat("1", "2")], tokenizer, end_ids=())


# --- what is refused -------------------------------------------------------------------------------------------------
def test_what_cannot_be_trained_is_named_by_its_row() -> None:
    rewritten = tokenizer_of(QWEN3)
    for dropping in (rewritten, byte_tokenizer(None)):
        with refuses(DataError, AT, "message 2", "prompt and completion"):
            tokenize([chat("a", "b", "c", "d")], dropping)
    last = one(chat("a", "b", "c", "d", first=2), rewritten)
    assert pieces(last, rewritten) == ["<user>a</s><assistant>b</s><user>c</s><assistant>", "<think></think>d</s>"]
    with refuses(DataError, AT, "message 2", "data.apply_chat_template_kwargs", "<think>"):
        tokenize([chat("a", "b")], tokenizer_of(R1))
    with refuses(DataError, AT, "message 2", "</s>", "<end>", "generation_config.json", "eos_token_id"):
        tokenize([chat("a", "b")], tokenizer_of(("<{{ m.role }}>{{ m.content }}", "<assistant>")))
    with refuses(DataError, AT, "message 4", "</s>", " c"):
        tokenize([chat("a", "b", "a", "b</s> c")], tokenizer_of(KINDS["Qwen2.5"]))
    with refuses(DataError, AT, "chat template", "data.apply_chat_template_kwargs={'think': 1}"):
        row = Conversation(AT, [{"role": "tool", "content": "x"}, *chat("a", "b").messages], (2,))
        tokenize([row], byte_tokenizer(), apply_chat_template_kwargs={"think": 1})
    with refuses(DataError, AT, "prompt"):
        tokenize([chat("a", "b")], tokenizer_of(("{% if m.role != 'user' %}{{ m.content }}</s>{% endif %}", "")))
    nameless = byte_tokenizer(template=None)
    nameless.eos_token = None
    with refuses(DataError, "tokenizer_config.json", "eos_token"):
        tokenize([chat("a", "b")], nameless)


def test_long_rows_are_left_out_whole_and_returned() -> None:
    tokenizer = tokenizer_of(KINDS["Gemma"])
    rows = [chat("a", "b"), chat("a", "b" * 99, line=2), chat("a", "c")]
    length = len("<user>a") + 1 + len("\n<assistant>") + len("b") + 1
    examples, left_out = tokenize(rows, tokenizer, max_length=length)
    assert [example.num_tokens for example in examples] == [length, length]
    assert left_out == rows[1:2]
