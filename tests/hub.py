"""A stand-in of the Hugging Face hub on loopback: what huggingface_hub asks when it pushes a model."""

import base64
import json
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.away_server import AwayServer

TOKEN, COMMIT = "hf_" + "Ab3" * 11, "a" * 40


class Hub(AwayServer):
    """The hub of the account `me`, whose token is `TOKEN`.

    Attributes:
        files: contents by name, of each repository; `private`: whether it is.
        foreign: repositories that the account may read alone.
        asked: the paths of all requests.
        cut: whether it is away from the first file of weights on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.files, self.private = dict[str, dict[str, bytes]](), dict[str, bool]()
        self.foreign, self.stored, self.asked, self.cut = set[str](), dict[str, bytes](), list[str](), False

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        path = urlsplit(request.path).path
        is_known = request.headers.get("Authorization") == f"Bearer {TOKEN}" or path.startswith("/lfs/")
        status, content = self._answer(path, body) if is_known else (401, {})
        self.asked += [path] * (path != "/api/agent-harnesses")  # which is asked once in a process
        return status, json.dumps(content).encode()

    def _answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if path.startswith("/lfs/"):
            self.away, self.stored[path[5:]] = self.cut, body
            return 500 if self.cut else 200, {}
        name = "/".join(path.split("/")[3:5])
        sent: Any = [json.loads(line) for line in body.splitlines()] if "/commit/" in path else json.loads(body or "{}")
        match path.removeprefix(f"/api/models/{name}").partition("/main")[0]:
            case "/api/whoami-v2":
                return 200, {"type": "user", "name": "me", "orgs": [{"name": "Team"}]}
            case "/api/validate-yaml":
                return 200, {}
            case "/api/repos/create":
                name = f"{sent['organization']}/{sent['name']}"
                if is_new := name not in self.files:
                    self.files[name], self.private[name] = {".gitattributes": b""}, sent["visibility"] == "private"
                return 200 if is_new else 409, {"url": f"{self.url}/{name}"}
            case "":
                siblings = [{"rfilename": file} for file in self.files[name]]
                return 200, {"id": name, "sha": COMMIT, "private": self.private[name], "siblings": siblings}
            case _ if name in self.foreign:
                return 403, {}
            case "/preupload":
                modes = {file["path"]: ["regular", "lfs"]["tensors" in file["path"]] for file in sent["files"]}
                rows = [{"path": file, "uploadMode": mode, "shouldIgnore": False} for file, mode in modes.items()]
                return 200, {"files": rows}
            case "/commit":
                for kind, value in ((line["key"], line["value"]) for line in sent[1:]):
                    content = self.stored[value["oid"]] if kind == "lfsFile" else value.get("content", "")
                    self.files[name][value["path"]] = base64.b64decode(content) if kind == "file" else content
                    if kind == "deletedFile":
                        del self.files[name][value["path"]]
                return 200, {"commitUrl": f"{self.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT}
        assert path.endswith(".git/info/lfs/objects/batch"), path
        hrefs = {each["oid"]: {"upload": {"href": f"{self.url}/lfs/{each['oid']}"}} for each in sent["objects"]}
        return 200, {"objects": [each | {"actions": hrefs[each["oid"]]} for each in sent["objects"]]}


def reach(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    """Have huggingface_hub ask this hub, with its token, and not wait between attempts."""
    patch.setenv("HF_TOKEN", TOKEN)
    constants = {"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_TOKEN_PATH": "/nowhere"}
    for name, value in constants.items():
        patch.setattr(f"huggingface_hub.constants.{name}", value)
    patch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _: None))
