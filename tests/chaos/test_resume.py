"""A checkpoint taken up where it is hardest: on another number of ranks, and with groups sampled ahead."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load

from grpo_dist.protocol import DataProto
from tests.chaos.driver import Fault
from tests.chaos.runs import STEPS, STEPS_PER_EPOCH, Outcome, train

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1500)]
AHEAD = ["trainer.max_staleness=1"]


def test_on_another_number_of_ranks(main_run: Outcome, tmp_path: Path) -> None:
    """The run had two actor ranks; its checkpoint at the end of an epoch goes on with one."""
    found = list((main_run.run_dir / f"global_step_{STEPS_PER_EPOCH}" / "actor").glob("__*_0.distcp"))
    assert len(found) == 2, "two ranks wrote it"
    shutil.copytree(found[0].parents[1], tmp_path / "run" / f"global_step_{STEPS_PER_EPOCH}")
    outcome = train(tmp_path, [], "cluster.actor_world_size=1")
    assert f"resumed from {outcome.run_dir}/global_step_{STEPS_PER_EPOCH}" in outcome.log
    assert outcome.rewards() == main_run.rewards()[STEPS_PER_EPOCH:]
    ours, theirs = load(outcome.weights), load(main_run.weights)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        np.testing.assert_allclose(weight, theirs[name], rtol=1e-4, atol=1e-6, err_msg=name)


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
