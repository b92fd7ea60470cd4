"""Conversations as reward models and teachers read them, and where the steps of an answer are judged."""

from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from grpo_dist.assets import resolve_model_path
from grpo_dist.data.conversations import ConversationRenderer, render_conversation, without_padding
from grpo_dist.data.step_tokens import (
    StepForm,
    StepRenderer,
    StepTokens,
    judging_token,
    split_steps,
    step_ends,
    step_form,
    step_tokens,
)
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.plan.commands import load_config
from tests.data.test_tokenize import byte_tokenizer
from tests.messages import refuses
from tests.models import OTHER_TEMPLATE

SETTING = "reward_model.model.path=scorer"
MESSAGES = [{"role": "user", "content": "What is 1 + 2?"}]
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('roles!') }}{% endif %}x"


def tokenizer(*template: str | None) -> Any:
    """The built-in model's, with another chat template or none."""
    found = transformers.AutoTokenizer.from_pretrained(resolve_model_path("builtin:tiny-qwen3"))
    if template:
        found.chat_template = template[0]
    return found


def response(text: str, *, ended: bool = True) -> list[int]:
    return tokenizer()(text)["input_ids"] + [tokenizer().eos_token_id] * ended


# --- rendered again ----------------------------------------------------------------------------------------------
def rendered(own: Any, text: str) -> str:
    return own.decode(ConversationRenderer(own, SETTING, tokenizer())(MESSAGES, [], response(text)))


def test_the_response_becomes_the_last_message_or_goes_on_from_it() -> None:
    own = tokenizer(OTHER_TEMPLATE)
    assert rendered(own, "It is 3.") == f"<user> What is 1 + 2? <assistant> It is 3. {own.eos_token}"
    assert rendered(own, "") == f"<user> What is 1 + 2? <assistant>  {own.eos_token}", "an empty message"
    base = rendered(tokenizer(None), " It is 3.")
    assert base == f"What is 1 + 2? It is 3.{own.eos_token}", "right behind the prompt"
    begun = [*MESSAGES, {"role": "assistant", "content": "It "}]
    whole = own.decode(ConversationRenderer(own, SETTING, tokenizer())(begun, [], response("is 3.")))
    assert whole == rendered(own, "It is 3."), "one turn"
    apart, _ = render_conversation(own, begun, [{"role": "assistant", "content": "is 3."}], may_go_on=False)
    assert apart.count("<assistant>") == 2


def test_templates_that_cannot_be_used_are_refused() -> None:
    with_system = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    render = ConversationRenderer(tokenizer(NO_SYSTEM), SETTING, tokenizer())
    render(MESSAGES, [], [5])
    with refuses(DataError, SETTING, "TemplateError", "roles!", "data.system_prompt"):
        render(with_system, [], [5])
    with refuses(DataError, SETTING, "tokens"):
        ConversationRenderer(tokenizer("{# nothing #}"), SETTING, tokenizer())(MESSAGES, [], [5])
    with refuses(DataError, SETTING, "reward_model.model.input_tokenizer=null"):  # it would close nothing
        ConversationRenderer(tokenizer("{{ messages[0].content }}"), SETTING)


# --- the same tokens ---------------------------------------------------------------------------------------------


def test_the_policys_end_of_a_turn_is_not_doubled_and_no_space_is_put_before_what_closes() -> None:
    """With a tokenizer as Llama 2's: a text begins with a space of its own; `<end>` is special and has no role."""
    words = ["<unk>", "</s>", "\u2581", "\n", *"ANSWERPOMTab"]
    found = Tokenizer(models.BPE({word: i for i, word in enumerate(dict.fromkeys(words))}, [], unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    found.add_special_tokens([AddedToken("<turn>", special=True), AddedToken("<end>", special=True)])
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=found, unk_token="<unk>", eos_token="</s>")
    own.chat_template = "{% for m in messages %}<turn>{{ m.content }}<end>\n{% endfor %}"
    end, newline, a = own.convert_tokens_to_ids(["<end>", "\n", "a"])
    for response in ([a, end], [a], [a, own.eos_token_id]):
        assert ConversationRenderer(own, SETTING)(MESSAGES, [7], response) == [7, a, end, newline]


def test_padding_at_the_end_is_no_place_for_a_score() -> None:
    assert without_padding([1, 0, 2, 0, 0], 0) == [1, 0, 2]
    assert without_padding([0, 0], 0) == [0]
    assert without_padding([1, 2], None) == [1, 2]


# --- steps -----------------------------------------------------------------------------------------------------------
PROMPT = [{"role": "user", "content": "1+1=?"}]
START = "<user>1+1=?<assistant>"


def judged(found: StepTokens, tokenizer: Any) -> list[str]:
    """The text of the conversation up to each place."""
    return [tokenizer.decode(found.token_ids[: end + 1]) for end in found.ends]


def test_where_steps_are_judged() -> None:
    """TRL's PRMTrainer; the template closes the answer, and the last step is judged there."""
    tokenizer = byte_tokenizer("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}!")
    found = step_tokens(tokenizer, PROMPT, ["1+1", "=2"], StepForm(), None)
    assert tokenizer.decode(found.token_ids) == f"{START}1+1\n=2!"
    assert tokenizer.decode(found.token_ids[: found.first]) == START
    assert judged(found, tokenizer) == [f"{START}1+1\n", f"{START}1+1\n=2!"]
    other = step_tokens(tokenizer, PROMPT, ["1+1;", "=2"], StepForm(separator=";"), None)
    assert judged(other, tokenizer) == [f"{START}1+1;", f"{START}1+1;=2!"]
    # Math-Shepherd's: white space behind the tag is not where the model judges.
    found = step_tokens(tokenizer, PROMPT, ["a\n", "b"], StepForm(token=" *\n"), None)
    assert tokenizer.decode(found.token_ids) == f"{START}a *\nb *\n!"
    assert judged(found, tokenizer) == [f"{START}a *", f"{START}a *\nb *"]


def test_steps_and_their_last_tokens() -> None:
    for tokens, separator, steps, ends in (
        (["a", "b", "\n", "c", ""], "\n", ["ab", "c"], [2, 4]),  # the last step ends with the end-of-sequence token
        (["a\n", "b\n", ""], "\n", ["a", "b"], [0, 1]),  # nothing follows the last separator
        (["a\nb\nc"], "\n", ["a", "b", "c"], [0, 0, 0]),  # steps that share a token
        (["a", "\n\n", "b"], "\n", ["a", "b"], [1, 2]),  # an empty line is no step
        (["x", "-", ">", "y"], "->", ["x", "y"], [2, 3]),  # a separator of two tokens
        (["abc", ""], "\n", ["abc"], [1]),
        (["", "\n", " "], "\n", [], []),
        (list("\n\na\n \n"), "\n", ["a"], [3]),
        ([], "\n", [], []),
    ):
        assert [step.strip() for step in split_steps("".join(tokens), separator)] == steps
        assert step_ends(tokens, separator) == ends


def test_a_response_becomes_the_conversation() -> None:
    policy = byte_tokenizer()
    own = byte_tokenizer("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    judge = StepRenderer(own, "key=path", StepForm(), None, policy)
    found, count = judge(PROMPT, policy("a\n\nb\n")["input_ids"])
    assert own.decode(found.token_ids) == "[user]1+1=?[assistant]a\nb"
    assert count == len(found.ends) == 2
    nothing, count = judge(PROMPT, [])
    assert (own.decode(nothing.token_ids), count, len(nothing.ends)) == ("[user]1+1=?[assistant]", 0, 1)
    refusing = byte_tokenizer("{{ raise_exception('no') }}")
    with refuses(DataError, "key=path", "user, assistant", "data.system_prompt"):
        StepRenderer(refusing, "key=path", StepForm(), None)(PROMPT, [])


def test_what_cannot_be_judged_and_the_form_of_a_run() -> None:
    with pytest.raises(ValueError, match="answer"):
        step_tokens(byte_tokenizer("{{ messages[0].content }}"), PROMPT, ["a"], StepForm(), None)
    tokenizer = byte_tokenizer()
    assert judging_token(tokenizer, "+", "reward_model.process.good") == tokenizer.convert_tokens_to_ids("+")
    with refuses(ConfigError, "reward_model.process.good='good'", "4 tokens", "one"):
        judging_token(tokenizer, "good", "reward_model.process.good")
    model = ("reward_model.enable=true", "reward_model.model.path=models/judge")
    assert step_form(load_config(model)[0].reward_model.process, "|") is None
    process = ("reward_model.process.enable=true", "reward_model.process.step_tag=' *'")
    assert step_form(load_config([*model, *process])[0].reward_model.process, "|") == StepForm("|", " *")
    assert StepForm().parts(["a\n", "b", "c"]) == ["a\n", "b\n", "c"]
    assert np.array_equal(StepForm(token="*").parts(["a\n", "b"]), ["a*", "b*"])
