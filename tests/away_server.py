"""A server on loopback that can be away for a while: what the servers of trackers have in common."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class AwayServer:
    """The server. While `away` is set it ends every connection without an answer, and counts them.

    A subclass says what it answers to a request, and puts into `sent` what it was sent.
    """

    def __init__(self) -> None:
        self.sent = b""
        self.more_headers: dict[str, str] = {}  # of each answer
        self.away = False
        self.turned_away = 0
        self.changed = threading.Condition()
        self.http = _Http(("127.0.0.1", 0), _Handler)
        self.http.owner = self
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        """Status and JSON; called for one request at a time."""
        raise NotImplementedError

    def wait_for(self, wanted: Callable[[], object], timeout: float = 60) -> None:
        """Return once `wanted()` is true; looks after each request."""
        with self.changed:
            assert self.changed.wait_for(wanted, timeout), f"not within {timeout} s; the server has {vars(self)}"

    @contextlib.contextmanager
    def listening(self) -> Iterator[Self]:
        """Listen for the time of the block."""
        thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self.http.shutdown()
            thread.join()
            self.http.server_close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # clients keep their connections open
    owner: AwayServer

    def handle_error(self, *_: Any) -> None:
        """Connections of processes that are killed end in the middle of something."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Http

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        owner = self.server.owner
        with owner.changed:
            if owner.away:
                owner.turned_away += 1
                owner.changed.notify_all()
                self.close_connection = True
                return
            status, content = owner.answer(self, body)
            owner.changed.notify_all()
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(content)), **owner.more_headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST
