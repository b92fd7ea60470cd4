"""Services that stand in for Ray's."""

from __future__ import annotations

import contextlib
import socket
import threading


class Service:
    """A port that answers whoever greets it; once `hangs`, the kernel takes connections and nobody answers."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.place: tuple[str, int] = self.server.getsockname()
        self.hangs = False
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Refuse connections from now on."""
        self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self.server.accept()
                if self.hangs:
                    self._open.append(connection)
                else:
                    with connection, contextlib.suppress(OSError):
                        connection.recv(100)
                        connection.sendall(b"settings")
