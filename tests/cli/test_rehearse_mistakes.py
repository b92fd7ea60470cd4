"""Mistakes that end a run after its start, or spoil it, and need no GPU: a rehearsal shows them."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.assets import resolve_model_path

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

AGENT, REF = "actor_rollout_ref.rollout.agent", "actor_rollout_ref.ref.model"
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    found = '####' in solution_str\n"
BATCH = "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
LOOP = "from grpo_dist.agents import AgentLoop\n\n\nclass Mine(AgentLoop):\n"
TOOL = 'def look(name: str) -> str:\n    """Look it up.\n\n    Args:\n        name: what to look up.\n    """\n'
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
HERMES = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {{ tool | tojson }}\n{% endfor %}{% for m in messages %}"
    "{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
)


@dataclass
class Mistake:
    """What the user has written: the command line, files, ...; and a word of what is shown."""

    shows: str
    line: str = ""
    files: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)  # changes of the model's config.json
    template: str | None = None
    rows: list[dict[str, Any]] | None = None


def reward(shows: str, body: str, line: str = "", head: str = REWARD) -> Mistake:
    return Mistake(shows, f"custom_reward_function.path=reward.py {line}", {"reward.py": f"{head}    {body}\n"})


def agent(shows: str, body: str) -> Mistake:
    return Mistake(shows, f"{AGENT}.default_agent_loop=loop.py:Mine", {"loop.py": f"{LOOP}    {body}\n"})


def tool(shows: str, body: str = "return name", parser: str = "hermes", head: str = TOOL) -> Mistake:
    line = f"{AGENT}.default_agent_loop=tool_agent {AGENT}.agent_kwargs.tools=[tools.py:look] "
    line += f"{AGENT}.agent_kwargs.tool_parser={parser} data.max_prompt_length=600 data.max_response_length=300"
    return Mistake(shows, line, {"tools.py": f"{head}    {body}\n"}, {"max_position_embeddings": 1024}, HERMES)


def template(shows: str, condition: str, line: str = "", rows: list[dict[str, Any]] | None = None) -> Mistake:
    text = f"{{% if {condition} %}}{{{{ raise_exception('{shows}') }}}}{{% endif %}}"
    return Mistake(shows, line, template=text + TEMPLATE, rows=rows)


TRACKER = """
from grpo_dist.tracking.base import Tracker


class Mine(Tracker):
    def __init__(self, *args, **kwargs): ...

    def log(self, metrics, step):
        raise OSError("full")
"""


def row(question: str, truth: str | None = "4", **extra: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": question}]
    return {"data_source": "arithmetic", "prompt": prompt, "reward_model": {"ground_truth": truth}, "extra_info": extra}


ROWS = [row(f"{i}+{i}=?", str(2 * i)) for i in range(32)]
TURNS = [row("1+1=?") | {"prompt": [{"role": "user", "content": text} for text in "ab"]} for _ in range(8)]
NO_TRUTH = json.dumps(row("1+1=?", None)) + "\n"
MISTAKES = {
    "reward: raises on a real answer": reward("IndexError", "return [][0] if found else 0.0"),
    "reward: text": reward("'1.0'", "return '1.0' if found else 0.0"),
    "reward: nan": reward("nan", "return float('nan') if found else 0.0"),
    "reward: too few scores": reward("1", "return [0.0]", head=BATCH),
    "reward: package": reward("no_such_package", "if found:\n        import no_such_package\n    return 0.0"),
    "reward: extra_info": reward("level", "return extra_info['level'] if found else 0.0"),
    "reward: truth is no dict": reward("TypeError", "return float(found and ground_truth['answer'] in solution_str)"),
    "reward: hangs": reward("reward.timeout_s", "while found:\n        pass\n    return 0.0"),
    "reward: never pays": reward("reward", "return float(solution_str.endswith('</final>'))"),
    "reward: no score": reward("score", "return {'acc': 1.0} if found else 0.0"),
    "reward: a file": reward("words.txt", "return len(open('words.txt').read()) if found else 0.0"),
    "reward: all the same": reward("reward", "return 1.0"),
    "template: no system message": template("no system", "messages[0].role == 'system'", "data.system_prompt=Brief."),
    "template: takes turns": template("roles must alternate", "messages|length > 1", rows=TURNS),
    "template: a variable": template(
        "no such effort", "effort not in ['low']", "data.apply_chat_template_kwargs={effort:most}"
    ),
    "template: no tools": replace(tool("tools"), template=TEMPLATE),
    "tokenizer: larger than the model": Mistake("vocab", config={"vocab_size": 40}),
    "tool: raises": tool("tools", "raise OSError('no index')"),
    "tool: hangs": tool("tools", "time.sleep(1e6)", head=f"import time\n{TOOL}"),
    "tool: no docstring": tool("look", head="def look(name: str) -> str:\n"),
    "tool: another parser": tool("tool", parser="mistral"),
    "tool: import": tool("no_such_package", head=f"import no_such_package\n{TOOL}"),
    "agent: constructor": agent(
        "no game", "def __init__(self):\n        raise OSError('no game')\n    async def run(self, episode): ..."
    ),
    "agent: no coroutine": agent("run", "def run(self, episode):\n        return None"),
    "agent: no answer": agent("loop.py", "async def run(self, episode):\n        return None"),
    "agent: no reward": agent(
        "reward", "gives_reward = True\n\n    async def run(self, episode):\n        await episode.generate()"
    ),
    "agent: hangs": agent(
        "timeout", "async def run(self, episode):\n        import asyncio\n        await asyncio.sleep(1e6)"
    ),
    "agent: elsewhere": Mistake(
        "127.0.0.1:9", f"{AGENT}.default_agent_loop=external {AGENT}.agent_kwargs.url=http://127.0.0.1:9/play"
    ),
    "teacher: does not answer": Mistake(
        "127.0.0.1:9", f"{REF}.endpoint.base_url=http://127.0.0.1:9/v1 {REF}.endpoint.model=x recipe=distill"
    ),
    "engine: another architecture": Mistake(
        "OpenAIGPTLMHeadModel",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        config={"model_type": "openai-gpt", "architectures": ["OpenAIGPTLMHeadModel"]},
    ),
    "engine: a keyword": Mistake("no_such", "+actor_rollout_ref.rollout.engine_kwargs.vllm.no_such=1"),
    "model: too few positions": Mistake("64", "data.max_response_length=900", config={"max_position_embeddings": 64}),
    "lora: no module": Mistake(
        "no_such", "actor_rollout_ref.model.lora_rank=4 actor_rollout_ref.model.target_modules=[no_such]"
    ),
    "tracker: raises": Mistake("full", "trainer.logger=[mine.py:Mine]", {"mine.py": TRACKER}),
    "metric: none of that name": Mistake("val-core/no/such", "trainer.keep_best_metric=val-core/no/such"),
    "validation: no truths": Mistake("val.jsonl", "data.val_files=val.jsonl", {"val.jsonl": NO_TRUTH}),
    "groups: none differs": reward("max_num_gen_batches", "return 0.0", "algorithm.filter_groups.enable=true"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_rehearsal_shows_a_mistake(name: str, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    folder = Path(shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | mistake.config))
    if mistake.template is not None:
        (folder / "chat_template.jinja").write_text(mistake.template)
    for file, text in mistake.files.items():
        (tmp_path / file).write_text(text)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in mistake.rows or ROWS))
    sizes = "data.train_batch_size=8", "data.max_prompt_length=200", "data.max_response_length=100"
    rows = "data.train_files=rows.jsonl", "data.val_files=rows.jsonl"
    line = ["--json", "actor_rollout_ref.model.path=model", *rows, *sizes, *mistake.line.split()]
    command = [sys.executable, "-m", "grpo_dist", "rehearse", *line]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = [text for text in done.stdout.splitlines() if text.startswith("[{")]
    parts = json.loads(said[-1]) if said else []
    shown = [f"{part['name']}: {part['text']}" for part in parts if part["state"] != "ok"]
    told = "\n".join([*shown, done.stderr if done.returncode else ""])
    assert mistake.shows in told, done.stdout + done.stderr
    assert "Traceback (most" not in done.stderr, done.stderr
