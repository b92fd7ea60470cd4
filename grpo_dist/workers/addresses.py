"""Where the processes of a role are."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

if TYPE_CHECKING:
    from grpo_dist.workers.process import Address


class Addresses:
    """Addresses of processes by rank, of which some may still be starting."""

    def __init__(self) -> None:
        self._known: dict[int, Address] = {}
        self._expected: dict[int, ray.ObjectRef] = {}
        self._last: dict[int, Address] = {}

    def expect(self, rank: int, address: ray.ObjectRef) -> None:
        """There is a new process, which will give its address once it has started."""
        self.forget(rank)
        self._expected[rank] = address

    def note(self, addresses: Mapping[int, Address]) -> None:
        """Store the addresses of all processes."""
        self._known, self._expected = dict(addresses), {}

    def forget(self, rank: int) -> None:
        """A process has ended."""
        if (address := self.known().get(rank)) is not None:
            self._last[rank] = address
        self._known.pop(rank, None)
        self._expected.pop(rank, None)

    def known(self) -> dict[int, Address]:
        """The addresses of the processes that have started."""
        refs = {ref: rank for rank, ref in self._expected.items()}
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0) if refs else ([], [])
        for ref in done:
            del self._expected[refs[ref]]
            with contextlib.suppress(RayError):  # that process was lost too
                self._known[refs[ref]] = ray.get(ref)
        return self._known

    def last(self, rank: int) -> Address | None:
        """The address of a process, or of the one before it; None if none has started yet."""
        return self.known().get(rank) or self._last.get(rank)
