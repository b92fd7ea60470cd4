from __future__ import annotations

import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_dist.rewards.scorer import TooCostly, limited

GIB = 1 << 30


def state() -> tuple[object, ...]:
    alarm = signal.getitimer(signal.ITIMER_PROF)
    return resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF), alarm


def spin(seconds: float) -> str:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return "done"


def test_work_within_the_limits_is_done_and_they_are_lifted() -> None:
    before = state()
    with limited(cpu_s=10.0, memory_bytes=GIB):
        assert spin(0.01) == "done"
    assert state() == before


def test_cpu_time_is_limited_in_python_and_in_long_integers() -> None:
    before = state()
    for work in (lambda: spin(60.0), lambda: 9**9**9):
        start = time.process_time()
        with pytest.raises(TooCostly), limited(cpu_s=0.2, memory_bytes=GIB):
            work()
        assert time.process_time() - start < 5
        assert state() == before


def test_an_error_that_somebody_catches_comes_again() -> None:
    caught = []

    def stubborn() -> None:
        for _ in range(2):
            try:
                spin(60.0)
            except BaseException as error:
                caught.append(type(error))
        spin(60.0)

    with pytest.raises(TooCostly), limited(cpu_s=0.1, memory_bytes=GIB):
        stubborn()
    assert caught == [TooCostly, TooCostly]


def test_waiting_costs_nothing() -> None:
    with limited(cpu_s=0.2, memory_bytes=GIB):
        time.sleep(0.4)


def test_memory_is_limited_in_every_thread() -> None:
    def too_much() -> None:
        with pytest.raises(TooCostly), limited(cpu_s=10.0, memory_bytes=GIB // 4):
            bytearray(GIB)
        bytearray(GIB // 2)

    before = state()
    too_much()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(too_much).result(timeout=60)
    assert state() == before
