"""Agents that own their loop and know nothing of training, on a real engine: the `openai` package, and the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from grpo_dist.assets import resolve_model_path
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.protocol import DataProto
from grpo_dist.protocol.sequences import PREDECESSORS, last_branch
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.workers.rollout import RolloutWorker
from grpo_dist.workers.scorer import Task
from tests.models import rebuilt_by_transformers
from tests.processes import spawned
from tests.worker_settings import agent, engine_settings

pytestmark = pytest.mark.ray

LOOP = """
import httpx
from openai import AsyncOpenAI, BadRequestError

from grpo_dist.agents import AgentLoop


class Chat(AgentLoop):
    gives_reward = True

    async def run(self, episode):
        async with episode.endpoint() as (base_url, token):
            assert base_url.startswith("http://127.0.0.2:")
            client = AsyncOpenAI(base_url=base_url, api_key=token, max_retries=0)
            self.index = episode.index
            await getattr(self, episode.row.extra_info["what"])(client, episode)
        episode.reward = 1.0

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
        for wrong in (
            {"n": 2},
            {"response_format": {"type": "json_object"}},
            {"logit_bias": {"5": 100}},
            {"logprobs": True, "top_logprobs": 3},
            {"frequency_penalty": 1.0},
        ):
            try:
                await client.chat.completions.create(model="policy", messages=messages, **wrong)
            except BadRequestError as error:
                assert next(iter(wrong)) in str(error) or "top_logprobs" in str(error), error
            else:
                raise AssertionError(wrong)
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
SAMPLING = SamplingSettings(2, 1.0, 1.0, -1, 100, 11)


@pytest.fixture(scope="module")
def agents(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    file = tmp_path_factory.mktemp("loop") / "chat.py"
    file.write_text(LOOP)
    path = rebuilt_by_transformers(tmp_path_factory.mktemp("model") / "tiny")
    limits = {"max_model_len": 256, "max_num_batched_tokens": 1024}
    loop = agent(f"{file}:Chat", endpoint_kwargs=PARSER, endpoint_host="127.0.0.2")
    settings = engine_settings(path, needs_tokenizer=True, agent=loop, **limits)
    stores = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}  # which the endpoint does not heed
    with spawned("rollout", RolloutWorker, [()], env={"OMP_NUM_THREADS": "1"} | stores) as group:
        group.call(0, "start", "start", settings)
        yield group
        group.call_all("shutdown", "shutdown")


def play(agents: WorkerGroup, what: str) -> tuple[dict[str, Any], DataProto]:
    task = Task("sums", "", {"what": what}, [{"role": "user", "content": "12+34=?"}])
    call = agents.submit(0, "generate", "generate", what, np.array([4, 5], np.int32), SAMPLING, task)
    (label, _, failed), data = agents.gather([call])[0]
    assert failed == []
    return label.small, data


def decoded(ids: torch.Tensor) -> str:
    return transformers.AutoTokenizer.from_pretrained(MODEL).decode(ids)


def rows_of(data: DataProto, *names: str) -> Any:
    return zip(*(data[name].rows() for name in names), strict=True)


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


@pytest.mark.deep
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


@pytest.mark.deep
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


@pytest.mark.deep
def test_every_route_samples_and_what_cannot_be_honoured_is_refused(agents: WorkerGroup) -> None:
    """Nothing is stored or sampled in the background."""
    assert (play(agents, "routes")[0]["reward_extra/lengths"] > 0).all()
    play(agents, "misuse")
