"""A command with faults, each of which hits once: `python -m tests.chaos.driver PLAN.json COMMAND key=value ...`."""

import importlib
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.observed import command_line

# By command, its trainer and the stage during which a fault hits, by the moment's name; "idle" and "scoring" are hooked
# below.
TRAINERS: dict[str, tuple[str, dict[str, str]]] = {
    "main": (
        "grpo_dist.trainer.trainer:GRPOTrainer",
        {
            "generating": "rollout",
            "learning": "update_critic",
            "retraining": "update_reward_model",
            "updating": "update_actor",
            "syncing": "update_weights",
            "saving": "save_checkpoint",
        },
    ),
    **dict.fromkeys(
        ("reward_model", "sft"),
        (
            "grpo_dist.trainer.supervised.trainer:SupervisedTrainer",
            {"updating": "train", "validating": "testing", "saving": "save_checkpoint"},
        ),
    ),
}
COUNTED = ("validating", "saving")  # moments that come after the step was counted
PROCESSES = {
    "actor": "ray::ActorWorker",
    "rollout": "ray::RolloutWorker",
    "engine": "VLLM::Worker_TP",  # one of several processes of an engine
    "ref": "ray::PolicyWorker",
    "reward_model": "ray::RewardModelWorker",
    "critic": "ray::TrainedWorker",
    "reward": "ray::RewardWorker",
    "trained": "ray::SupervisedWorker",  # of a command that trains one model
}
# Seconds after a stage's calls were sent, so that work has begun; and those that a stopped driver stands still.
DELAY_S, DRIVER_STOPS_S = 0.01, 5.0


@dataclass(frozen=True)
class Fault:
    """A signal to a role's last process, in a training step, at a moment of it."""

    role: str
    moment: str
    signal: str
    step: int


class Timetable:
    """Sends each fault when its moment comes, and writes down which moment it was when the signal went out."""

    def __init__(self, plan: Path) -> None:
        self.hits = plan.with_suffix(".hits")
        past = self.hits.read_text().splitlines() if self.hits.exists() else []
        done = [Fault(**json.loads(line)["fault"]) for line in past]
        planned = [Fault(**each) for each in json.loads(plan.read_text())]
        self.faults = [fault for fault in planned if fault not in done]
        self.due: list[tuple[Fault, int | None]] = []
        self.now = ""

    def come(self, moment: str, step: int) -> None:
        """A moment of a step has come: look for the process, which takes as long as a short stage."""
        for fault in [each for each in self.faults if (each.moment, each.step) == (moment, step)]:
            self.faults.remove(fault)
            self.due.append((fault, self.victim(fault.role)))

    def strike(self) -> None:
        """Hit what is due; where the process before was hit a moment ago, as soon as the next is there."""
        for fault, before in list(self.due):
            pid = before or self.victim(fault.role)
            if pid is not None:
                self.due.remove((fault, before))
                self.hit(fault, pid)

    def victim(self, role: str) -> int | None:
        """The role's last process."""
        if role == "driver":
            return os.getpid()
        children = psutil.Process().children(recursive=True)
        found = [each for each in children if command_line(each).startswith(PROCESSES[role])]
        return max(found, key=lambda each: each.create_time()).pid if found else None

    def hit(self, fault: Fault, pid: int) -> None:
        """Write the fault down, and send the signal."""
        with self.hits.open("a") as file:
            file.write(json.dumps({"fault": asdict(fault), "during": self.now}) + "\n")
        self.send(fault, pid)

    def send(self, fault: Fault, pid: int) -> None:
        """Send the signal to a process."""
        number = signal.Signals[fault.signal]
        if fault.role == "driver" and number == signal.SIGSTOP and os.fork() == 0:  # somebody must wake it up
            time.sleep(DRIVER_STOPS_S)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        if fault.role == "driver" and number == signal.SIGTERM:  # as schedulers and terminals send it
            os.killpg(0, number)
        else:
            os.kill(pid, number)


def install(timetable: Timetable, command: str) -> None:
    """Hook the timetable into the trainer of a command."""
    from grpo_dist.plugins.registry import load_attribute
    from grpo_dist.runtime.call import Call
    from grpo_dist.runtime.group import WorkerGroup
    from grpo_dist.trainer.rollout import pump

    name, stages = TRAINERS[command]
    trainer: Any = load_attribute(name, key="trainer")
    step = [0]
    report, submit, value = trainer.report, WorkerGroup.submit_for_data, WorkerGroup.value

    def reported(self: Any) -> None:
        report(self)
        timetable.come("idle", self.step)
        timetable.strike()
        time.sleep(0.2)

    def submitted(self: WorkerGroup, rank: int, stage: str, *args: Any, **kwargs: Any) -> Call:
        call = submit(self, rank, stage, *args, **kwargs)
        if stage == "score":
            timetable.come("scoring", step[0])
            timetable.strike()
        return call

    async def awaited(self: WorkerGroup, call: Call) -> Any:
        """The stage's calls are in flight, and what they answer is not taken in before the signal is out."""
        if timetable.due:
            time.sleep(DELAY_S)
            timetable.strike()
        return await value(self, call)

    for moment, stage in stages.items():
        hook_stage(trainer, stage, moment, timetable, step)
    trainer.report = reported
    WorkerGroup.submit_for_data = submitted  # type: ignore[method-assign]
    WorkerGroup.value = awaited  # type: ignore[method-assign]
    pump.SCORER_START_S, pump.SCORER_RESTART_S = 15.0, 0.0  # a stopped reward process is noticed within the test


def hook_stage(trainer: type, stage: str, moment: str, timetable: Timetable, step: list[int]) -> None:
    """Tell the timetable when the trainer's stage begins."""
    name = next(n for n in dir(trainer) if getattr(getattr(trainer, n), "stage", ("",))[0] == stage)
    method = getattr(trainer, name)

    def hooked(self: Any, *args: Any) -> Any:
        step[0] = self.step + (moment not in COUNTED)
        timetable.come(moment, step[0])
        timetable.now = moment
        try:
            return method(self, *args)
        finally:
            timetable.now = ""

    setattr(trainer, name, hooked)


if __name__ == "__main__":
    from grpo_dist.runtime.cluster import set_local_environment

    set_local_environment()  # before the hooks import Ray
    install(Timetable(Path(sys.argv[1])), sys.argv[2])
    sys.exit(getattr(importlib.import_module("grpo_dist.main"), sys.argv[2])(sys.argv[3:]))
