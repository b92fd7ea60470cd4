from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from grpo_dist.tracking.sender import Sender


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sender]:
    monkeypatch.setattr("grpo_dist.tracking.sender._PAUSE_S", 0.01)
    sender = Sender(lambda error: isinstance(error, ConnectionError))
    yield sender
    sender.stop()


def test_calls_are_made_in_order_and_a_server_that_is_away_is_waited_for(sender: Sender) -> None:
    made: list[str] = []
    away = iter([ConnectionError("first"), ConnectionError("second"), None])

    def call() -> str:
        error = next(away)
        if error is not None:
            raise error
        made.append("one")
        return "answer"

    one, two = sender.send(call), sender.send(lambda: made.append("two"))
    assert one.result(10) == "answer"
    two.result(10)
    assert made == ["one", "two"]
    assert str(sender.absence) == "second"


def test_who_sends_does_not_wait(sender: Sender) -> None:
    answered = threading.Event()
    waiting, behind = sender.send(answered.wait), sender.send(lambda: 7)
    assert not behind.done()
    answered.set()
    assert (waiting.result(10), behind.result(10)) == (True, 7)


def test_after_another_error_nothing_is_called_and_the_next_one_to_send_is_told(sender: Sender) -> None:
    go, made = threading.Event(), []
    sender.send(go.wait)
    failing, behind = sender.send(lambda: 1 / 0), sender.send(lambda: made.append(1))
    go.set()
    for future in (failing, behind):
        with pytest.raises(ZeroDivisionError):
            future.result(10)
    with pytest.raises(ZeroDivisionError):
        sender.send(lambda: made.append(2))
    assert made == []


def test_a_sender_that_is_stopped_waits_for_no_server(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_dist.tracking.sender._PAUSE_S", 600.0)
    tried = threading.Event()

    def call() -> None:
        tried.set()
        raise ConnectionError("away")

    waiting = sender.send(call)
    assert tried.wait(10)
    sender.stop()
    with pytest.raises(ConnectionError):
        waiting.result(10)
