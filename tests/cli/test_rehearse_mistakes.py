"""Mistakes that end a run after its start, or spoil it, and need no GPU: a rehearsal shows them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.assets import resolve_model_path
from tests.models import builtin_reward_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

AGENT = "actor_rollout_ref.rollout.agent"
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    found = '####' in solution_str\n"
BATCH = "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
LOOP = "from grpo_dist.agents import AgentLoop\n\n\nclass Mine(AgentLoop):\n"
ESTIMATOR = "import torch\n\n\ndef mine(batch, config):\n"
TOOL = 'def look(name: str) -> str:\n    """Look it up.\n\n    Args:\n        name: what to look up.\n    """\n'
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
HERMES = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {{ tool | tojson }}\n{% endfor %}{% for m in messages %}"
    "{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
)


@dataclass
class Mistake:
    """What the user has written: files, and the command line; and the part that shows it."""

    line: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] | None = None  # changes of the model's config.json
    template: str | None = None
    rows: list[dict[str, Any]] | None = None


def reward(body: str, *line: str) -> Mistake:
    return Mistake(("custom_reward_function.path=reward.py", *line), {"reward.py": body})


def agent(body: str, *line: str) -> Mistake:
    return Mistake((f"{AGENT}.default_agent_loop=loop.py:Mine", *line), {"loop.py": LOOP + body})


def tool(body: str, *line: str) -> Mistake:
    named = (f"{AGENT}.default_agent_loop=tool_agent", f"{AGENT}.agent_kwargs.tools=[tools.py:look]")
    lengths = ("data.max_prompt_length=600", "data.max_response_length=300")
    line = (*named, f"{AGENT}.agent_kwargs.tool_parser=hermes", *lengths, *line)
    return Mistake(line, {"tools.py": body}, {"max_position_embeddings": 1024}, HERMES)


SAMPLER = """
class Mine:
    def __init__(self, prompts, batch_size, seed):
        self.rows = list(range(batch_size))

    def next_batch(self):
        return self.rows

    def update(self, scores): ...

    def state_dict(self):
        return STATE

    def load_state_dict(self, state):
        self.rows = state["rows"]
"""
TRACKER = """
from grpo_dist.tracking.base import Tracker


class Mine(Tracker):
    def __init__(self, *args, **kwargs): ...

    def log(self, metrics, step):
        raise OSError("full")
"""


def sampler(state: str) -> Mistake:
    line = ("data.sampler.class_path=sampler.py", "data.sampler.class_name=Mine", "data.shuffle=false")
    return Mistake(line, {"sampler.py": SAMPLER.replace("STATE", state)})


def row(question: str, truth: str | None = "4", **extra: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": question}]
    return {"data_source": "arithmetic", "prompt": prompt, "reward_model": {"ground_truth": truth}, "extra_info": extra}


ROWS = [row(f"{i}+{i}=?", str(2 * i)) for i in range(32)]
MISTAKES = {
    "reward: raises on a real answer": reward(f"{REWARD}    return [][0] if found else 0.0\n"),
    "reward: text": reward(f"{REWARD}    return '1.0' if found else 0.0\n"),
    "reward: nan": reward(f"{REWARD}    return float('nan') if found else 0.0\n"),
    "reward: too few scores": reward(f"{BATCH}    return [0.0]\n"),
    "reward: package": reward(f"{REWARD}    if found:\n        import no_such_package\n    return 0.0\n"),
    "reward: extra_info": reward(f"{REWARD}    return extra_info['level'] if found else 0.0\n"),
    "reward: truth is no dict": reward(f"{REWARD}    return float(found and ground_truth['answer'] in solution_str)\n"),
    "reward: hangs": reward(f"{REWARD}    while found:\n        pass\n    return 0.0\n"),
    "reward: never pays": reward(f"{REWARD}    return float(solution_str.endswith('</final>'))\n"),
    "reward: no score": reward(f"{REWARD}    return {{'acc': 1.0}} if found else 0.0\n"),
    "reward: a file": reward(f"{REWARD}    return len(open('words.txt').read()) if found else 0.0\n"),
    "reward: all the same": reward(f"{REWARD}    return 1.0\n"),
    "reward: no such name": reward(f"{REWARD}    return 0.0\n", "custom_reward_function.name=score"),
    "template: no system message": Mistake(
        ("data.system_prompt=Be brief.",),
        template="{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE,
    ),
    "template: takes turns": Mistake(
        template="{% if messages|length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}" + TEMPLATE,
        rows=[row("1+1=?") | {"prompt": [{"role": "user", "content": text} for text in ("a", "b")]} for _ in range(8)],
    ),
    "template: a variable": Mistake(
        ("data.apply_chat_template_kwargs={effort: most}",),
        template="{% if effort not in ['low'] %}{{ raise_exception('no such effort') }}{% endif %}" + TEMPLATE,
    ),
    "template: no tools": replace(tool(f"{TOOL}    return name\n"), template=TEMPLATE),
    "tokenizer: larger than the model": Mistake(config={"vocab_size": 40}),
    "tool: raises": tool(f"{TOOL}    raise OSError('no index')\n"),
    "tool: hangs": tool(f"import time\n{TOOL}    time.sleep(1e6)\n"),
    "tool: no docstring": tool("def look(name: str) -> str:\n    return name\n"),
    "tool: another parser": tool(f"{TOOL}    return name\n", f"{AGENT}.agent_kwargs.tool_parser=mistral"),
    "tool: import": tool(f"import no_such_package\n{TOOL}    return name\n"),
    "agent: constructor": agent(
        "    def __init__(self):\n        raise OSError('no game')\n    async def run(self, episode): ...\n"
    ),
    "agent: no coroutine": agent("    def run(self, episode):\n        return None\n"),
    "agent: no answer": agent("    async def run(self, episode):\n        return None\n"),
    "agent: no reward": agent(
        "    gives_reward = True\n\n    async def run(self, episode):\n        await episode.generate()\n"
    ),
    "agent: hangs": agent(
        "    async def run(self, episode):\n        import asyncio\n        await asyncio.sleep(1e6)\n"
    ),
    "agent: elsewhere": Mistake(
        (f"{AGENT}.default_agent_loop=external", f"{AGENT}.agent_kwargs.url=http://127.0.0.1:9/play")
    ),
    "teacher: does not answer": Mistake(
        (
            "actor_rollout_ref.ref.model.endpoint.base_url=http://127.0.0.1:9/v1",
            "actor_rollout_ref.ref.model.endpoint.model=x",
            "recipe=distill",
        ),
    ),
    "engine: another architecture": Mistake(
        ("actor_rollout_ref.model.enable_gradient_checkpointing=false",),
        config={"model_type": "openai-gpt", "architectures": ["OpenAIGPTLMHeadModel"]},
    ),
    "engine: a keyword": Mistake(("+actor_rollout_ref.rollout.engine_kwargs.vllm.no_such=1",)),
    "model: too few positions": Mistake(("data.max_response_length=900",), config={"max_position_embeddings": 64}),
    "lora: no module": Mistake(
        ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=[no_such]")
    ),
    "estimator: nan where scores are equal": Mistake(
        ("algorithm.adv_estimator=mine.py:mine",),
        {"mine.py": f"{ESTIMATOR}    a = batch.on_tokens(batch.scores / batch.scores.std())\n    return a, a\n"},
    ),
    "loss: wrong shape": Mistake(
        ("actor_rollout_ref.actor.policy_loss.loss_mode=mine.py:mine",),
        {"mine.py": "def mine(batch, config):\n    return batch.log_probs.sum(1), {}\n"},
    ),
    "scorer: two labels": Mistake(("reward_model.enable=true", "reward_model.model.path=scorer")),
    "critic: fewer tokens": Mistake(("recipe=ppo", "critic.model.path=other")),
    "teacher: fewer tokens": Mistake(("recipe=distill", "actor_rollout_ref.ref.model.path=other")),
    "optimizer: a keyword": Mistake(("actor_rollout_ref.actor.optim.override_optimizer_config={no_such: 1}",)),
    "sampler: state": sampler("{'rows': {1, 2}}"),
    "sampler: resume": sampler("{}"),
    "tracker: raises": Mistake(("trainer.logger=[mine.py:Mine]",), {"mine.py": TRACKER}),
    "folder: cannot be written": Mistake(("trainer.default_local_dir=reward.py/run",), {"reward.py": ""}),
    "metric: none of that name": Mistake(("trainer.keep_best_metric=val-core/no/such",)),
    "validation: no truths": Mistake(
        ("data.val_files=val.jsonl",), {"val.jsonl": json.dumps(row("1+1=?", None)) + "\n"}
    ),
    "groups: none differs": reward(f"{REWARD}    return 0.0\n", "algorithm.filter_groups.enable=true"),
}


# A word of what is shown, or the line to look at.
SHOWS = {
    "reward: raises on a real answer": "IndexError",
    "reward: text": "'1.0'",
    "reward: nan": "nan",
    "reward: too few scores": "1",
    "reward: package": "no_such_package",
    "reward: extra_info": "level",
    "reward: truth is no dict": "TypeError",
    "reward: hangs": "reward.timeout_s",
    "reward: never pays": "reward",
    "reward: no score": "score",
    "reward: a file": "words.txt",
    "reward: all the same": "reward",
    "reward: no such name": "score",
    "template: no system message": "no system",
    "template: takes turns": "roles must alternate",
    "template: a variable": "no such effort",
    "template: no tools": "tools",
    "tokenizer: larger than the model": "vocab",
    "tool: raises": "tools",
    "tool: hangs": "tools",
    "tool: no docstring": "look",
    "tool: another parser": "tool",
    "tool: import": "no_such_package",
    "agent: constructor": "no game",
    "agent: no coroutine": "run",
    "agent: no answer": "loop.py",
    "agent: no reward": "reward",
    "agent: hangs": "timeout",
    "agent: elsewhere": "127.0.0.1:9",
    "teacher: does not answer": "127.0.0.1:9",
    "engine: another architecture": "OpenAIGPTLMHeadModel",
    "engine: a keyword": "no_such",
    "model: too few positions": "64",
    "lora: no module": "no_such",
    "estimator: nan where scores are equal": "mine",
    "loss: wrong shape": "mine",
    "scorer: two labels": "2",
    "critic: fewer tokens": "critic.model.path",
    "teacher: fewer tokens": "64",
    "optimizer: a keyword": "no_such",
    "sampler: state": "state_dict",
    "sampler: resume": "rows",
    "tracker: raises": "full",
    "folder: cannot be written": "reward.py/run",
    "metric: none of that name": "val-core/no/such",
    "validation: no truths": "val.jsonl",
    "groups: none differs": "max_num_gen_batches",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_rehearsal_shows_a_mistake(name: str, tmp_path: Path) -> None:
    """It ends with the message, or says where to look."""
    mistake, model = MISTAKES[name], Path(resolve_model_path("builtin:tiny-qwen3"))
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    if mistake.config is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | mistake.config))
    if mistake.template is not None:
        (folder / "chat_template.jinja").write_text(mistake.template)
    if "scorer" in name:
        builtin_reward_model(tmp_path / "scorer")
        config = json.loads((tmp_path / "scorer/config.json").read_text())
        (tmp_path / "scorer/config.json").write_text(json.dumps(config | {"id2label": {"0": "bad", "1": "good"}}))
    if "other" in str(mistake.line):
        shutil.copytree(model, tmp_path / "other")
        config = json.loads((tmp_path / "other/config.json").read_text())
        (tmp_path / "other/config.json").write_text(json.dumps(config | {"vocab_size": 64}))
    for file, text in mistake.files.items():
        (tmp_path / file).write_text(text)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in mistake.rows or ROWS))
    sizes = (
        "data.train_batch_size=8",
        "data.max_prompt_length=200",
        "data.max_response_length=100",
        "data.val_files=rows.jsonl",
    )
    line = ["actor_rollout_ref.model.path=model", "data.train_files=rows.jsonl", *sizes, *mistake.line]
    done = subprocess.run(
        [sys.executable, "-m", "grpo_dist", "rehearse", "--json", *line],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    said = [text for text in done.stdout.splitlines() if text.startswith("[{")]
    parts = json.loads(said[-1]) if said else []
    shown = [f"{part['name']}: {part['text']}" for part in parts if part["state"] != "ok"]
    told = "\n".join([*shown, done.stderr if done.returncode else ""])
    assert SHOWS[name] in told, done.stdout + done.stderr
    assert "Traceback (most" not in done.stderr, done.stderr
