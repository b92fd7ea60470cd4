from __future__ import annotations

import pytest

from grpo_dist.workers import busy
from grpo_dist.workers.busy import BusyClock


def test_open_calls_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls from 1 to 4 and from 3 to 6, on top of 10 s before: 5 s more; then idle, then busy again from 8 on."""
    now = [1.0]
    monkeypatch.setattr(busy.time, "monotonic", lambda: now[0])
    clock = BusyClock(10.0)
    clock.begin()
    now[0] = 3.0
    clock.begin()
    now[0] = 4.0
    clock.end()
    assert clock.seconds == 13.0
    now[0] = 6.0
    clock.end()
    now[0] = 8.0
    assert clock.seconds == 15.0
    clock.begin()
    now[0] = 8.5
    assert clock.seconds == 15.5
