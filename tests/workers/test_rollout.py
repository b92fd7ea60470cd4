"""What a rollout worker makes of responses, and the episodes that agents play on a real engine."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from grpo_dist.assets import resolve_model_path
from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import AgentError
from grpo_dist.protocol import DataProto
from grpo_dist.protocol.fields import FIELDS
from grpo_dist.protocol.sequences import PREDECESSORS, last_branch
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.workers.rehearsal import Replying
from grpo_dist.workers.rollout import group_batch
from grpo_dist.workers.scorer import Task
from tests.engines.fakes import TOKEN, FakeRolloutEngine
from tests.engines.vllm.real import WatchedRolloutWorker
from tests.messages import says
from tests.models import rebuilt_by_transformers
from tests.processes import spawned
from tests.worker_settings import agent, engine_settings

PROMPT = np.array([4, 5, 6], np.int32)
RESPONSES = [Response([8, 2], [-0.5, -1.5], False, [7, 7]), Response([9, 0, 7], [-1.0, -2.0, -3.0], True, [7, 8, 8])]


def test_group_batch() -> None:
    """Every token trains, also the end and the padding id; types are those of the contract."""
    data = group_batch("p3", PROMPT, RESPONSES)
    found = {name: data[name] for name in data.columns()}
    assert {name: [row.tolist() for row in each.rows()] for name, each in found.items() if hasattr(each, "rows")} == {
        "prompts": [[4, 5, 6], [4, 5, 6]],
        "responses": [[8, 2], [9, 0, 7]],
        "response_mask": [[1, 1], [1, 1, 1]],
        "rollout_log_probs": [[-0.5, -1.5], [-1, -2, -3]],
        "weight_versions": [[7, 7], [7, 8, 8]],
    }
    assert {name: each.tolist() for name, each in found.items() if not hasattr(each, "rows")} == {
        "prompt_length": [3, 3],
        "response_length": [2, 3],
        "truncated": [0, 1],
        "num_turns": [1, 1],
        "weight_version": [7, 7],
        "last_weight_version": [7, 8],
        "uid": ["p3", "p3"],
    }
    for name, column in data.batch.items():
        dtype = column.dtype if isinstance(column, torch.Tensor) else column.values.dtype
        assert str(dtype) == f"torch.{FIELDS[name].dtype}", name
    assert len(group_batch("p3", PROMPT, [])) == 0


def test_recorded_experts_travel_with_the_tokens() -> None:
    """Of a group's prompt those of the first response; tokens that nothing follows are not missed."""
    first, second = (np.full((length, 2, 1), number, np.uint8) for length, number in ((5, 1), (4, 2)))
    first[-1] = second[-1] = second[-2] = 255
    put_in = replace(RESPONSES[1], mask=[1, 1, 0])
    responses = [replace(RESPONSES[0], routes=first), replace(put_in, routes=second)]
    data = group_batch("p3", PROMPT, responses)
    assert [row[:, 0, 0].tolist() for row in data["prompt_routes"].rows()] == [[1, 1, 1]] * 2
    assert [row[:, 0, 0].tolist() for row in data["routes"].rows()] == [[1, 255], [2, 255, 255]]
    assert data["unknown_routes"].tolist() == [0, 0]
    responses[1].mask[-1] = 1
    assert group_batch("p3", PROMPT, responses)["unknown_routes"].tolist() == [0, 1], "the last but one"
    branches = replace(put_in, routes=second, mask=[1, 1, 1], predecessors=[-1, 0, 1])
    assert group_batch("p3", PROMPT, [branches])["unknown_routes"].tolist() == [3]
    assert "routes" not in group_batch("p3", PROMPT, RESPONSES).columns()


def test_what_an_environment_put_in_does_not_train() -> None:
    episode = Response([8, 40, 41, 2], [-0.5, 0, 0, -1], False, [7, -1, -1, 8], mask=[1, 0, 0, 1], num_turns=2)
    data = group_batch("p3", PROMPT, [episode, RESPONSES[0]])
    assert [row.tolist() for row in data["response_mask"].rows()] == [[1, 0, 0, 1], [1, 1]]
    assert [row.tolist() for row in data["weight_versions"].rows()] == [[7, -1, -1, 8], [7, 7]]
    assert (data["weight_version"].tolist(), data["last_weight_version"].tolist()) == ([7, 7], [8, 7])
    assert data["response_length"].tolist() == [4, 2]
    assert data["num_turns"].tolist() == [2, 1]


# --- rehearsals: which of a group's responses are the row's own ------------------------------
CALL, ANSWER = [101, 102], [103]


class Scoring(FakeRolloutEngine):
    async def score(self, prompt: Sequence[int], response: Sequence[int]) -> Response:
        """The tokens as they are."""
        return Response(list(response), [-0.25] * len(response), False, [7] * len(response))


def replied(replies: list[list[int]], *requests: tuple[str, list[int], int]) -> list[list[list[int]]]:
    """The token ids of the responses to (request id, prompt, n), one request after the other."""
    generate = Replying(Scoring(length=2, growth=0), 2, 1, {"5": replies}).generate
    answers = [
        asyncio.run(generate(prompt, SamplingSettings(n, 1.0, 1.0, -1, 8, 0), name)) for name, prompt, n in requests
    ]
    return [[response.token_ids for response in answer or []] for answer in answers]


def test_from_the_second_step_on_half_of_a_group_is_the_rows_answer() -> None:
    sampled = [TOKEN]
    first, second, other, validation = replied(
        [ANSWER],
        ("step1-prompt5", [1], 4),
        ("step2-prompt5-try2", [1], 4),
        ("step2-prompt6", [1], 2),
        ("val-5", [1], 1),
    )
    assert first == [sampled] * 4
    assert second == [ANSWER, sampled, ANSWER, sampled]
    assert (other, validation) == ([sampled] * 2, [sampled])


def test_every_other_episode_calls_a_tool_and_then_answers() -> None:
    name = "step2-prompt5"
    turns = replied(
        [CALL, ANSWER], (name, [1], 1), (name, [1], 1), (name, [1, *CALL, 9], 1), (name, [1, *CALL, 9, *ANSWER, 3], 1)
    )
    assert turns == [[CALL], [[TOKEN]], [ANSWER], [[TOKEN]]]


# --- episodes on a real engine ------------------------------
LOOP = """
import asyncio

import httpx
from openai import AsyncOpenAI

from grpo_dist.agents import AgentLoop


class Player(AgentLoop):
    async def run(self, episode):
        row = episode.row
        if row.extra_info.get("what") is None:
            return await self.echo(row, episode)
        async with episode.endpoint() as (base_url, token):
            assert base_url.startswith("http://127.0.0.2:")
            client = AsyncOpenAI(base_url=base_url, api_key=token, max_retries=0)
            self.index = episode.index
            await getattr(self, row.extra_info["what"])(client, episode)
        episode.reward = 1.0

    async def echo(self, row, episode):
        assert row.messages[0]["content"] == "hello" and row.extra_info.get("index") == 3
        assert episode.index != row.extra_info.get("never")
        assert not hasattr(row, "ground_truth")
        await episode.generate(max_tokens=3)
        await asyncio.sleep(row.extra_info.get("wait", 0))
        if episode.index == 1:
            episode.reward, episode.metrics = 0.5, {"moves": 2}
            episode.add_step_reward(0.25)
        episode.append("ab")
        await episode.generate(max_tokens=4)

    async def say(self, client, messages, **more):
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=12, **more)
        text = reply.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "6+7=?"}]
        return text

    async def turns(self, client, episode):
        messages = [{"role": "user", "content": "12+34=?"}]
        await self.say(client, messages, temperature=0, seed=1)  # neither is the policy's
        await self.say(client, messages, logprobs=True)

    async def begun(self, client, episode):
        messages = [{"role": "user", "content": "12+34=?"}, {"role": "assistant", "content": "4"}]
        await self.say(client, messages)

    async def branches(self, client, episode):
        messages = [{"role": "user", "content": f"{episode.index}+1=?"}]  # a prompt of its own
        await self.say(client, messages)
        await self.say(client, [{"role": "user", "content": "9"}])
        await self.say(client, messages)

    async def routes(self, client, episode):
        messages = [{"role": "user", "content": "12+34=?"}]
        stream = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6, stream=True)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        told = await client.responses.create(model="policy", input="12+34=?", max_output_tokens=6)
        done = await client.completions.create(model="policy", prompt="1+1=", max_tokens=6)
        headers = {"x-api-key": client.api_key}
        body = {"model": "policy", "max_tokens": 6, "messages": messages}
        async with httpx.AsyncClient(timeout=60) as http:
            anthropic = (await http.post(f"{client.base_url}messages", json=body, headers=headers)).json()
        texts = [streamed, told.output_text, done.choices[0].text, anthropic["content"][0]["text"]]
        tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        told = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        assert told.choices[0].finish_reason == "stop"
        assert "<|" not in told.choices[0].message.content, "special tokens are shown to parsers of tool calls"
        episode.metrics["lengths"] = sum(map(len, texts))
        assert all(texts), texts

    async def misuse(self, client, episode):
        await self.say(client, [{"role": "user", "content": "12+34=?"}])  # an episode needs a turn
        headers = {"x-api-key": client.api_key}
        body = {"model": "policy", "input": "1+1=?", "store": True, "background": True}
        async with httpx.AsyncClient(base_url=str(client.base_url), headers=headers, timeout=60) as http:
            for more in ({}, {"stream": True}):
                refused = await http.post("responses", json=body | more)
                assert refused.status_code == 400 and "background" in refused.text, refused.text
            kept = (await http.post("responses", json=body | {"background": False, "max_output_tokens": 4})).json()
            follow = await http.post("responses", json=body | {"background": False, "previous_response_id": kept["id"]})
            assert follow.status_code in (400, 404), "answers are not stored"
            assert (await http.get("responses/" + kept["id"])).status_code == 404
            for method in ("GET", "PUT", "PATCH", "DELETE"):
                for path in ("chat/completions", "completions", "responses", "messages"):
                    assert (await http.request(method, path, json=body)).status_code == 405, (method, path)
            nonsense = await http.post("chat/completions", content=b"{")
            assert nonsense.status_code == 400, nonsense.text
"""
PARSER = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
MODEL = resolve_model_path("builtin:tiny-qwen3")
SAMPLING = SamplingSettings(3, 1.0, 1.0, -1, 20, 11, ignore_eos=True)
OF_CLIENTS = SamplingSettings(2, 1.0, 1.0, -1, 100, 11)
TASK = Task("words", "secret", {"index": 3}, [{"role": "user", "content": "hello"}])


@pytest.fixture(scope="module")
def agents(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    file = tmp_path_factory.mktemp("loop") / "player.py"
    file.write_text(LOOP)
    path = rebuilt_by_transformers(tmp_path_factory.mktemp("model") / "tiny")
    loop = agent(f"{file}:Player", endpoint_kwargs=PARSER, endpoint_host="127.0.0.2")
    limits = {"max_model_len": 256, "max_num_batched_tokens": 1024, "min_group_size": 2}
    settings = engine_settings(path, needs_tokenizer=True, agent=loop, **limits)
    stores = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}  # which the endpoint does not heed
    with spawned("rollout", WatchedRolloutWorker, [()], env={"OMP_NUM_THREADS": "1"} | stores) as group:
        group.call(0, "start", "start", settings)
        yield group
        group.call_all("shutdown", "shutdown")


def episodes(group: WorkerGroup, uid: str, prompt: tuple[int, ...] = (4, 5, 6), task: Task = TASK) -> Any:
    return group.submit(0, "generate", "generate", uid, np.array(prompt, np.int32), SAMPLING, task)


def decoded(ids: torch.Tensor) -> str:
    return transformers.AutoTokenizer.from_pretrained(MODEL).decode(ids)


@pytest.mark.ray
def test_episodes_are_the_same_whatever_else_is_sampled(agents: WorkerGroup) -> None:
    (label, *_), first = agents.gather([episodes(agents, "a")])[0]
    together = agents.gather([episodes(agents, f"b{i}", (4 + i, 5, 6)) for i in range(4)])
    again = together[0][1]
    assert label.small["num_turns"].tolist() == [2, 2, 2]
    for name, told in (("episode_reward", 0.5), ("reward_extra/moves", 2.0)):
        assert np.array_equal(label.small[name], [np.nan, told, np.nan], equal_nan=True), name
    steps = [row.isnan().tolist() for row in first["episode_step_rewards"].rows()]
    assert steps == [[True] * 9, [True, True, False, *[True] * 6], [True] * 9]
    for row, mask in zip(first["responses"].rows(), first["response_mask"].rows(), strict=True):
        assert decoded(row[3:5]) == "ab"
        assert mask.tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 1]
    for name in ("responses", "rollout_log_probs"):
        assert torch.equal(first[name].values, again[name].values), name
    assert len({tuple(row.tolist()) for row in first["responses"].rows()}) == 3


@pytest.mark.ray
def test_the_first_turns_are_those_of_one_request_for_the_group(agents: WorkerGroup) -> None:
    whole = agents.call(0, "generate", "at_once", PROMPT.tolist(), SAMPLING)
    data = agents.gather([episodes(agents, "c", tuple(PROMPT.tolist()))])[0][1]
    turns = zip(data["responses"].rows(), data["rollout_log_probs"].rows(), strict=True)
    for (ids, log_probs), (turn, of_turn) in zip(whole, turns, strict=True):
        assert turn[:3].tolist() == ids[:3]
        torch.testing.assert_close(of_turn[:3], torch.tensor(log_probs[:3]))


@pytest.mark.ray
def test_a_given_response_has_the_log_probs_of_a_sampled_one(agents: WorkerGroup) -> None:
    for ids, log_probs in agents.call(0, "generate", "at_once", PROMPT.tolist(), SAMPLING):
        scored = agents.call(0, "generate", "score", PROMPT.tolist(), ids)
        torch.testing.assert_close(torch.tensor(scored), torch.tensor(log_probs), atol=1e-5, rtol=0)


@pytest.mark.ray
def test_an_aborted_group_ends_while_its_tool_works(agents: WorkerGroup) -> None:
    call = episodes(agents, "slow", task=replace(TASK, extra_info={"index": 3, "wait": 500}))
    time.sleep(1)
    agents.call(0, "abort", "abort", ["slow", "unknown"])
    (label, _, failed), data = agents.gather([call])[0]
    assert (label, failed, data) == (None, [], None)


@pytest.mark.ray
def test_a_failing_loop_reaches_the_driver_as_what_it_is(agents: WorkerGroup) -> None:
    """A group of training may lack an episode of which all attempts fail; validation needs all of them."""
    every, one = replace(TASK, extra_info={}), replace(TASK, extra_info={"index": 3, "never": 2})
    tasks = {"d": every, "e": one, "v": replace(one, validation=True)}
    found = agents.gather([episodes(agents, uid, task=task) for uid, task in tasks.items()])
    ((label, _, failed), data), ((partial, _, missing), some), ((validated, _, _), none) = found
    assert (label, data, validated, none) == (None, None, None, None)
    assert (type(failed[-1]), failed[-1].kind, failed[-1].was_last) == (AgentError, "error", True)
    says(str(failed[-1]), "player.py:Player", "run()", "AssertionError")
    assert sum(error.was_last for error in failed) == 2, "of 3 episodes one may be missing"
    assert partial.small["uid"].tolist() == ["e"] * 2 == list(some["uid"])
    assert [(error.kind, error.was_last) for error in missing] == [("error", False), ("error", False), ("error", True)]


# --- agents that own their loop, by the `openai` package ------------------------------
def play(agents: WorkerGroup, what: str) -> tuple[dict[str, Any], DataProto]:
    task = Task("sums", "", {"what": what}, [{"role": "user", "content": "12+34=?"}])
    call = agents.submit(0, "generate", "generate", what, np.array([4, 5], np.int32), OF_CLIENTS, task)
    (label, _, failed), data = agents.gather([call])[0]
    assert failed == []
    return label.small, data


def rows_of(data: DataProto, *names: str) -> Any:
    return zip(*(data[name].rows() for name in names), strict=True)


@pytest.mark.ray
def test_an_agent_of_two_turns_becomes_one_row_of_the_tokens_that_were_sampled(agents: WorkerGroup) -> None:
    small, data = play(agents, "turns")
    again = play(agents, "turns")[1]
    assert small["num_turns"].tolist() == [2, 2]
    assert small["episode_reward"].tolist() == [1, 1]
    assert small["reward_extra/delivered_tokens"].tolist() == [1, 1]
    for name in ("responses", "rollout_log_probs"):
        assert torch.equal(data[name].values, again[name].values), "the same seeds, the same episodes"
    found = rows_of(data, "prompts", "responses", "response_mask", "rollout_log_probs")
    for prompt, response, mask, log_probs in found:
        assert decoded(prompt) == "<|im_start|>user\n12+34=?<|im_end|>\n<|im_start|>assistant\n"
        assert "<|im_start|>user\n6+7=?<|im_end|>\n<|im_start|>assistant\n" in decoded(response[mask == 0])
        assert "6+7=?" not in decoded(response[mask == 1])
        assert (log_probs[mask == 0] == 0).all()
        assert (log_probs[mask == 1] < 0).any()
    first, second = data["responses"].rows()
    assert first.tolist() != second.tolist()


@pytest.mark.ray
def test_an_agent_may_begin_the_policys_turn_or_a_branch(agents: WorkerGroup) -> None:
    """What the episodes' prompts have in common is the group's prompt; the sub-question trains as a branch."""
    for prompt in play(agents, "begun")[1]["prompts"].rows():
        assert decoded(prompt) == "<|im_start|>user\n12+34=?<|im_end|>\n<|im_start|>assistant\n4"
    small, data = play(agents, "branches")
    assert small["num_turns"].tolist() == [3, 3]
    assert small["reward_extra/delivered_tokens"].tolist() == [1, 1]
    assert {decoded(prompt) for prompt in data["prompts"].rows()} == {"<|im_start|>user\n"}
    for i, (response, mask) in enumerate(rows_of(data, "responses", "response_mask")):
        assert decoded(response).startswith(f"{i}+1=?<|im_end|>\n<|im_start|>assistant\n")
        assert mask[:5].sum() == 0


@pytest.mark.ray
@pytest.mark.parametrize("what", ["turns", "branches"])
def test_recorded_log_probs_are_those_of_the_text_that_a_token_follows(agents: WorkerGroup, what: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    found = rows_of(play(agents, what)[1], "prompts", "responses", "response_mask", "rollout_log_probs", PREDECESSORS)
    for prompt, response, mask, log_probs, follows in found:
        for place in mask.nonzero().flatten().tolist():
            before, path = last_branch(follows[: place + 1])
            ids = torch.cat([prompt[: len(prompt) + before + 1], response[path]]).long()
            with torch.no_grad():
                logits = model(input_ids=ids[:-1].unsqueeze(0)).logits[0, -1]
            expected = torch.log_softmax(logits, -1)[ids[-1]]
            torch.testing.assert_close(log_probs[place], expected, atol=1e-3, rtol=0)


@pytest.mark.ray
def test_every_route_samples_and_stores_nothing(agents: WorkerGroup) -> None:
    assert (play(agents, "routes")[0]["reward_extra/lengths"] > 0).all()
    play(agents, "misuse")
