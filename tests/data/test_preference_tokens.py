"""Token ids and labels of preference data: with the built-in chat template, with another one, and without."""

from typing import Any

import numpy as np
import pytest

from grpo_dist.data.conversations import ConversationRenderer, without_padding
from grpo_dist.data.step_tokens import StepForm, StepRenderer
from grpo_dist.data.training_rows import LabelledSteps, Pair, TrainingExample, training_batch
from grpo_dist.data.training_tokens import label_answer, tokenize_preferences
from grpo_dist.errors import DataError
from tests.data.test_tokenize import built_in, byte_tokenizer
from tests.messages import refuses


def message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def pair(prompt: str = "1+1=?", chosen: str = "2", rejected: str = "3", line: int = 1) -> Pair:
    answers = [[message("assistant", text)] for text in (chosen, rejected)]
    return Pair(f"a.jsonl, line {line}", [message("user", prompt)], *answers)


def steps(*texts: str, labels: list[bool] | None = None) -> LabelledSteps:
    return LabelledSteps("a.jsonl, line 1", [message("user", "1+1=?")], list(texts), labels or [True] * len(texts))


def tokenize(rows: list[Any], tokenizer: Any, **changes: Any) -> tuple[list[TrainingExample], list[Any]]:
    plain = {"max_length": 100, "padding_id": None, "form": StepForm()}
    return tokenize_preferences(rows, tokenizer, **(plain | changes))


def texts(example: TrainingExample, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(ids) for ids in (example.prompt, *example.responses)]


def test_the_prompt_of_a_pair_is_what_its_conversations_have_in_common() -> None:
    tokenizer = built_in()
    (example,), left_out = tokenize([pair(chosen="20", rejected="21")], tokenizer)
    assert left_out == []
    start = "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n"
    assert texts(example, tokenizer) == [start + "2", "0<|im_end|>\n", "1<|im_end|>\n"]
    assert [row.tolist() for row in example.marks] == [[-1, -1, 1], [-1, -1, 0]]
    assert {ids.dtype for ids in (example.prompt, *example.responses)} == {np.dtype(np.int32)}
    whole = [message("user", "1+1=?"), message("assistant", "20")]
    expected = tokenizer.apply_chat_template(whole, tokenize=True, return_dict=False)
    assert [*example.prompt, *example.responses[0]] == expected


def test_a_base_model_gets_texts_and_one_end_and_no_empty_response() -> None:
    for post, begin in ((None, ""), ("<s> $A </s>", "<s>")):
        tokenizer = byte_tokenizer(template=None, post=post)
        (example,), _ = tokenize([pair("1+1=", "2", "22")], tokenizer)
        assert texts(example, tokenizer) == [f"{begin}1+1=2", "</s>", "2</s>"]
    (example,), _ = tokenize([steps("é", "両", labels=[False, True])], tokenizer)
    assert texts(example, tokenizer) == ["<s>1+1=?", "é\n両</s>"]
    assert example.marks[0].tolist() == [-1, -1, 0, -1, -1, -1, 1], "characters of several tokens"
    tokenizer = byte_tokenizer(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    (example,), _ = tokenize([pair("a", "bc", "bcd")], tokenizer)
    assert texts(example, tokenizer) == ["ab", "c", "cd"]


def test_long_pairs_are_left_out_whole_and_returned() -> None:
    tokenizer = byte_tokenizer()
    long = pair(rejected="x" * 80, line=2)
    length = len("<user>1+1=?<assistant>2")
    examples, left_out = tokenize([pair(), long, pair()], tokenizer, max_length=length)
    assert [len(example.prompt) + 1 for example in examples] == [length, length]
    assert left_out == [long]
    with refuses(DataError, "data.max_length=20", "all 2", "a.jsonl, line 1"):
        tokenize([pair(), long], tokenizer, max_length=20)


def test_labels_are_where_steps_are_complete_in_their_own_text() -> None:
    """At the token that completes the separator; of the last step at the end of the conversation."""
    tokenizer = built_in()
    row = steps("1+1=2\n", "2*2=5", "7", labels=[True, False, True])
    (example,), _ = tokenize([row], tokenizer)
    start, answer = "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n", "1+1=2\n2*2=5\n7<|im_end|>\n"
    assert texts(example, tokenizer) == [start, answer]
    (labels,) = example.marks
    judged = [(tokenizer.decode(example.responses[0][: i + 1]), labels[i]) for i in np.flatnonzero(labels >= 0)]
    assert judged == [("1+1=2\n", 1), ("1+1=2\n2*2=5\n", 0), (answer, 1)]
    # Qwen3's, for example, leaves out what is thought before the answer.
    tokenizer = byte_tokenizer("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}")
    (example,), _ = tokenize([steps("a", "b ", labels=[True, False])], tokenizer)
    assert texts(example, tokenizer) == ["<user>1+1=?<assistant>", "a\nb "]
    assert example.marks[0].tolist() == [-1, 1, -1, 0]


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
CLOSED = TURNS + "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
OTHER, END = 256, 257  # <s>, and </s>: the end of sequence


@pytest.mark.parametrize(
    ("template", "padding", "judged_at"),
    [
        (CLOSED, None, "</s>"),
        (CLOSED, END, "2"),
        (CLOSED, OTHER, "</s>"),
        (CLOSED.replace("</s>", "</s></s>"), END, "2"),
        (CLOSED.replace("</s>", "</s>\n"), None, "\n"),
        (CLOSED.replace("</s>", "</s>\n"), END, "\n"),
        (TURNS + "{% endfor %}", None, "2"),
        (TURNS + "{% endfor %}", END, "2"),
        (None, None, "</s>"),
        (None, END, "2"),
        (None, OTHER, "</s>"),
    ],
)
def test_label_and_score_are_at_the_same_token(template: str | None, padding: int | None, judged_at: str) -> None:
    tokenizer = byte_tokenizer(template)
    row, messages = steps("1 2"), [message("user", "1+1=?")]
    opened = "1+1=?" if template is None else "<user>1+1=?<assistant>"
    response = [*tokenizer("1 2")["input_ids"], END]
    rendered = ConversationRenderer(tokenizer, "key=path", tokenizer)(messages, [], response)
    closed = ConversationRenderer(tokenizer, "key=path")(messages, tokenizer(opened)["input_ids"], response)
    cut = ConversationRenderer(tokenizer, "key=path")(messages, tokenizer(opened)["input_ids"], response[:-1])
    assert rendered == closed == cut, "whether or not it has ended by itself"
    scored = without_padding(rendered, padding)
    assert tokenizer.decode(scored[-1:]) == judged_at
    (one,), _ = tokenize([row], tokenizer, padding_id=padding)
    (several, _), _ = tokenize([row, steps("a", "b")], tokenizer, padding_id=padding)
    (chosen,), _ = tokenize([pair(chosen="1 2", rejected="1 3 2")], tokenizer, padding_id=padding)
    for example in (label_answer(row, tokenizer, padding_id=padding, form=None), one, several, chosen):
        (place,) = np.flatnonzero(example.marks[0] == 1)
        assert [*example.prompt, *example.responses[0][: place + 1]] == scored
        last = np.flatnonzero(example.marks[-1] >= 0)[-1]
        assert tokenizer.decode(example.responses[-1][last]) == judged_at
    judge = StepRenderer(tokenizer, "key=path", StepForm(), padding, tokenizer)
    for text in ("1\n2", ""):
        found, _ = judge(messages, [*tokenizer(text)["input_ids"], END])
        assert found.token_ids[: found.ends[-1] + 1].tolist() == without_padding(found.token_ids.tolist(), padding)
        assert 1 <= found.first <= found.ends[0]


def test_an_answer_is_labelled_in_the_text_that_is_scored() -> None:
    """A template that changes the answer, as Qwen3's leaves out thoughts, changes it in both."""
    tokenizer = byte_tokenizer("{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}")
    answer = "<think>1, 2, 3</think>2"
    render, ids = ConversationRenderer(tokenizer, "key=path", tokenizer), tokenizer(answer)["input_ids"]
    rendered = render([message("user", "1+1=?")], [], ids)
    example = label_answer(steps(answer), tokenizer, padding_id=None, form=None)
    assert [*example.prompt, *example.responses[0]] == rendered
    assert tokenizer.decode(rendered) == "<user>1+1=?<assistant>2"
    with refuses(DataError, "a.jsonl, line 1", "2 labels"):
        label_answer(steps("a", "b"), tokenizer, padding_id=None, form=None)
    with refuses(DataError, "a.jsonl, line 1", "two tokens"):
        label_answer(steps("a"), byte_tokenizer("!"), padding_id=None, form=None)


def test_rows_that_teach_nothing_or_cannot_be_rendered_are_named() -> None:
    tokenizer = byte_tokenizer("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}")
    with refuses(DataError, "a.jsonl, line 1", "chosen", "rejected"):
        tokenize([pair(chosen="2", rejected="2 ")], tokenizer)
    refusing = Pair("a.jsonl, line 7", [message("tool", "x")], [message("assistant", "a")], [message("assistant", "b")])
    with refuses(DataError, "a.jsonl, line 7", "chat template") as caught:
        tokenize([refusing], byte_tokenizer())
    assert "apply_chat_template_kwargs" not in str(caught.value)  # a key that the command does not have
    apart = byte_tokenizer("{{ messages[1].content }}")
    with refuses(DataError, "a.jsonl, line 1", "chosen", "prompt"):
        tokenize([pair()], apart)


def test_the_batch_has_the_rows_of_a_pair_in_turn() -> None:
    tokenizer = byte_tokenizer()
    examples, _ = tokenize([pair(), pair(line=2)], tokenizer)
    batch = training_batch([*examples, examples[0]], "labels")
    assert [tokenizer.decode(row) for row in batch["responses"].rows()] == ["2", "3"] * 3
    assert [row.tolist() for row in batch["labels"].rows()] == [[1], [0]] * 3
    assert batch["prompts"].lengths.tolist() == [len("<user>1+1=?<assistant>")] * 6
    one, two = "a.jsonl, line 1", "a.jsonl, line 2"
    assert list(batch["uid"]) == [f"{i}: {at}" for i, at in enumerate((one, two, one)) for _ in range(2)]
    assert len(training_batch([], "labels")) == 0
