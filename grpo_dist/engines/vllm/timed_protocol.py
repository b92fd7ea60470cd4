"""Connections to the server, which are closed where a request does not arrive in time: uvicorn waits for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from grpo_dist import hosts


class TimedProtocol(HttpToolsProtocol):
    """uvicorn's connection, with a limit for each request, from its first byte, or the connection's, to its last."""

    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._begin()

    def data_received(self, data: bytes) -> None:
        """Take in data, perhaps of the next request."""
        if self._limit is None:
            self._begin()
        super().data_received(data)

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._end()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """Leave the connection to another protocol."""
        self._end()
        super().handle_websocket_upgrade()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._end()
        super().connection_lost(exc)

    def _begin(self) -> None:
        self._limit = self.loop.call_later(hosts.REQUEST_S, self._close)

    def _end(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _close(self) -> None:
        self._limit = None
        is_answering = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if not is_answering:
            self.transport.close()
