"""A stand-in of the Hugging Face hub on loopback: what huggingface_hub asks when it pushes and downloads models."""

from __future__ import annotations

import base64
import hashlib
import json
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.away_server import AwayServer

TOKEN = "hf_" + "Ab3" * 11
SHA = "a" * 40


class Hub(AwayServer):
    """The hub of the account `me`, whose token is `TOKEN`.

    Attributes:
        files: contents by name, of each repository.
        private: whether a repository is.
        revisions: the files of older revisions of `me/sums`, by name.
        foreign: repositories that the account may read alone.
        cut: whether it is away from the first file of weights on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.revisions: dict[str, dict[str, bytes]] = {}
        self.foreign: set[str] = set()
        self.stored: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.cut = False

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        path = unquote(urlsplit(request.path).path)
        self.more_headers = {}
        if path == "/api/agent-harnesses":  # asked once in a process
            return 404, b"{}"
        self.asked.append(path)
        status, content = 401, {"error": "Invalid credentials in Authorization header"}
        if request.headers.get("Authorization") == f"Bearer {TOKEN}" or path.startswith("/lfs/"):
            status, content = self._answer(path, body)
        return status, content if isinstance(content, bytes) else json.dumps(content).encode()

    def _answer(self, path: str, body: bytes) -> tuple[int, Any]:
        sent: Any = json.loads(body) if path.startswith("/api/") and "/commit/" not in path and body else {}
        if path == "/api/whoami-v2":
            return 200, {"type": "user", "name": "me", "orgs": [{"name": "Team"}]}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            name = f"{sent['organization']}/{sent['name']}"
            if name in self.files:
                return 409, {"url": f"{self.url}/{name}"}
            self.files[name], self.private[name] = {".gitattributes": b""}, sent["visibility"] == "private"
            return 200, {"url": f"{self.url}/{name}"}
        if path.startswith("/lfs/"):
            self.away = self.cut
            if self.cut:
                return 500, {}
            self.stored[path.removeprefix("/lfs/")] = body
            return 200, {}
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            upload = [one | {"actions": {"upload": {"href": f"{self.url}/lfs/{one['oid']}"}}} for one in objects]
            return 200, {"objects": [one if one["oid"] not in self.stored else objects[0] for one in upload]}
        owner, name, *rest = path.removeprefix("/api/models/").removeprefix("/").split("/")
        if rest and rest[0] in ("revision", "tree", "resolve"):
            return self._of_revision(*rest)
        return self._of_repository(f"{owner}/{name}", rest, sent, body)

    def _of_repository(self, name: str, rest: list[str], sent: Any, body: bytes) -> tuple[int, Any]:
        files = self.files[name]
        if not rest:
            siblings = [{"rfilename": file} for file in files]
            return 200, {"id": name, "sha": SHA, "private": self.private[name], "siblings": siblings}
        if name in self.foreign:
            return 403, {"error": "you have no right to write here"}
        if rest[0] == "preupload":
            modes = [
                (file["path"], "lfs" if file["path"].endswith(".safetensors") else "regular") for file in sent["files"]
            ]
            return 200, {"files": [{"path": file, "uploadMode": mode, "shouldIgnore": False} for file, mode in modes]}
        assert rest[0] == "commit", rest
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        return 200, {"commitUrl": f"{self.url}/{name}/commit/{SHA}", "commitOid": SHA}

    def _of_revision(self, kind: str, revision: str, file: str = "") -> tuple[int, Any]:
        names = {hashlib.sha1(name.encode()).hexdigest(): name for name in self.revisions}
        commit = next((sha for sha, name in names.items() if revision in (sha, name)), None)
        if commit is None:
            self.more_headers = {"X-Error-Code": "RevisionNotFound"}
            return 404, {"error": "no such revision"}
        files = self.revisions[names[commit]]
        if kind == "revision":
            return 200, {"id": "me/sums", "sha": commit, "siblings": []}
        etags = {name: hashlib.sha1(content).hexdigest() for name, content in files.items()}
        if kind == "tree":
            rows = [{"type": "file", "path": name, "oid": etags[name], "size": len(files[name])} for name in files]
            return 200, rows
        self.more_headers = {"X-Repo-Commit": commit, "ETag": f'"{etags[file]}"'}
        return 200, files[file]


def reach(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    """Have huggingface_hub ask this hub, with its token."""
    patch.setenv("HF_TOKEN", TOKEN)
    constants = {"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_TOKEN_PATH": "/nowhere"}
    constants["HUGGINGFACE_CO_URL_TEMPLATE"] = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    for name, value in constants.items():
        patch.setattr(f"huggingface_hub.constants.{name}", value)
    patch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _: None))  # between attempts
