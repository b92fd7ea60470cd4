"""When the reward model is retrained, and on what; with groups that only write down what they are asked."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from grpo_dist.algorithms.settings import LabelSettings
from grpo_dist.assets import resolve_model_path
from grpo_dist.errors import DataError
from grpo_dist.plan.commands import load_config
from grpo_dist.protocol import DataProto, Mean, Sum
from grpo_dist.trainer.retraining import Retraining
from tests.messages import refuses, says
from tests.models import builtin_reward_model

RETRAIN = "reward_model.retrain"
MODEL = "builtin:tiny-qwen3"


class Ranks:
    def __init__(self) -> None:
        self.workers, self.steps, self.parts, self.told = [None, None], [], [], []  # type: ignore[var-annotated]

    async def train(self, parts: list[DataProto], objective: object, step: int) -> dict[str, Any]:
        assert objective == LabelSettings()
        self.parts += [part for part in parts if len(part)]
        self.steps.append((step, [str(uid).partition(": ")[2] for part in parts if len(part) for uid in part["uid"]]))
        return {"reward_model/loss": Sum(float(len(self.steps))), "reward_model/accuracy": Mean(1.0, 2)}


SIX = tuple(f"#### {i}" for i in range(6))


def retraining(tmp_path: Path, *overrides: str, answers: Sequence[str] = SIX, model: str = MODEL) -> Any:
    """Each step samples these answers to a question of its own, the even ones right; steps of one end in a |."""
    keys = ("recipe=deepseekmath_iterative", f"reward_model.model.path={model}", "reward_model.replay_share=0.5")
    often = (f"{RETRAIN}.freq=2", f"{RETRAIN}.train_batch_size=8", f"trainer.default_local_dir={tmp_path}")
    config, ranks = load_config([*keys, *often, *overrides])[0], Ranks()

    async def write(batch: Any, path: str, conversations: dict[str, Any]) -> None:
        Path(path).parent.mkdir(exist_ok=True)
        with Path(path).open("w") as file:
            for i, steps in enumerate(answer.split("|") for answer in answers):
                row = {"prompt": conversations["p"], "completions": steps, "labels": [i % 2 == 0] * len(steps)}
                file.write(json.dumps(row) + "\n")

    reward: Any = SimpleNamespace(write_judged=write)
    return Retraining(config, ranks, reward, ranks.told.append), ranks  # type: ignore[arg-type]


def end(made: Retraining, step: int, question: str | None = None) -> dict[str, float]:
    task = SimpleNamespace(messages=[{"role": "user", "content": question or f"{step}+1=?"}])
    return asyncio.run(made.end_step(step, None, [SimpleNamespace(uid="p", task=task)]))  # type: ignore[arg-type, list-item]


def test_after_each_iteration_on_its_responses_and_a_share_of_those_before(tmp_path: Path) -> None:
    """12 rows in the first, 12 + 6 in the second, 8 a batch, twice over; a mean over the optimizer steps."""
    made, ranks = retraining(tmp_path, f"{RETRAIN}.train_epochs=2")
    assert (end(made, 1), ranks.steps) == ({}, [])
    first = end(made, 2)
    assert [(step, len(rows)) for step, rows in ranks.steps] == [(2, 8), (2, 4), (2, 8), (2, 4)]
    assert first["reward_model/loss"] == pytest.approx((1 + 2 + 3 + 4) / 4)
    assert (first["reward_model/fresh_rows"], first["reward_model/replayed_rows"]) == (12, 0)
    epochs = [sorted(row for _, rows in ranks.steps[i : i + 2] for row in rows) for i in (0, 2)]
    assert epochs[0] == epochs[1], "each row once an epoch"
    assert ranks.steps[0] != ranks.steps[2], "in another order"
    end(made, 3)
    second = end(made, 4)
    assert [(step, len(rows)) for step, rows in ranks.steps[4:]] == [(4, 8), (4, 8), (4, 2)] * 2
    assert (second["reward_model/fresh_rows"], second["reward_model/replayed_rows"]) == (12, 6)


def test_a_resumed_run_trains_on_the_same_rows(tmp_path: Path) -> None:
    whole, never_stopped = retraining(tmp_path)
    for step in range(1, 5):
        end(whole, step)
    again, ranks = retraining(tmp_path)
    again.resumed_from(tmp_path / "global_step_3", 3)
    end(again, 4)
    assert ranks.steps == never_stopped.steps[2:]
    elsewhere, _ = retraining(tmp_path / "elsewhere")
    elsewhere.resumed_from(tmp_path / "global_step_3", 3)
    assert sorted(file.name for file in tmp_path.glob("elsewhere/replay/*")) == ["1.jsonl", "2.jsonl", "3.jsonl"]
    (tmp_path / "replay" / "1.jsonl").unlink()
    with refuses(DataError, "reward_model.replay_share", "replay/1.jsonl", "step 1"):
        again.resumed_from(tmp_path / "global_step_3", 3)
    without, _ = retraining(tmp_path, "reward_model.replay_share=0")
    without.resumed_from(tmp_path / "global_step_3", 3)
    (tmp_path / "replay" / "3.jsonl").unlink()
    with refuses(DataError, "replay/3.jsonl"):
        without.resumed_from(tmp_path / "global_step_3", 3)


def counted(found: dict[str, float]) -> list[int]:
    return [int(found[f"reward_model/{name}_rows"]) for name in ("fresh", "repeated", "long", "unusable")]


def test_long_responses_are_left_out_and_counted(tmp_path: Path) -> None:
    """All of them, too: a policy that does not end its responses any more does not end the run."""
    every_step = (f"{RETRAIN}.freq=1", "reward_model.max_length=60")
    made, ranks = retraining(tmp_path, *every_step, answers=["#### 1", "#### " + "1 + " * 60])
    assert counted(end(made, 1)) == [2, 0, 1, 0]
    assert ([len(rows) for _, rows in ranks.steps], ranks.told) == ([1], [])
    made, ranks = retraining(tmp_path, *every_step, answers=["#### " + "1 + " * 60])
    found = end(made, 1)
    assert (counted(found), "reward_model/loss" in found, ranks.steps) == ([1, 0, 1, 0], False, [])
    says(ranks.told, "reward_model.retrain", "long_rows 1", "reward_model.max_length=60")


def test_a_policy_that_repeats_itself_is_told(tmp_path: Path) -> None:
    """A conversation counts in the iteration that had it first; a half of those before is trained on again."""
    made, ranks = retraining(tmp_path, f"{RETRAIN}.freq=1")
    assert (counted(end(made, 1, "q")), ranks.told) == ([6, 0, 0, 0], [])
    found = end(made, 2, "q")
    assert counted(found) == [0, 6, 0, 0]
    assert (found["reward_model/replayed_rows"], [len(rows) for _, rows in ranks.steps]) == (3, [6, 3])
    says(ranks.told, "reward_model.retrain", "fresh_rows 0", "repeated_rows 6")


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}"


def scorer(folder: Path, template: str, **changes: object) -> str:
    """A reward model with this chat template, a token for a line break with a semicolon, and changes of its config."""
    found = Path(builtin_reward_model(folder, template))
    tokenizer = transformers.AutoTokenizer.from_pretrained(found)
    tokenizer.add_tokens(["\n;"])
    tokenizer.save_pretrained(found)
    config = json.loads((found / "config.json").read_text())
    (found / "config.json").write_text(json.dumps(config | changes))
    return str(found)


def test_steps_that_share_a_token_are_left_out_and_counted(tmp_path: Path) -> None:
    """The policy may write them, and both are scored at that token, where there cannot be two labels."""
    model = scorer(tmp_path / "judge", TURNS + "{% endfor %}")
    process = ("algorithm.adv_estimator=grpo_process", "reward_model.process.enable=true", f"{RETRAIN}.freq=1")
    made, ranks = retraining(tmp_path, *process, answers=["a|b", "a|;"], model=model)
    assert counted(end(made, 1)) == [2, 0, 0, 1]
    assert ([len(rows) for _, rows in ranks.steps], ranks.told) == ([1], [])
    made, ranks = retraining(tmp_path, *process, answers=["a|;"], model=model)
    assert (counted(end(made, 1)), ranks.steps) == ([1, 0, 0, 1], [])
    says(ranks.told, "unusable_rows 1", "1.jsonl", "completions")


def test_the_label_is_where_the_score_is_read(tmp_path: Path) -> None:
    """Of a template that ends in the end of sequence, and a model whose padding token that is: before it."""
    policy = transformers.AutoTokenizer.from_pretrained(resolve_model_path(MODEL))
    template = TURNS + "{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    model = scorer(tmp_path / "scorer", template, pad_token_id=policy.eos_token_id)
    made, ranks = retraining(tmp_path, f"{RETRAIN}.freq=1", answers=["#### 3"], model=model)
    end(made, 1)
    part = ranks.parts[0]
    ids = [*part["prompts"].rows()[0], *part["responses"].rows()[0]]
    assert policy.decode(ids) == "<user>1+1=?<assistant>#### 3"
    assert part["labels"].rows()[0].tolist() == [1], "at the last of them"
