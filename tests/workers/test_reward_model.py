"""The reward model on real ranks, against transformers' own classifier on each conversation alone."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from grpo_dist.algorithms.settings import PreferenceSettings
from grpo_dist.assets import resolve_model_path
from grpo_dist.config.schema_roles import RewardModelConfig
from grpo_dist.data.step_tokens import StepForm, step_tokens
from grpo_dist.engines.settings import PassLimits, RewardModelSettings
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.errors import OutOfMemory, TrainingDiverged
from grpo_dist.plan.commands import load_config
from grpo_dist.protocol import DataProto, Mean, Metric, Ragged, Sum
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.event_loop import run
from grpo_dist.workers.reward_model import RewardModelGroup, RewardModelWorker, scored_rows
from grpo_dist.workers.supervised import SupervisedGroup, SupervisedWorker
from tests.messages import refuses, says
from tests.models import builtin_reward_model
from tests.processes import spawned
from tests.ranks import run_ranks
from tests.runtime.fakes import Fakes
from tests.tiers import first
from tests.worker_settings import model_settings

POLICY = resolve_model_path("builtin:tiny-qwen3")
PROMPTS = {"a": "What is 1 + 2?", "b": "What is 10 + 20 + 30?", "c": "Hm"}
RESPONSES = {"a": ["It is 3.", "", "4"], "b": ["60", "I do not know, and I shall not say so again."], "c": ["3"]}
MESSAGES = {uid: [{"role": "user", "content": text}] for uid, text in PROMPTS.items()}


# --- rows ------------------------------
def test_what_the_sequences_of_a_group_begin_with_is_computed_once() -> None:
    data = scored_rows([[1, 2, 3], [1, 2], [1, 4], [5]], ["a", "a", "a", "b"])
    assert [row.tolist() for row in data["prompts"].rows()] == [[1], [1], [1], [5]]
    assert [row.tolist()[:-1] for row in data["responses"].rows()] == [[2, 3], [2], [4], []]
    assert list(data["uid"]) == ["a", "a", "a", "b"]
    assert len(scored_rows([], [])) == 0
    nothing_common = scored_rows([[1, 2], [3]], ["a", "a"])
    assert [row.tolist() for row in nothing_common["prompts"].rows()] == [[1], [3]], "a prompt has a token"


# --- ranks ------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return builtin_reward_model(tmp_path_factory.mktemp("scorer"))


def settings(folder: str) -> RewardModelSettings:
    limits = PassLimits("reward_model.", 2, budget="forward_max_token_len")
    rank = {"device": "cpu", "num_threads": 1, "seed": 1, "collective_timeout_s": 240.0, "forward": limits}
    model = model_settings(folder, layout="shared", num_labels=1)
    return RewardModelSettings(model=model, section=section(), **rank)


def section(tokenizer: str | None = POLICY, **changes: Any) -> RewardModelConfig:
    plain = load_config([])[0].reward_model
    return plain.replaced(model=plain.model.replaced(input_tokenizer=tokenizer), **changes)


def token_ids(texts: dict[str, list[str]] = RESPONSES) -> list[tuple[str, list[int], list[int]]]:
    """(uid, prompt, response) as the policy's tokens; the second response is cut, so it has no end."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(POLICY)
    rows = []
    for uid, responses in texts.items():
        prompt = tokenizer.apply_chat_template(MESSAGES[uid], add_generation_prompt=True, return_dict=False)
        for i, response in enumerate(responses):
            end = [] if i == 1 else [tokenizer.eos_token_id]
            rows.append((uid, prompt, tokenizer(response)["input_ids"] + end))
    return rows


def batch(texts: dict[str, list[str]] = RESPONSES) -> DataProto:
    uids, prompts, responses = zip(*token_ids(texts), strict=True)
    columns = {"prompts": Ragged.from_rows(prompts, torch.int32), "responses": Ragged.from_rows(responses, torch.int32)}
    return DataProto.from_dict(columns, {"uid": list(uids)})


def conversations(folder: str) -> list[list[int]]:
    """Every row in the chat template of the reward model."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    answers = [(uid, {"role": "assistant", "content": text}) for uid, texts in RESPONSES.items() for text in texts]
    return [tokenizer.apply_chat_template([*MESSAGES[uid], answer], return_dict=False) for uid, answer in answers]


def alone(folder: str, sequences: list[list[int]]) -> list[float]:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids])).logits.item() for ids in sequences]


@pytest.mark.deep
@pytest.mark.ray
def test_conversations_in_its_own_template(local_ray: None, folder: str) -> None:
    """Three groups on two ranks, two sequences a pass: as transformers says of each conversation alone."""
    expected = alone(folder, conversations(folder))
    assert max(expected) - min(expected) > 0.1, "they differ"
    data = batch()
    lengths = {f"{name}_length": data[f"{name}s"].lengths.numpy() for name in ("prompt", "response")}
    handle = DataProtoRef.put(data)
    handle = replace(handle, small=handle.small | lengths)
    with spawned("reward_model", RewardModelWorker, [(0, 2), (1, 2)]) as workers:
        group = RewardModelGroup(workers)
        run(group.start(settings(folder)))
        for rows in (range(6), [4, 0], [3]):  # the last leaves a rank without rows
            found = run(group.score(handle.reorder(np.array(rows)), MESSAGES))
            assert found["rm_score"] == pytest.approx([expected[i] for i in rows], abs=2e-5)
            assert found["rm_clipped"].tolist() == [0] * len(rows)


# --- one rank, without Ray ------------------------------
def scores(rank: int, settings: RewardModelSettings, data: DataProto) -> dict[str, np.ndarray] | str:
    worker = RewardModelWorker(rank, 1)
    worker.settings = settings
    worker.read_folders()
    worker.engine = FSDPEngine(worker.settings.model, device="cpu", temperature=1.0)
    try:
        return worker.score(SimpleNamespace(columns=(), fetch=lambda columns: data), MESSAGES)
    except TrainingDiverged as error:
        return str(error)


# --- steps ------------------------------
STEPS = {"a": ["1 + 2\n= 3", "", "3\n"], "b": ["10 + 20\n+ 30\n= 60", "60"], "c": ["Hm\n\nI"]}


def judge_of(path: Path, kind: str) -> tuple[str, Any]:
    """A process reward model's folder, and its log odds of good at every token of a conversation."""
    folder = builtin_reward_model(path)  # one output, and the tokenizer of all
    if kind == "one output":
        model = transformers.AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
        return folder, lambda ids: model(input_ids=ids).logits[0, :, 0]
    if kind == "two outputs":
        model = transformers.AutoModelForTokenClassification.from_pretrained(
            POLICY, dtype=torch.float32, num_labels=2, id2label={0: "bad", 1: "good"}
        )
        torch.nn.init.normal_(model.score.weight, std=0.3)
        model.save_pretrained(folder)
        return folder, lambda ids: model(input_ids=ids).logits[0].diff(dim=-1)[:, 0]
    model = transformers.AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    model.save_pretrained(folder)
    bad, good = transformers.AutoTokenizer.from_pretrained(POLICY).convert_tokens_to_ids(["1", "2"])
    return folder, lambda ids: model(input_ids=ids).logits[0, :, good] - model(input_ids=ids).logits[0, :, bad]


@pytest.mark.parametrize("kind", first(["one output", "two outputs", "next token"], "two outputs", "next token"))
def test_every_step_is_judged(tmp_path: Path, kind: str) -> None:
    """As transformers says of each conversation alone; TRL's places for a head, Math-Shepherd's for a causal LM."""
    path, log_odds = judge_of(tmp_path, kind)
    of_tokens = kind == "next token"
    judging = {"bad": "1", "good": "2"} if of_tokens else {}
    process = section().process.replaced(enable=True, step_tag=" *\n" if of_tokens else None, **judging)
    form = StepForm(token=" *\n" if of_tokens else None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    expected = []
    for uid, texts in STEPS.items():
        for text in texts:
            steps = [step for step in text.split("\n") if step.strip()]
            ids, _, ends = step_tokens(tokenizer, MESSAGES[uid], steps or [""], form, None)
            with torch.no_grad():
                odds = log_odds(torch.tensor(ids).long()[None])
            expected.append((torch.sigmoid(odds[torch.tensor(ends)]).tolist(), len(steps)))
    assert np.ptp([score for scores, _ in expected for score in scores]) > 0.01, "they differ"
    changed = replace(settings(path), step_separator="\n", section=section(process=process))
    (found,) = run_ranks(1, scores, changed, batch(STEPS))
    for given, score, (wanted, count) in zip(found["rm_step_scores"], found["rm_score"], expected, strict=True):
        assert given == pytest.approx(wanted[:count], abs=1e-5)
        assert score == pytest.approx(min(wanted), abs=1e-5)
    assert [len(given) for given in found["rm_step_scores"]] == [2, 0, 1, 3, 1, 2]
    assert not found["rm_clipped"].any()


@pytest.mark.deep
def test_steps_beyond_the_longest_conversation_are_judged_where_it_is_cut(tmp_path: Path) -> None:
    path, _ = judge_of(tmp_path, "one output")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    _, _, ends = step_tokens(tokenizer, MESSAGES["b"], ["10 + 20", "+ 30", "= 60"], StepForm(), None)
    process = section().process.replaced(enable=True)
    longest = section(process=process, max_length=int(ends[1]) + 1)
    changed = replace(settings(path), step_separator="\n", section=longest)
    (found,) = run_ranks(1, scores, changed, batch(STEPS))
    first, second, third = found["rm_step_scores"][3]
    assert first != second == third
    assert found["rm_clipped"].tolist() == [0, 0, 0, 1, 0, 0]


# --- other folders ------------------------------
def test_tokens_as_they_are_closed_by_the_template_and_cut(folder: str) -> None:
    """By a token budget; one of the conversations is too long."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    closing = tokenizer(f" {tokenizer.eos_token}")["input_ids"]  # see OTHER_TEMPLATE
    sequences = [prompt + [i for i in ids if i != closing[-1]] + closing for _, prompt, ids in token_ids()]
    most = sorted(len(sequence) for sequence in sequences)[-2]
    plain = settings(folder)
    forward = replace(plain.forward, max_token_len=60)
    changed = replace(plain, forward=forward, section=section(None, max_length=most))
    (found,) = run_ranks(1, scores, changed, batch())
    assert found["rm_score"] == pytest.approx(alone(folder, [ids[:most] for ids in sequences]), abs=2e-5)
    assert found["rm_clipped"].tolist() == [len(ids) > most for ids in sequences]
    assert found["rm_clipped"].sum() == 1


def changed_folder(folder: str, path: Path, change: Callable[[Any], object]) -> RewardModelSettings:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    change(model)
    model.save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(path)
    return settings(str(path))


@pytest.mark.parametrize(
    ("key", "value"), [("pad_token_id", None), pytest.param("max_position_embeddings", 16, marks=pytest.mark.deep)]
)
def test_the_config_of_a_model_says_where_conversations_end(
    folder: str, tmp_path: Path, key: str, value: int | None
) -> None:
    """At the last token that is no padding, here the end of sequence; without a limit with the positions."""
    value = value or transformers.AutoTokenizer.from_pretrained(folder).eos_token_id
    most = value if key == "max_position_embeddings" else None
    (found,) = run_ranks(1, scores, changed_folder(folder, tmp_path, lambda m: setattr(m.config, key, value)), batch())
    whole = conversations(folder)
    assert found["rm_clipped"].tolist() == [most is not None and len(ids) > most for ids in whole]
    assert found["rm_score"] == pytest.approx(alone(str(tmp_path), [ids[:most] for ids in whole]), abs=2e-5)
    assert np.abs(found["rm_score"] - alone(folder, whole)).max() > 1e-3, "elsewhere"


@pytest.mark.deep
def test_a_score_that_is_not_finite_stops_the_run(folder: str, tmp_path: Path) -> None:
    changed = changed_folder(folder, tmp_path, lambda model: model.score.weight.data.fill_(3e38))
    (told,) = run_ranks(1, scores, replace(changed, section=section(None)), batch())
    says(told, "reward_model", "values", "prompts a, b, c")


# --- a rank that trains on rows with known answers, and the group of all ranks ------------------------------
OBJECTIVE = PreferenceSettings()


class Engine:
    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.seen = error, []

    def on_device(self, **_: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def evaluate(self, *arguments: Any) -> dict[str, Metric]:
        self.seen.append(arguments)
        if self.error is not None:
            raise self.error
        return {"reward_model/loss": Sum(0.5)}

    def train_mini_batch(self, *arguments: Any) -> Any:
        return SimpleNamespace(metrics=self.evaluate(*arguments))


def passed(method: str, engine: Engine, tokens: int | None = 99) -> dict[str, Metric]:
    """What a rank returns of rows after step 3."""
    worker = SupervisedWorker(0, 1)
    limits = PassLimits("data.", 4, tokens, lengths="data.max_length")
    worker.engine = engine
    worker.settings = SimpleNamespace(update=limits, model=SimpleNamespace(room="take more GPUs"))
    rows = SimpleNamespace(columns=("prompts",), fetch=lambda columns: "rows")
    return getattr(worker, method)(rows, OBJECTIVE, 3)


@pytest.mark.parametrize(("method", "what"), [("train", "step 3"), ("evaluate", "validation after step 3")])
def test_a_rank_takes_its_rows_in_passes_of_the_config(method: str, what: str) -> None:
    """Numbers that are not finite are told with the step, a full GPU with what makes passes smaller."""
    engine = Engine()
    assert passed(method, engine) == {"reward_model/loss": Sum(0.5)}
    assert engine.seen == [("rows", OBJECTIVE, PassLimits("data.", 4, 99, lengths="data.max_length"))]
    with refuses(TrainingDiverged, "step 3", "loss nan") as caught:
        passed(method, Engine(TrainingDiverged("loss nan")))
    assert str(caught.value).startswith(what)
    for tokens, setting in ((None, ("data.micro_batch_size_per_gpu", 4)), (99, ("data.max_token_len_per_gpu", 99))):
        with pytest.raises(OutOfMemory) as full:
            passed(method, Engine(OutOfMemory("the forward pass", remedy="")), tokens)
        assert full.value.setting == setting


@pytest.mark.parametrize("method", ["train", "evaluate"])
def test_every_rank_is_asked_and_metrics_are_merged(method: str, store_here: None) -> None:
    """All take part, also one without rows: the passes are collective."""
    answers = {0: {"loss": Sum(0.5), "accuracy": Mean(3.0, 3)}, 1: {"loss": Sum(0.0), "accuracy": Mean(0.0, 1)}}
    workers = Fakes("reward_model", 2, **{method: answers})
    rows = DataProto.from_dict({}, {"uid": ["a", "a"]})
    found = run(getattr(SupervisedGroup(workers), method)([rows, DataProto()], OBJECTIVE, 7))
    assert (found["loss"].value, found["accuracy"].value) == (0.5, 0.75)
    assert workers.order == [(method, 0), (method, 1)]
    assert [len(handle) for _, _, handle, *_ in workers.asked] == [2, 0]
    assert {tuple(more) for _, _, _, *more in workers.asked} == {(OBJECTIVE, 7)}
