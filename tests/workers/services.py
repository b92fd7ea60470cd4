"""Services that stand in for Ray's."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc

from grpo_dist.runtime.cluster import CHECK_ALIVE


class Service:
    """A port that answers whoever greets it; once `hangs`, the kernel takes connections and nobody answers."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.place: tuple[str, int] = self.server.getsockname()
        self.hangs = False
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
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


@contextlib.contextmanager
def control_service(call: str = CHECK_ALIVE, refusal: grpc.StatusCode | None = None) -> Iterator[str]:
    """The address of a gRPC service that answers one call, by default that of Ray's control service, or refuses it."""

    def answer(request: bytes, context: Any) -> bytes:
        return b"" if refusal is None else context.abort(refusal, "no token")

    _, service, method = call.split("/")
    handler = grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(answer)})
    server = grpc.server(ThreadPoolExecutor(1), [handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with contextlib.closing(SimpleNamespace(close=lambda: server.stop(None).wait())):
        yield f"127.0.0.1:{port}"
