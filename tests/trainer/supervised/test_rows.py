"""What the commands train a model on: its rows, known by content and order, and shared out whole."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_dist.algorithms.settings import LabelSettings, PreferenceSettings, SFTSettings
from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import check_model_folder, load_tokenizer
from grpo_dist.config.load import load_command
from grpo_dist.data.training_rows import Pair, TrainingExample
from grpo_dist.errors import DataError
from grpo_dist.plan.commands import REWARD_MODEL, SFT
from grpo_dist.trainer.supervised.rows import KINDS, Rows, new_sampler, rank_shares, total_steps
from grpo_dist.trainer.supervised.rows import load as load_rows
from tests.messages import refuses, says
from tests.models import builtin_reward_model

PAIR = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
LABELLED = {"prompt": "1+1?", "completions": ["1+1=2", "#### 2"], "labels": [True, True]}
CHAT = {"prompt": "1+1?", "completion": "2"}


TINY = "builtin:tiny-qwen3"


def load(tmp_path: Path, *overrides: str, command: Any = REWARD_MODEL, path: str = TINY, **files: list[dict]) -> Rows:
    """Rows of files for training and validation, of which there is nothing to note."""
    for name, written in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    named = [f"data.{name}_files={tmp_path}/{name}.jsonl" for name in files]
    config, _ = load_command([*named, "data.max_length=64", "data.train_batch_size=1", *overrides], command)
    model = check_model_folder(resolve_model_path(path), setting=f"model.path={path}", trust_remote_code=False)
    rows, _, notes = load_rows(config, model, None)  # type: ignore[misc]
    assert notes == []
    return rows


@pytest.mark.parametrize(
    ("row", "command", "objective", "kind"),
    [
        (PAIR, REWARD_MODEL, PreferenceSettings(), "pairs"),
        (LABELLED, REWARD_MODEL, LabelSettings(), "steps"),
        (CHAT, SFT, SFTSettings(), "conversations"),
    ],
)
def test_the_rows_say_what_the_loss_is(tmp_path: Path, row: dict, command: Any, objective: Any, kind: str) -> None:
    rows = load(tmp_path, "data.train_max_samples=2", train=[row] * 3, val=[row], command=command)
    assert (len(rows.train), len(rows.validation)) == (2, 1)
    assert rows.kind.objective == objective
    says(rows.kind.named, kind)
    (part,) = rank_shares(rows.train, 1, rows.kind.marks)
    assert len(part) == (4 if row is PAIR else 2), "a pair is two sequences"


@pytest.mark.parametrize(("padding", "judged_at"), [(None, "<|im_end|>"), ("<|im_end|>", "2")])
def test_labels_are_where_the_score_of_the_model_is_read(tmp_path: Path, padding: str | None, judged_at: str) -> None:
    """By the padding token of its config.json, of a template that ends in the end of sequence."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
    folder = Path(builtin_reward_model(tmp_path / "scorer", template))
    tokenizer = load_tokenizer(str(folder), trust_remote_code=False)
    config = json.loads((folder / "config.json").read_text())
    token_id = padding and tokenizer.convert_tokens_to_ids(padding)
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": token_id}))
    for row in (PAIR, LABELLED, {"prompt": "1+1?", "completions": ["2"], "labels": [True]}):
        (example,) = load(tmp_path, train=[row], path=str(folder)).train
        judged = example.responses[0][example.marks[0] == 1]  # the last of them
        assert tokenizer.decode(judged[-1:]) == judged_at


def test_rows_of_two_kinds_are_refused(tmp_path: Path) -> None:
    files = [f"data.{name}_files={tmp_path}/{name}.jsonl" for name in ("train", "val")]
    for train, val in ((PAIR, LABELLED), (LABELLED, PAIR)):
        with refuses(DataError, *files, "chosen, rejected", "completions, labels"):
            load(tmp_path, train=[train], val=[val])


# --- rows by hand
def pair(number: int, lengths: tuple[int, int] = (2, 3), prompt: int = 4) -> TrainingExample:
    """Tokens that no other pair has."""
    responses = [np.arange(length, dtype=np.int32) + 10 * number + 3 for length in lengths]
    labels = [np.array([-1] * (length - 1) + [good], np.int8) for length, good in zip(lengths, (1, 0), strict=True)]
    return TrainingExample(f"rows.jsonl, line {number}", np.full(prompt, number, np.int32), responses, labels)


def rows_of(*examples: TrainingExample) -> Rows:
    return Rows(examples, (), KINDS[Pair])


def test_rows_are_known_by_all_tokens_all_labels_and_their_order() -> None:
    first, second = pair(1), pair(2)
    same = rows_of(first, second).identity
    assert (same["count"], rows_of(pair(1), pair(2)).identity) == (2, same)
    elsewhere = replace(first, location="other.jsonl, line 7")
    assert rows_of(elsewhere, second).identity == same, "positions mean the same rows"
    changed = [
        replace(first, prompt=first.prompt + 1),
        replace(first, responses=[first.responses[0], first.responses[1] + 1]),
        replace(first, marks=first.marks[::-1]),
        replace(first, prompt=first.prompt[:-1], responses=[np.append(first.prompt[-1:], r) for r in first.responses]),
    ]
    found = [rows_of(each, second).identity for each in changed]
    found += [rows_of(second, first).identity, rows_of(first).identity, rows_of(first, second, second).identity]
    assert all(each != same for each in found)
    assert len({each["fingerprint"] for each in found}) == len(found)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_a_pair_stays_together_on_any_number_of_ranks(ranks: int) -> None:
    """Also where ranks have no rows, and where one row is as long as all others."""
    examples = [pair(number, (1 + number % 3, 50 if number == 3 else 2)) for number in range(1, 7)]
    parts = rank_shares(examples, ranks, "labels")
    assert len(parts) == ranks
    uids = [part["uid"].tolist() if len(part) else [] for part in parts]
    assert all(mine.count(uid) == 2 for mine in uids for uid in mine)
    tokens = [tuple(row.tolist()) for part in parts if len(part) for row in part["responses"].rows()]
    assert sorted(tokens) == sorted(tuple(response.tolist()) for each in examples for response in each.responses)
    assert sum(bool(mine) for mine in uids) == min(ranks, len(examples)), "no rank idles while another has two"
    equal = [pair(number, (5, 5)) for number in range(ranks * 2)]
    assert [len(part) for part in rank_shares(equal, ranks, "labels")] == [4] * ranks, "shares cost about the same"


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [((), 3), (("trainer.total_epochs=4",), 12), (("trainer.total_training_steps=5", "trainer.total_epochs=4"), 5)],
)
def test_the_number_of_steps(overrides: tuple[str, ...], steps: int) -> None:
    config, _ = load_command(["data.train_batch_size=3", *overrides], REWARD_MODEL)
    assert total_steps(config, rows_of(*map(pair, range(10)))) == steps
    with refuses(DataError, "data.train_batch_size=3", "2 rows"):
        total_steps(config, rows_of(pair(1), pair(2)))


def test_the_order_is_that_of_the_seed_or_of_the_files() -> None:
    ten = rows_of(*map(pair, range(10)))

    def order(*overrides: str) -> list[int]:
        config, _ = load_command(["data.train_batch_size=5", *overrides], REWARD_MODEL)
        sampler = new_sampler(config, ten)
        return [*sampler.next_batch(), *sampler.next_batch()]

    assert order("data.shuffle=false") == list(range(10))
    assert sorted(order()) == list(range(10))
    assert order() == order("data.seed=1") != order("trainer.seed=2")
