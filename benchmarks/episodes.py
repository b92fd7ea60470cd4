"""What failing agents cost: a run with failures of every kind against one without, on the built-in model.

    python -m benchmarks.episodes [--ways url play] [--steps 8] [--groups 32] [--n 8] [--output FILE]

All episodes of a step (groups x n) are played at the same time, by an agent that knows the endpoint alone
(episodes_agent.py): `url`, a server, or `play`, a function in a process beside the engine. In the run with failures 5 %
of all attempts raise between their two turns, 2 % hang there, and the server is killed in the middle of a step by
SIGKILL and comes back after two seconds. Attempts fail by chance, each anew, so that an episode's second one mostly
succeeds.

An attempt that hangs is ended after `rollout.agent.timeout_s`, which counts the agent's own time and not what it waits
for the engine: 4 s where it is a function, 15 s where it is a server, which on two cores takes some seconds to answer
256 requests at once. So a step in which one hangs takes that long and a second attempt at least. The ratio "beyond
time-outs" leaves one time-out a step out.

Every prompt is accounted for: the rows are drawn in their order, so those that did not train, of all up to the last one
that did, are as many as the groups that the metrics say were dropped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import record
from grpo_dist.engines.rendezvous import LOOPBACK

AGENT = record.ROOT / "benchmarks/episodes_agent.py"
ROLLOUT = "actor_rollout_ref.rollout"
RAISES, HANGS = 0.05, 0.02
# Of a step's episodes. All may be under way when the server is lost, and have two attempts left.
MOST_FAILURES = 0.2
TIMEOUT_S = {"url": 15.0, "play": 4.0}  # of an agent's own time
AWAY_S = 2.0  # that the server is away
SPARE = 1.5  # rows for each that trains


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/episodes.json"))
    parser.add_argument("--ways", nargs="+", choices=("url", "play"), default=["url", "play"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--groups", type=int, default=32, help="prompts of a step")
    parser.add_argument("--n", type=int, default=8, help="episodes of a prompt")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for all runs")
    arguments = parser.parse_args()
    result = record.begun()
    sizes = {"steps": arguments.steps, "groups": arguments.groups, "n": arguments.n}
    rows = []
    for way in arguments.ways:
        for failing in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                play(Path(folder), way, *arguments.overrides, failing=failing, **sizes)
                rows.append({"agent": way, "failures": "with" if failing else "none"} | summary(Path(folder), **sizes))
    result["episodes"] = rows
    title = f"{arguments.groups * arguments.n} episodes at once, {arguments.steps} steps"
    print(record.table(title, rows))
    record.write(arguments.output, result, ratios(rows))


def play(
    folder: Path, way: str, *overrides: str, failing: bool, steps: int, groups: int, n: int
) -> subprocess.CompletedProcess[str]:
    """One run, with its files in `folder`.

    Raises:
        RuntimeError: it did not end well.
    """
    write_rows(folder / "rows.jsonl", int(SPARE * steps * groups), failing=failing)
    middle = int((steps // 2 - 0.5) * groups * n) if failing else None
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    agent = f"url: 'http://{LOOPBACK}:{port}/'" if way == "url" else f"play: '{AGENT}:play'"
    settings = [
        f"{ROLLOUT}.agent.default_agent_loop=external",
        f"{ROLLOUT}.agent.agent_kwargs={{{agent}}}",
        f"{ROLLOUT}.agent.timeout_s={TIMEOUT_S[way]}",
        f"{ROLLOUT}.agent.max_failure_rate={MOST_FAILURES}",
        f"{ROLLOUT}.n={n}",
        f"data.train_files={folder}/rows.jsonl",
        "data.shuffle=false",
        "data.val_files=null",
        f"data.train_batch_size={groups}",
        "data.max_response_length=160",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=-1",
        "trainer.export_hf_model=false",
        f"trainer.default_local_dir={folder}",
        "ray_kwargs.ray_init.address=local",
    ]
    command = [sys.executable, "-m", "grpo_dist.main", "algorithm.adv_estimator=grpo", *settings, *overrides]
    with serving(port, middle) if way == "url" else contextlib.nullcontext():
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return done


def write_rows(file: Path, count: int, *, failing: bool) -> None:
    """Sums, and how often attempts at them fail."""
    chance = random.Random(2)
    shares = {"raises": RAISES, "hangs": HANGS} if failing else {"raises": 0.0, "hangs": 0.0}
    with file.open("w") as lines:
        for index in range(count):
            prompt = f"{chance.randrange(100)}+{chance.randrange(100)}=?"
            lines.write(json.dumps({"prompt": prompt, "extra_info": {"index": index, **shares}}) + "\n")


@contextlib.contextmanager
def serving(port: int, last: int | None) -> Iterator[None]:
    """The agent's server; with `last` it is killed as that episode comes, and started again."""
    command = [sys.executable, str(AGENT), str(port)]
    running = [subprocess.Popen([*command, *([] if last is None else [str(last)])])]

    def again() -> None:
        running[0].wait()
        if not over.wait(AWAY_S):
            running.append(subprocess.Popen(command))

    over, watch = threading.Event(), threading.Thread(target=again)
    watch.start()
    try:
        yield
    finally:
        over.set()
        running[0].kill()  # SIGTERM would wait for the episodes that hang
        watch.join()
        for process in running:
            process.kill()
            process.wait()


def summary(folder: Path, *, steps: int, groups: int, n: int) -> dict[str, Any]:
    """Figures of a run; those of the time without its first step.

    Raises:
        RuntimeError: steps are missing, or a prompt is not accounted for.
    """
    rows = [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if row["step"]]
    if [row["step"] for row in rows] != list(range(1, steps + 1)):
        raise RuntimeError(f"{steps} steps were to be run, and there are {[row['step'] for row in rows]}")
    counts = Counter[str]()
    for row in rows:
        counts.update({name: row[name] for name in row if name.startswith("agent/")})
    dropped = int(counts["agent/dropped_groups"])
    check_prompts(folder, dropped, steps=steps, groups=groups, n=n)
    seconds = sorted(row["timing_s/step"] for row in rows[1:])
    return {
        "seconds a step": sum(seconds) / len(seconds),
        "median": seconds[len(seconds) // 2],
        "episodes/s": groups * n * len(seconds) / sum(seconds),
        "raised": int(counts["agent/failures/failed"]),
        "timed out": int(counts["agent/failures/timeout"]),
        "lost": int(counts["agent/failures/error"]),
        "dropped groups": dropped,
    }


def check_prompts(folder: Path, dropped: int, *, steps: int, groups: int, n: int) -> None:
    """Check that each prompt that was drawn trained once with all its episodes, or was dropped.

    Raises:
        RuntimeError: one was not.
    """
    trained = Counter[int]()
    for step in range(1, steps + 1):
        with (folder / "rollouts" / f"{step}.jsonl").open("rb") as lines:
            uids = Counter(json.loads(line)["uid"] for line in lines)
        if set(uids.values()) != {n} or len(uids) != groups:
            raise RuntimeError(f"step {step} trains {len(uids)} groups of {set(uids.values())}, not {groups} of {n}")
        trained.update(int(uid.split("-")[1].removeprefix("prompt")) for uid in uids)
    twice = [index for index, count in trained.items() if count > 1]
    missing = set(range(max(trained) + 1)) - trained.keys()
    if twice or len(missing) != dropped:
        raise RuntimeError(f"trained twice: {twice}; not trained: {sorted(missing)}, and dropped: {dropped}")


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of a step without failures over those with them: all of them, and beyond one time-out."""
    seconds = {(row["agent"], row["failures"]): row["seconds a step"] for row in rows}
    found = {}
    for way in dict.fromkeys(row["agent"] for row in rows):
        usual, failing = seconds[way, "none"], seconds[way, "with"]
        found[f"episodes/{way}, without failures of with"] = usual / failing
        found[f"episodes/{way}, beyond time-outs"] = usual / max(failing - TIMEOUT_S[way], 1e-9)
    return found


if __name__ == "__main__":
    main()
