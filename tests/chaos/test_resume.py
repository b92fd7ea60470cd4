"""A checkpoint taken up where it is hardest: on another number of ranks, and with groups sampled ahead."""

import json
import re
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load

from grpo_dist.protocol import DataProto
from tests.chaos.driver import Fault
from tests.chaos.runs import STEPS, STEPS_PER_EPOCH, Outcome, train
from tests.shards import all_tensors

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1500)]
AHEAD = ["trainer.max_staleness=1"]


def test_on_another_number_of_ranks(main_run: Outcome, tmp_path: Path) -> None:
    """The run had two actor ranks; its checkpoint at the end of an epoch goes on with one."""
    found = list((main_run.run_dir / f"global_step_{STEPS_PER_EPOCH}" / "actor").glob("__*_0.distcp"))
    assert len(found) == 2, "two ranks wrote it"
    outcome = go_on(main_run, STEPS_PER_EPOCH, tmp_path, "cluster.actor_world_size=1")
    assert outcome.rewards() == main_run.rewards()[STEPS_PER_EPOCH:]
    ours, theirs = load(outcome.weights), load(main_run.weights)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        np.testing.assert_allclose(weight, theirs[name], rtol=1e-4, atol=1e-6, err_msg=name)


def go_on(before: Outcome, step: int, folder: Path, *overrides: str) -> Outcome:
    """A run that goes on in a folder of its own from a checkpoint of another one."""
    name = f"global_step_{step}"
    shutil.copytree(before.run_dir / name, folder / "run" / name)
    outcome = train(folder, [], *overrides)
    assert f"resumed from {outcome.run_dir}/{name}" in outcome.log
    return outcome


def test_from_4_ranks_to_2_to_1_and_from_one_process_of_an_engine_to_2(tmp_path: Path) -> None:
    """What is loaded are the saved weights, bit by bit; two processes may sample otherwise where a token turns over."""
    four = train(tmp_path / "four", [], "cluster.actor_world_size=4", "trainer.total_training_steps=5")
    assert len(list((four.run_dir / "global_step_2" / "actor").glob("__*_0.distcp"))) == 4, "four ranks wrote it"
    until_3 = "trainer.total_training_steps=3"
    two = go_on(four, 2, tmp_path / "two", "cluster.actor_world_size=2", until_3)
    assert texts(two, 3) == texts(four, 3)
    assert two.rewards() == four.rewards()[2:3]
    narrow = ["cluster.actor_world_size=1", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    loaded = load(go_on(two, 3, tmp_path / "loaded", *narrow, until_3).weights)
    saved = all_tensors(two.run_dir / "global_step_3" / "actor")
    assert set(loaded) == {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    for name, weight in loaded.items():
        assert torch.equal(weight, saved[f"model.{name}"]), name
    one = go_on(two, 3, tmp_path / "one", *narrow, "trainer.total_training_steps=5")
    same = [ours == theirs for ours, theirs in zip(texts(one, 4), texts(four, 4), strict=True)]
    assert sum(same) >= 0.9 * len(same)
    assert [step for step, _ in one.rewards()] == [4, 5]
    rewards = [[score for _, score in run.rewards()[-2:]] for run in (one, four)]
    assert sum(rewards[0]) == pytest.approx(sum(rewards[1]), abs=0.2)


def texts(outcome: Outcome, step: int) -> list[tuple[str, str]]:
    """The responses of a step, by prompt."""
    return sorted((row["uid"], row["output"]) for row in outcome.samples(step))


def prompts(outcome: Outcome) -> list[list[str]]:
    """By step, the prompts trained on."""
    return [sorted({row["uid"] for row in outcome.samples(step)}) for step in range(1, STEPS + 1)]


def restored(outcome: Outcome) -> dict[str, list[str]]:
    """By prompt, the responses that were in the checkpoints that the run went on from."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(outcome.run_dir / "huggingface")
    found = {}
    for step in re.findall(r"resumed from \S+/global_step_(\d+)", outcome.log):
        folder = outcome.run_dir / f"global_step_{step}"
        for each in json.loads((folder / "state.json").read_text())["finished"]:
            rows = DataProto.load(folder / "groups" / each["name"])["responses"].rows()
            texts = iter(tokenizer.batch_decode([row.tolist() for row in rows], skip_special_tokens=True))
            found |= {uid: [next(texts) for _ in range(count)] for uid, count in each["rows"].items()}
    return found


def test_one_step_ahead_no_prompt_is_skipped_or_taken_twice(main_run: Outcome, tmp_path: Path) -> None:
    """The driver is killed twice. Groups that were finished are taken from the checkpoint, not sampled again."""
    undisturbed = train(tmp_path / "undisturbed", [], *AHEAD)
    assert prompts(undisturbed) == prompts(main_run), "the order is that of the synchronous run"
    faults = [Fault("driver", "idle", "SIGKILL", 3), Fault("driver", "updating", "SIGKILL", 5)]
    outcome = train(tmp_path / "killed", faults, *AHEAD)
    assert (len(outcome.hits), outcome.lives) == (2, 3)
    assert prompts(outcome) == prompts(undisturbed)
    trained = defaultdict(list)
    for row in (row for step in range(1, STEPS + 1) for row in outcome.samples(step)):
        trained[row["uid"]].append(row["output"])
    before = restored(outcome)
    assert before, "groups of coming steps were finished"
    assert {uid: trained[uid] for uid in before} == before
    assert [row["step"] for row in outcome.metrics()] == list(range(STEPS + 1)), "each step once"
