"""Buckets in shared memory: one at a time, and none that stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_dist.engines.weights import bucket_files as module
from grpo_dist.engines.weights.bucket_files import bucket_files, clear_left_behind, read_bucket
from grpo_dist.engines.weights.buckets import damage, pack, unpack
from tests.messages import says

WEIGHTS = {f"layer{i}": torch.full((64,), float(i)) for i in range(3)}
KILLED = """
import os, sys
from pathlib import Path
import torch
from grpo_dist.engines.weights import bucket_files as module
from grpo_dist.engines.weights.buckets import pack

module.shared_memory = lambda: Path(sys.argv[1])
files = module.bucket_files(list(pack([("weight", torch.ones(64))], bucket_bytes=256)))
next(files)
(Path(sys.argv[1]) / "queue").touch()
note = module.note_segments(["queue", "never there", "../outside"])
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "shared_memory", lambda: tmp_path)
    return tmp_path


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_one_bucket_is_there_at_a_time(memory: Path) -> None:
    buckets = list(pack(WEIGHTS.items(), bucket_bytes=256))
    assert len(buckets) == 3
    found = {}
    for update in bucket_files(buckets):
        assert files_in(memory) == [Path(update["path"])]
        bucket = read_bucket(update)
        assert (bucket.number, bucket.last) == (len(found), len(found) == 2)
        assert damage(bucket) == ""
        found |= dict(unpack(bucket.data, bucket.entries))
    assert not list(memory.iterdir())
    assert {name: value.tolist() for name, value in found.items()} == {n: w.tolist() for n, w in WEIGHTS.items()}


def test_damage_between_writing_and_reading_is_found(memory: Path) -> None:
    files = bucket_files(list(pack(WEIGHTS.items(), bucket_bytes=256)))
    update = next(files)
    with Path(update["path"]).open("r+b") as file:
        file.write(b"\x01")
    says(damage(read_bucket(update)), "bucket 0", "(layer0 to layer0)", "damaged", "checksum")
    files.close()


def test_a_load_that_fails_leaves_nothing(memory: Path) -> None:
    files = bucket_files(list(pack(WEIGHTS.items(), bucket_bytes=256)))
    next(files)
    files.close()
    assert not list(memory.iterdir())


def test_what_a_killed_process_left_is_cleared_and_what_is_in_use_is_not(memory: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", KILLED, str(memory)])
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has taken note of it
    names = sorted("bucket" if len(path.name) == 32 else path.name for path in files_in(memory))
    assert names == ["bucket", "queue", module.SEGMENTS], "it was killed in the midst of a load"
    outside = memory.parent / "outside"
    outside.touch()
    (memory / "queue of another").touch()
    mine = bucket_files(list(pack(WEIGHTS.items(), bucket_bytes=256)))
    in_use = Path(next(mine)["path"])
    assert f"-{os.getpid()}-" in in_use.parent.name
    elsewhere = memory / f"{module.PREFIX}-1-{2**30}-container"  # process ids of another namespace mean nothing here
    other = memory / f"{module.PREFIX}-notes"
    for folder in (elsewhere, other):
        folder.mkdir()
    my_queue = memory / "my queue"
    my_queue.touch()
    note = module.note_segments([my_queue.name])
    clear_left_behind()
    assert sorted(files_in(memory)) == sorted([in_use, my_queue, note / module.SEGMENTS, memory / "queue of another"])
    module.remove(note)
    assert sorted(files_in(memory)) == sorted([in_use, memory / "queue of another"])
    folders = [path for path in memory.iterdir() if path.is_dir()]
    assert sorted(folders) == sorted([in_use.parent, elsewhere, other])
    assert outside.exists()
    mine.close()
    killed.wait()
