"""Saves a state in processes that are killed at random moments: python -m tests.trainer.save_until_killed DIR N"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from grpo_dist.engines.train.checkpoint import ShardWriter, load_state
from grpo_dist.trainer.checkpoint.folder import (
    WRITING,
    begin_checkpoint,
    checkpoints,
    clear_leftovers,
    find_checkpoint,
    prune_checkpoints,
    publish_checkpoint,
)
from grpo_dist.trainer.checkpoint.manifest import damage, git_commit, versions
from tests.trainer.checkpoints import run_state

KEEP, SIZE = 2, 100_000


def save_forever(run_dir: Path, step: int, published: int) -> None:
    """Save `step` and all that follow, as a run does; tell each through a pipe once it is published."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    writer = ShardWriter()
    weights = torch.zeros(SIZE)
    os.write(published, b"0\n")
    while True:
        weights.fill_(step)
        folder = begin_checkpoint(run_dir, step)
        writer.begin_save({"model": {"w": weights}}, folder / "actor")
        weights.fill_(-1)  # the next update, while it is written
        files = writer.finished(wait=True) or {}
        digests = {f"actor/{name}": digest for name, digest in files.items()}
        publish_checkpoint(folder, run_state(step), "", digests)
        os.write(published, f"{step}\n".encode())
        prune_checkpoints(run_dir, KEEP)
        step += 1


def killed_round(run_dir: Path, step: int, saves: int, first_s: float) -> tuple[int, float]:
    """Save from `step` on until killed: after `saves` saves, at any moment of the next one.

    Takes what the first save of a round took lately; returns the last step that was told, or 0, and what it took now.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        save_forever(run_dir, step, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        last, took = int(pipe.readline()), first_s  # it is ready
        for number in range(saves):
            started = time.monotonic()
            last = int(pipe.readline())
            took = time.monotonic() - started
            first_s = took if number == 0 else first_s
        time.sleep(random.uniform(0, took))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return max([last, *map(int, pipe.read().split())]), first_s


def look(run_dir: Path, last: int) -> int:
    """What a run would go on from; checks that it holds what was saved, and that nothing told is lost."""
    clear_leftovers(run_dir)
    folder = find_checkpoint(run_dir, "auto", None)
    whole = [path for path in checkpoints(run_dir) if not damage(path)]
    assert whole == checkpoints(run_dir), "a folder that is not a whole checkpoint"
    if folder is None:
        assert last == 0
        return 0
    step = int(folder.name.rpartition("_")[2])
    assert step >= last, f"step {last} was published, and {step} is found"
    assert len(whole) >= min(KEEP, last), f"of {last} published only {whole} are left"
    for path in whole:
        state = {"model": {"w": torch.zeros(SIZE)}}
        load_state(state, path / "actor")
        assert state["model"]["w"].unique().tolist() == [float(path.name.rpartition("_")[2])]
    return step


def main(run_dir: Path, rounds: int) -> None:
    torch.set_num_threads(1)  # threads do not survive a fork
    random.seed(1)
    versions(), git_commit()  # found out once: a round is short
    last, first_s = killed_round(run_dir, 1, 3, 0.0)
    newest, midway = look(run_dir, last), 0
    for number in range(rounds):
        # every other round writes the newest step once more, in place of the one of the life before
        first = newest + 1 if number % 2 == 0 else newest
        last, first_s = killed_round(run_dir, first, random.randrange(3), first_s)
        midway += bool(list(run_dir.glob(f"global_step_*{WRITING}")))
        newest = look(run_dir, max(last, newest))
    sys.stdout.write(json.dumps({"newest": newest, "midway": midway}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
