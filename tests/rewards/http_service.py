"""A small HTTP service that gives prepared answers."""

from __future__ import annotations

import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Service(ThreadingHTTPServer):
    """Answers each POST with the next of `answers` (status, body); keeps what it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/score"
        self.answers: list[tuple[int, bytes]] = []
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.more_headers: dict[str, str] = {}
        self.delay_s = 0.0


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(json.loads(raw))
        self.server.headers.append(dict(self.headers))
        status, body = self.server.answers.pop(0)
        time.sleep(self.server.delay_s)
        try:
            self.send_response(status)
            if status == 302:
                self.send_header("Location", self.server.url)
            for name, value in self.server.more_headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # the caller has gone
            pass

    def log_message(self, *arguments: Any) -> None:
        pass
