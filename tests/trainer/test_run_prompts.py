"""Prompts of a run and what the user is told about them."""

import json
import shutil
from pathlib import Path
from typing import Any

from grpo_dist.agents import ToolAgent
from grpo_dist.assets import resolve_model_path
from grpo_dist.data import PromptSampler, load_tokenizer
from grpo_dist.data.sampler import CustomSampler, PassRateCurriculum
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.plan.commands import load_config
from grpo_dist.rewards.contract import RowNeeds
from grpo_dist.trainer.run_prompts import Prompts, load_run_prompts
from tests.agents.speaking import QWEN3, TOOLS
from tests.messages import refuses, says
from tests.models import policy_folder

EXAMPLE = Path(__file__).parents[2] / "examples" / "curriculum" / "easiest_first.py"
SIZES = ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "data.max_prompt_length=64")


def load_rows(file: Path, rows: list[dict], *overrides: str, **needs: RowNeeds) -> tuple[Prompts, list[str]]:
    """Prompts of a file with these rows; batches of 2."""
    file.write_text("\n".join(map(json.dumps, rows)))
    keys = (f"data.train_files={file}", "data.val_files=null", "data.max_response_length=64", *SIZES)
    config, _ = load_config([*keys, *overrides])
    return load_run_prompts(config, policy_folder(config), **needs)


TWO: list[str | list] = ["1+1=?", "2+2=?"]


def load(tmp_path: Path, *overrides: str, contents: list[str | list] = TWO) -> tuple[Prompts, list[str]]:
    """Prompts of a file with one row per content."""
    row = {"data_source": "arithmetic", "reward_model": {"ground_truth": "2"}}
    return load_rows(tmp_path / "rows.jsonl", [row | {"prompt": content} for content in contents], *overrides)


def test_overlong_prompts_that_are_left_out_are_counted_and_named(tmp_path: Path) -> None:
    contents = ["1+1=?", *["1+" * 50] * 7, "2+2=?"]
    prompts, (note,) = load(tmp_path, contents=contents)
    assert len(prompts.train) == 2
    says(note, "data.train_files", "7 of 9", "data.max_prompt_length=64", "left out", "2 more")
    says(note, *(f"{tmp_path}/rows.jsonl, line {number}" for number in range(2, 7)))
    assert note.count("rows.jsonl") == 5


def test_a_dry_run_shows_the_first_prompt_as_the_model_reads_it(tmp_path: Path) -> None:
    _, (note,) = load(tmp_path, "trainer.dry_run=true")
    says(note, "data.train_files")
    assert r"<|im_start|>user\n1+1=?<|im_end|>" in note
    _, (note,) = load(tmp_path, "trainer.dry_run=true", "data.max_prompt_length=448", contents=["1+" * 200, "2+2=?"])
    assert len(note) < 450
    assert load(tmp_path)[1] == []


def test_a_tag_that_the_chat_template_opens_is_noted(tmp_path: Path) -> None:
    folder = shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), tmp_path / "model")
    with (folder / "chat_template.jinja").open("a") as template:
        template.write("{% if add_generation_prompt %}<think>\n{% endif %}")
    scorer, key = "custom_reward_function.path=grpo_dist.rewards.format", "custom_reward_function.reward_kwargs"
    model = f"actor_rollout_ref.model.path={folder}"
    _, (note,) = load(tmp_path, model, scorer)
    says(note, "data.train_files", "<think>", f"{key}.opened=think")
    listed = "custom_reward_function.path=[{path: grpo_dist.rewards.format, reward_kwargs: {opened: think}}]"
    for quiet in ([scorer, f"{key}={{opened: think}}"], [listed], ["custom_reward_function.path=null"]):
        assert load(tmp_path, model, *quiet)[1] == []
    assert load(tmp_path, scorer)[1] == []


def test_prompts_that_are_cut_are_counted_and_named(tmp_path: Path) -> None:
    overrides, contents = ("data.filter_overlong_prompts=false", "data.truncation=middle"), ["1+1=?", "1+" * 50]
    prompts, (note,) = load(tmp_path, *overrides, contents=contents)
    assert len(prompts.train[1].token_ids) == 64
    says(note, "data.train_files", "1 of 2", "cut", overrides[1], f"{tmp_path}/rows.jsonl, line 2")
    remedies = ("data.filter_overlong_prompts=true", "data.truncation=left")
    with refuses(DataError, "data.max_prompt_length=64", f"{tmp_path}/rows.jsonl, line 2", "119 tokens", *remedies):
        load(tmp_path, overrides[0], contents=contents)


def test_the_system_prompt_is_tokenized_and_own_ones_are_counted(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "7"}, {"role": "user", "content": "1+1=?"}]
    plain, _ = load(tmp_path, contents=["1+1=?", own])
    prompts, (note,) = load(tmp_path, "data.system_prompt='8'", contents=["1+1=?", own])
    says(note, "data.train_files", "1 of 2", "data.system_prompt")
    assert prompts.train[0].prompt.messages[0] == {"role": "system", "content": "8"}
    assert prompts.train[1].token_ids.tolist() == plain.train[1].token_ids.tolist()
    assert load(tmp_path, "data.system_prompt='8'")[1] == []


def test_texts_are_asked_as_they_stand_where_that_is_said(tmp_path: Path) -> None:
    contents = ["1+1=", [{"role": "user", "content": "2+2="}]]
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny-qwen3"), trust_remote_code=False)

    def asked(*overrides: str) -> list[str]:
        prompts, _ = load(tmp_path, *overrides, contents=contents)
        return [tokenizer.decode(prompt.token_ids) for prompt in prompts.train]

    chat = ["<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"]
    chat += [chat[0].replace("1", "2")]
    assert asked() == chat
    plain = "data.apply_chat_template=false"
    assert asked(plain) == ["1+1=", chat[1]]
    assert asked(plain, "data.system_prompt='8+'")[0] == "8+\n1+1="


def test_listed_rows_are_left_out_by_prompt_and_truth(tmp_path: Path) -> None:
    """Whatever their file, place and system message are; the rows that are left are other rows for a resume."""
    contents: list = [*TWO, "1+1=?", [{"role": "system", "content": "7"}, {"role": "user", "content": "3+3=?"}]]
    all_rows, _ = load(tmp_path, "data.system_prompt='8'", contents=contents)
    digests = [each.prompt.digest for each in all_rows.train]
    assert [digests.index(digest) for digest in digests] == [0, 1, 0, 3]
    assert digests == [each.prompt.digest for each in load(tmp_path, contents=contents)[0].train]
    listed = tmp_path / "listed.jsonl"
    listed.write_text("".join(json.dumps({"row": digest, "kind": "truth"}) + "\n" for digest in (digests[0], "gone")))
    exclude = f"data.exclude_rows={listed}"
    prompts, notes = load(tmp_path, exclude, f"data.val_files={tmp_path}/rows.jsonl", contents=contents)
    assert [each.prompt.index for each in prompts.train] == [1, 3]
    assert (len(prompts.validation), prompts.identity["count"]) == (4, 2)
    assert prompts.identity["fingerprint"] != all_rows.identity["fingerprint"]
    says(notes, "data.train_files", "2 of 4", exclude)
    with refuses(DataError, exclude, "2 rows", "data.train_files", "grpo-dist audit"):
        load(tmp_path, exclude, contents=["5+5=?", "6+6=?"])
    for text, named in (('{"uid": 1}', "'row'"), ("{", "line 1"), ("", str(listed))):
        listed.write_text(text)
        with refuses(DataError, "data.exclude_rows", named):
            load(tmp_path, exclude, contents=contents)
    with refuses(DataError, "data.exclude_rows", tmp_path / "none.jsonl"):
        load(tmp_path, f"data.exclude_rows={tmp_path}/none.jsonl", contents=contents)


def test_the_sampler_is_the_one_of_the_config(tmp_path: Path) -> None:
    def sampler(*keys: str) -> Any:
        return load(tmp_path, *keys, contents=[*TWO, "3+3=?"])[0].sampler

    assert isinstance(sampler(), PromptSampler)
    custom = sampler(f"data.sampler.class_path={EXAMPLE}", "data.sampler.class_name=EasiestFirst")
    assert (type(custom), custom.steps_per_epoch) == (CustomSampler, 1)
    keys = ("data.curriculum.enable=true", "data.curriculum.exploration=0.25", "data.curriculum.decay=1", "data.seed=9")
    curriculum = sampler(*keys)._curriculum
    assert isinstance(curriculum, PassRateCurriculum)
    assert (curriculum.exploration, curriculum.left_per_batch, curriculum.seed) == (0.25, 1.0, 9)


def own(tmp_path: Path, needs: RowNeeds, *overrides: str, rows: list[dict]) -> tuple[Prompts, list[str]]:
    """Prompts of rows with columns of one's own, for a reward function with these needs."""
    (tmp_path / "mine.py").touch()
    reward = f"custom_reward_function.path={tmp_path}/mine.py"
    return load_rows(tmp_path / "own.jsonl", rows, reward, *overrides, needs=needs)


SUMS = [{"question": f"{i}+1?", "answer": i + 1} for i in range(3)]


def test_the_columns_that_were_found_are_told_with_their_keys(tmp_path: Path) -> None:
    prompts, (note,) = own(tmp_path, RowNeeds(), rows=[*SUMS, {"prompt": "3+1?", "solution": 4, "data_source": "d"}])
    assert [each.prompt.ground_truth for each in prompts.train] == [1, 2, 3, 4]
    says(note, "data.train_files", "data.prompt_key=question (3 of 4 rows)", "data.answer_key=answer (3 of 4 rows)")
    says(note, "data.answer_key=solution (1 of 4 rows)", "data.data_source=own (3 of 4 rows)")
    named = ("data.prompt_key=question", "data.answer_key=answer", "data.data_source=sums")
    prompts, notes = own(tmp_path, RowNeeds(), *named, rows=SUMS)
    assert (notes, prompts.train[0].prompt.data_source) == ([], "sums")


def test_a_template_and_the_needs_of_the_reward_function(tmp_path: Path) -> None:
    template = r"data.prompt_template='{question}\nAnswer after ####.'"
    needs = RowNeeds(ground_truth=False, needed=frozenset({"level"}), taken=None)
    rows = [{"question": "1+1?", "level": 3}, {"question": "2+2?", "level": 1}]
    prompts, _ = own(tmp_path, needs, template, rows=rows)
    first = prompts.train[0].prompt
    assert first.messages == [{"role": "user", "content": "1+1?\nAnswer after ####."}]
    assert (first.ground_truth, first.columns) == (None, rows[0])
    with refuses(DataError, "own.jsonl, line 1", "'level'"):
        own(tmp_path, needs, template, rows=SUMS)
    with refuses(DataError, "own.jsonl, line 1", "'reward_model'", "data.answer_key=COLUMN", "ground_truth=None"):
        own(tmp_path, RowNeeds(), template, rows=rows)


def test_built_in_scorers_go_by_the_data_source(tmp_path: Path) -> None:
    """Where a model scores, rows without a name are called "data"."""
    model = ("reward_model.enable=true", "reward_model.model.path=some/model")
    prompts, notes = own(tmp_path, RowNeeds(), *model, rows=[{"prompt": "1+1?"}, {"prompt": "2+2?"}])
    assert [(each.prompt.data_source, each.prompt.ground_truth) for each in prompts.train] == [("data", None)] * 2
    assert notes == []
    built_in = "custom_reward_function.path=null"
    with refuses(DataError, "own.jsonl, line 1", "'data_source'", "data.data_source=", "custom_reward_function.path"):
        own(tmp_path, RowNeeds(), built_in, rows=SUMS)
    prompts, _ = own(tmp_path, RowNeeds(), built_in, "data.data_source=gsm8k", rows=SUMS)
    assert prompts.train[0].prompt.data_source == "gsm8k"
    with refuses(ConfigError, "'sums'", "custom_reward_function.path"):
        own(tmp_path, RowNeeds(), built_in, "data.data_source=sums", rows=SUMS)


def with_tools(tmp_path: Path, template: str = QWEN3) -> list[str]:
    """The built-in model with another chat template, and an agent that has a tool; files are in `tmp_path`."""
    folder = shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(TOOLS)
    agent = "actor_rollout_ref.rollout.agent"
    tools = f"{agent}.agent_kwargs={{tools: ['{tmp_path}/mine.py:add'], tool_parser: hermes}}"
    return [f"actor_rollout_ref.model.path={folder}", f"{agent}.default_agent_loop=tool_agent", tools]


def test_prompts_tell_of_the_tools_and_are_as_long_as_that(tmp_path: Path) -> None:
    length = "data.max_prompt_length=1000"
    overrides = [*with_tools(tmp_path), length, "data.apply_chat_template_kwargs={enable_thinking: false}"]
    prompts, (note,) = load(tmp_path, *overrides, contents=["1+1=?", "2+2=?", "1+" * 200])
    assert len(prompts.train) == 2
    says(note, "1 of 3", length)
    tokenizer = load_tokenizer(str(tmp_path / "model"), trust_remote_code=False)
    text = tokenizer.decode(prompts.train[0].token_ids)
    schema = ToolAgent.template_kwargs({"tools": [f"{tmp_path}/mine.py:add"]})["tools"][0]
    says(text, json.dumps(schema))
    assert text.endswith("<think>\n\n</think>\n\n")


def test_a_template_that_has_no_tools_is_refused_and_so_are_variables_of_two(tmp_path: Path) -> None:
    overrides = with_tools(tmp_path, "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    with refuses(ConfigError, "agent_kwargs.tools", "chat_template.jinja"):
        load(tmp_path, *overrides)
    with refuses(ConfigError, "data.apply_chat_template_kwargs.tools", "default_agent_loop=tool_agent"):
        load(tmp_path, *overrides, "data.apply_chat_template_kwargs={tools: []}")
