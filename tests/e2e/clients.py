"""`PYTHON clients.py CLIENT BASE_URL TOKEN`: a client against the endpoint of test_clients.py; a line for each case."""

import asyncio
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

os.environ |= {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}
SUM = "What is 2+3?"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
SCHEMA |= {"required": ["a", "b"], "additionalProperties": False}
ADD = {"name": "add", "description": "Add.", "parameters": SCHEMA, "strict": True}
CHAT_TOOL: Any = {"type": "function", "function": ADD}
Cases = dict[str, Callable[[], Any]]


def in_openais_form(create: Callable[..., Any]) -> Cases:
    """Of a function that creates a completion of messages."""
    user: list[Any] = [{"role": "user", "content": SUM}]

    def with_tools(**more: Any) -> str:
        made = create(messages=user, tools=[CHAT_TOOL], **more).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in made.tool_calls]
        said = [*user, made.model_dump(exclude_none=True), *results]
        return str(create(messages=said, tools=[CHAT_TOOL], **more).choices[0].message.content)

    def stream() -> str:
        chunks = create(messages=user, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    return {
        "stream": stream,
        "strict tools": with_tools,
        "parallel_tool_calls=False": lambda: with_tools(parallel_tool_calls=False),
    }


def of_openai(url: str, token: str) -> Cases:
    import openai

    client = openai.OpenAI(base_url=url, api_key=token, max_retries=0)
    user: list[Any] = [{"role": "user", "content": SUM}]
    create = functools.partial(client.chat.completions.create, model="policy")

    def calls(**more: Any) -> int:
        twice = [{"role": "user", "content": f"{SUM} Call twice."}]
        return len(create(messages=twice, tools=[CHAT_TOOL], **more).choices[0].message.tool_calls)

    def responses() -> str:
        tool: Any = {"type": "function", **ADD}
        made = client.responses.create(model="policy", input=user, tools=[tool], parallel_tool_calls=False).output
        output = {"type": "function_call_output", "call_id": made[0].call_id, "output": "5"}
        said = [*user, made[0].model_dump(exclude_none=True), output]
        return str(client.responses.create(model="policy", input=said, tools=[tool]).output_text)

    return in_openais_form(create) | {
        "two calls": lambda: "5" if (calls(), calls(parallel_tool_calls=False)) == (2, 1) else "not 2 and 1",
        "responses": responses,
        "refused: tool_choice": lambda: create(messages=user, tools=[CHAT_TOOL], tool_choice="required"),
        "refused: response_format": lambda: create(messages=user, response_format={"type": "json_object"}),
    }


def of_litellm(url: str, token: str) -> Cases:
    import litellm

    named = {"model": "openai/policy", "base_url": url, "api_key": token, "num_retries": 0}
    return in_openais_form(functools.partial(litellm.completion, **named))


def of_langchain(url: str, token: str) -> Cases:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    common: dict[str, Any] = {"model": "policy", "api_key": token, "max_retries": 0}
    models = {
        "chat": ChatOpenAI(base_url=url, **common),
        "responses": ChatOpenAI(base_url=url, use_responses_api=True, **common),
        "messages": ChatAnthropic(base_url=url.removesuffix("/v1"), max_tokens=300, **common),
    }

    def with_tools(model: Any, **more: Any) -> str:
        tool = {"name": "add", "description": "Add.", "input_schema": SCHEMA} if "strict" not in more else CHAT_TOOL
        bound, said = model.bind_tools([tool], **more), [HumanMessage(SUM)]
        said += [bound.invoke(said)]
        said += [ToolMessage("5", tool_call_id=call["id"]) for call in said[-1].tool_calls]
        return str(bound.invoke(said).text)

    return {
        "stream": lambda: "".join(str(part.text) for part in models["chat"].stream(SUM)),
        "strict tools": lambda: with_tools(models["chat"], strict=True),
        "parallel_tool_calls=False": lambda: with_tools(models["chat"], strict=True, parallel_tool_calls=False),
        "responses with strict tools": lambda: with_tools(models["responses"], strict=True),
        "messages with tools": lambda: with_tools(models["messages"]),
    }


def of_openai_agents(url: str, token: str) -> Cases:
    import agents
    from openai import AsyncOpenAI

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    def run(model_class: Any, **settings: Any) -> str:
        model = model_class("policy", AsyncOpenAI(base_url=url, api_key=token, max_retries=0))
        agent = agents.Agent("adder", tools=[add], model=model, model_settings=agents.ModelSettings(**settings))
        return str(asyncio.run(agents.Runner.run(agent, SUM)).final_output)

    return {
        "strict tools": lambda: run(agents.OpenAIChatCompletionsModel),
        "parallel_tool_calls=False": lambda: run(agents.OpenAIChatCompletionsModel, parallel_tool_calls=False),
        "responses": lambda: run(agents.OpenAIResponsesModel),
    }


def of_anthropic(url: str, token: str) -> Cases:
    import anthropic

    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=token, max_retries=0)
    user: list[Any] = [{"role": "user", "content": SUM}]
    tool: Any = {"name": "add", "description": "Add.", "input_schema": SCHEMA, "strict": True}

    def create(said: list[Any], **more: Any) -> Any:
        return client.messages.create(model="policy", max_tokens=300, messages=said, **more)

    def with_tools(**more: Any) -> str:
        made = create(user, tools=[tool], **more).content
        used = [block for block in made if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "5"} for block in used]
        said = [*user, {"role": "assistant", "content": [block.model_dump() for block in used]}]
        return str(create([*said, {"role": "user", "content": results}], tools=[tool], **more).content[0].text)

    def stream() -> str:
        with client.messages.stream(model="policy", max_tokens=300, messages=user) as parts:
            return "".join(parts.text_stream)

    return {
        "stream": stream,
        "strict tools": with_tools,
        "one call": lambda: with_tools(tool_choice={"type": "auto", "disable_parallel_tool_use": True}),
        "refused: tool_choice": lambda: create(user, tools=[tool], tool_choice={"type": "any"}),
    }


def of_pydantic_ai(url: str, token: str) -> Cases:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url, api_key=token)
    there = AnthropicProvider(base_url=url.removesuffix("/v1"), api_key=token)

    def run(model: Any, **settings: Any) -> str:
        agent = Agent(model, model_settings={"max_tokens": 300, **settings})

        @agent.tool_plain(strict=True)
        def add(a: int, b: int) -> int:
            """Add."""
            return a + b

        return str(agent.run_sync(SUM).output)

    chat = OpenAIChatModel("policy", provider=provider)
    return {
        "strict tools": lambda: run(chat),
        "parallel_tool_calls=False": lambda: run(chat, parallel_tool_calls=False),
        "responses": lambda: run(OpenAIResponsesModel("policy", provider=provider)),
        "messages": lambda: run(AnthropicModel("policy", provider=there)),
    }


def of_instructor(url: str, token: str) -> Cases:
    import instructor
    import openai
    from pydantic import BaseModel

    class Sum(BaseModel):
        a: int
        b: int

    def ask(mode: Any) -> Any:
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key=token, max_retries=0), mode=mode)
        user: list[Any] = [{"role": "user", "content": SUM}]
        return client.create(model="policy", response_model=Sum, messages=user, max_retries=0)

    return {
        "refused: tool_choice": lambda: ask(instructor.Mode.TOOLS),
        "refused: response_format": lambda: ask(instructor.Mode.JSON),
    }


def of_smolagents(url: str, token: str) -> Cases:
    from smolagents import OpenAIServerModel, tool

    @tool
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: A number.
            b: A number.
        """
        return a + b

    user = [{"role": "user", "content": [{"type": "text", "text": SUM}]}]

    def generated(**more: Any) -> Any:
        return OpenAIServerModel("policy", api_base=url, api_key=token, **more).generate(user, tools_to_call_from=[add])

    def with_tools() -> str:
        arguments = generated(tool_choice="auto").tool_calls[0].function.arguments
        return str(add(**json.loads(arguments)))

    return {
        "tools, tool_choice=auto": with_tools,
        "refused: tool_choice": generated,  # its own default
    }


def main(client: str, url: str, token: str) -> None:
    """Play all cases of a client: `refused: KEY` raises an error that names the key, every other one answers 5."""
    cases: Cases = globals()[f"of_{client}"](url, token)
    for name, play in cases.items():
        key = name.partition("refused: ")[2]
        try:
            said = play()
            fault = "" if said == "5" and not key else f"answered {said!r}"
        except Exception as error:
            fault = "" if key and key in str(error) else traceback.format_exc()
        print(json.dumps([name, fault]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
