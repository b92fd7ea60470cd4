"""Serves the report of a run that is still going on: the page asks every few seconds for what is new."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from grpo_dist import hosts
from grpo_dist.errors import ConfigError, GrpoDistError
from grpo_dist.report.page import overview, page
from grpo_dist.report.rollouts import load_token_texts, read_step
from grpo_dist.report.run_folder import read_run

LOOPBACK = "127.0.0.1"


class ReportServer(ThreadingHTTPServer):
    """Serves the report on this machine's loopback address, to those who know its address.

    Attributes:
        url: of the page; it holds a token, since other users of the machine reach the port too.

    Args:
        folders: of the run, and of those that it is compared with.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int) -> None:
        self.folders = list(folders)
        self._token = secrets.token_urlsafe(24)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise ConfigError(f"--port {port}: {error}; choose another port, or 0 for a free one") from None
        self.url = f"http://{LOOPBACK}:{self.server_address[1]}/{self._token}/"

    def answer(self, path: str) -> tuple[int, str, str]:
        """(status, content type, body) for a path."""
        token, _, name = path.lstrip("/").partition("/")
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            return 403, "text/plain", "open the address that `grpo-dist report --serve` has printed"
        run_dir, (kind, _, number) = self.folders[0], name.rpartition("-")
        if name == "":
            return 200, "text/html; charset=utf-8", page([read_run(run_dir)], None)
        if name == "data/overview":
            value = overview([read_run(folder) for folder in self.folders])
        elif kind == "data/step" and number.isdecimal():
            value = read_step(run_dir, int(number), load_token_texts(run_dir))
        else:
            return 404, "text/plain", "there is nothing here"
        return 200, "application/json", json.dumps(value, ensure_ascii=False, allow_nan=False)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that has been lost needs no traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def handle(self) -> None:
        limit = threading.Timer(hosts.REQUEST_S, self._close)
        limit.start()
        try:
            super().handle()
        finally:
            limit.cancel()

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        try:
            if hosts.is_this_machine(self.headers.get("Host", "")):
                status, kind, text = self.server.answer(self.path.partition("?")[0])
            else:
                status, kind, text = 403, "text/plain", "open the address that `grpo-dist report --serve` has printed"
        except GrpoDistError as error:  # such as a file that is being written
            status, kind, text = 500, "text/plain", str(error)
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")):
            self.send_header(name, value)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are not shown: their paths hold the token."""
