"""Nodes that are none, for tests without Ray."""

from __future__ import annotations

from typing import Any

from grpo_dist.runtime.nodes import Nodes


class FakeNodes(Nodes):
    """Nodes that are lost, and bundles without room, when a test says so.

    Attributes:
        lost: by node id, "HOST (ADDRESS)".
        full: bundles for which there is no room.
        left: bundles whose room was left to others.
        told: what was told.
    """

    def __init__(self, wait_minutes: float = 0.0) -> None:
        self.told: list[str] = []
        super().__init__(wait_minutes, self.told.append)
        self.lost: dict[str, str] = {}
        self.full: set[Any] = set()
        self.left: list[Any] = []

    async def dead(self) -> dict[str, str]:
        return self.lost

    async def has_room(self, bundle: Any) -> bool:
        return bundle not in self.full

    async def leave_room(self, bundle: Any) -> None:
        self.left.append(bundle)

    async def _situation(self) -> str:
        return f"lost: {', '.join(self.lost.values())}"
