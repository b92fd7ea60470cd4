"""Reward functions that do anything but score. tests/fuzz/test_rewards.py runs them in a process of their own."""

import asyncio
import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections import UserDict
from fractions import Fraction

import numpy as np


class Unreadable:
    """Every look at it raises."""

    def __repr__(self):
        raise RuntimeError("no")

    __float__ = __bool__ = __repr__


class NotReally(float):
    def __float__(self):
        raise KeyError("no")


class Tensor:
    shape = ()

    def __init__(self, value):
        self.value = value

    def item(self):
        return self.value


class Hidden(Exception):
    __str__ = Unreadable.__repr__


class Unpicklable(Exception):
    def __init__(self, a, b):
        self.lock = threading.Lock()


class Odd(dict):
    def __getitem__(self, name):
        raise LookupError(name)


def deep(n):
    return deep(n + 1)


def generated():
    yield 1.0


async def later():
    return 1.0


def throw(error):
    raise error


GOOD = {
    "float": lambda: 0.5, "int": lambda: 3, "bool": lambda: True, "zero": lambda: -0.0,
    "numpy": lambda: np.float32(0.5), "numpy int": lambda: np.int64(-7), "numpy bool": lambda: np.bool_(True),
    "0-d": lambda: np.array(2.0), "torch": lambda: Tensor(0.25), "fraction": lambda: Fraction(1, 3),
    "small": lambda: 1e-300, "large": lambda: 3e38, "dict": lambda: {"score": 1.0},
    "mapping": lambda: UserDict(score=2.0), "steps": lambda: {"score": 1, "step_scores": []},
    "junk": lambda: {"score": 1, "a": object(), "b": None, 3: 4, "c": "text", "d": [1], None: 1, "e": {}, "f": b"x"},
    "extras": lambda: {"score": 1, **{f"x{i}": i for i in range(500)}},
    "pred": lambda: {"score": 1, "pred": "x" * 10**6}, "much": lambda: print("x" * 10**6) or 1.0,
    "many": lambda: [print(i) for i in range(20000)] and 1.0, "errors": lambda: sys.stderr.write("e" * 10**6) and 1.0,
    "half": lambda: os.write(1, b"\xff\xfe\x00") and 1.0, "folder": lambda: os.chdir("/") or 1.0,
    "thread": lambda: threading.Thread(target=time.sleep, args=(9,), daemon=True).start() or 1.0,
    "stdout": lambda: setattr(sys, "stdout", None) or 1.0,
}  # fmt: skip
BAD = {
    "none": lambda: None, "text": lambda: "1.0", "bytes": lambda: b"1", "list": lambda: [1.0], "empty": dict,
    "no score": lambda: {"reward": 1.0}, "score none": lambda: {"score": None}, "score text": lambda: {"score": "1"},
    "score list": lambda: {"score": [1]}, "nan": lambda: math.nan, "inf": lambda: float("inf"),
    "-inf": lambda: -float("inf"), "huge": lambda: 10**400, "beyond float32": lambda: 1e39,
    "numpy nan": lambda: np.float32("nan"), "array": lambda: np.ones(2), "complex": lambda: 1j,
    "torch nan": lambda: Tensor(math.nan), "torch text": lambda: Tensor("x"),
    "extra nan": lambda: {"score": 1, "x": math.nan}, "extra huge": lambda: {"score": 1, "x": 10**400},
    "steps text": lambda: {"score": 1, "step_scores": "12"},
    "steps nan": lambda: {"score": 1, "step_scores": [1, math.nan]},
    "steps number": lambda: {"score": 1, "step_scores": 3}, "generator": generated, "coroutine": later,
    "class": lambda: Unreadable, "unreadable": lambda: Unreadable(),
    "score unreadable": lambda: {"score": Unreadable()}, "not really": lambda: NotReally(1),
    "pred unreadable": lambda: {"score": 1, "pred": Unreadable()}, "odd": lambda: Odd(score=1),
    "function": lambda: deep, "raise": lambda: throw(ValueError("no")), "key": lambda: {}["x"],
    "zero division": lambda: 1 / 0, "hidden": lambda: throw(Hidden()), "unpicklable": lambda: throw(Unpicklable(1, 2)),
    "long": lambda: throw(ValueError("x" * 10**7)), "recursion": lambda: deep(0), "memory": lambda: bytearray(10**15),
    "sys.exit": lambda: sys.exit(0), "sys.exit text": lambda: sys.exit("bye"), "stop": lambda: throw(StopIteration()),
    "group": lambda: throw(ExceptionGroup("x", [ValueError()])), "assert": lambda: throw(AssertionError()),
    "cancelled": lambda: throw(TimeoutError()), "eof": lambda: throw(EOFError()),
    "pipe": lambda: throw(BrokenPipeError()),
}  # fmt: skip
ENDING = {
    "hang": lambda: time.sleep(1000), "spin": lambda: any(iter(int, 1)),
    "hang in C": lambda: ctypes.PyDLL(None).sleep(1000),
    "lock": lambda: [lock.acquire() for lock in [threading.Lock()] * 2], "exit": lambda: os._exit(0),
    "exit 3": lambda: os._exit(3), "kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0), "interrupt": lambda: throw(KeyboardInterrupt()),
    "generator exit": lambda: throw(GeneratorExit()), "base": lambda: throw(BaseException("x")),
    "deaf": lambda: os.closerange(3, 200) or 1.0, "flood": lambda: any(print("y" * 10**5) for _ in iter(int, 1)),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}  # fmt: skip


def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert ground_truth == ["a", {"b": 1}], "changed by another call"
    assert extra_info == {"tags": ["x"], "index": 0}, "changed by another call"
    ground_truth.clear(), extra_info["tags"].append(1), extra_info.clear()
    kind, name = solution_str.split(":")
    return {"good": GOOD, "bad": BAD, "ending": ENDING}[kind][name]()


async def slow(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "never":
        await asyncio.sleep(1e9)
    return 1.0


def batch(data_sources, solution_strs, ground_truths, extra_infos):
    ground_truths[0].clear()
    assert all(truth for truth in ground_truths[1:]), "one object for all"
    if solution_strs[0] == "coroutine":
        return later()
    values = {"endless": iter(int, 1), "few": [1.0], "mixed": [1.0, None, math.nan, "x", Unreadable(), 2.0]}
    return {"dict": {"score": 1}, "none": None, "number": 3, "text": "ab", **values}[solution_strs[0]]


def yields(data_source, solution_str, ground_truth, extra_info):
    yield 1.0
