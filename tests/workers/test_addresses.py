"""Addresses of processes, with answers of Ray that come when a test says so."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from grpo_dist.workers.addresses import Addresses
from grpo_dist.workers.process import Address


def address(node: int) -> Address:
    return Address(f"host{node}", f"10.0.0.{node}", 7, f"node{node}")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """By reference, what has been answered: an address or an error."""
    there: dict[Any, Any] = {}

    def wait(refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return [ref for ref in refs if ref in there], [ref for ref in refs if ref not in there]

    def get(ref: Any) -> Any:
        if isinstance(there[ref], Exception):
            raise there[ref]
        return there[ref]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    return there


def test_a_new_process_has_an_address_once_it_has_started(answers: dict[Any, Any]) -> None:
    found = Addresses()
    found.note({0: address(0), 1: address(1)})
    found.expect(1, "new")  # type: ignore[arg-type]
    assert found.known() == {0: address(0)}
    answers["new"] = address(2)
    assert found.known() == {0: address(0), 1: address(2)}


def test_where_a_process_was_that_has_ended_is_known_until_the_next_has_started(
    answers: dict[Any, Any],
) -> None:
    found = Addresses()
    assert found.last(0) is None
    found.note({0: address(0)})
    found.forget(0)
    assert (found.known(), found.last(0)) == ({}, address(0))
    found.expect(0, "new")  # type: ignore[arg-type]
    assert found.last(0) == address(0)
    answers["new"] = RayActorError()
    assert (found.known(), found.last(0)) == ({}, address(0))
    found.expect(0, "newer")  # type: ignore[arg-type]
    answers["newer"] = address(1)
    assert found.last(0) == address(1)
