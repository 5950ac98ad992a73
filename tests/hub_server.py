"""A hub of models on this machine that speaks what `huggingface_hub` asks for."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c" * 40
_INFO = re.compile(r"/api/models/([^/]+/[^/]+)/revision/([^/?]+)")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/?]+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)")


@dataclass
class Hub:
    """What it has, and what was asked.

    Attributes:
        models: folder of each, by name.
        gated: names that need the token `good`.
        cuts: how many more answers with a file end in its middle.
        asked: method, path and range of requests.
    """

    models: dict[str, Path]
    url: str = ""
    gated: frozenset[str] = frozenset()
    cuts: int = 0
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    def files_sent(self) -> list[str]:
        """Names of files whose content was asked for."""
        found = [_FILE.fullmatch(path) for method, path, _ in self.asked if method == "GET"]
        return [match[3] for match in found if match]


@contextmanager
def hub_server(models: dict[str, Path]) -> Iterator[Hub]:
    """Serves model folders by name at `Hub.url`."""
    hub = Hub(models)

    class Handler(_Handler):
        served = hub

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def _answer(self) -> None:
        hub = self.served
        hub.asked.append((self.command, self.path, self.headers.get("range", "")))
        found = _INFO.match(self.path) or _TREE.match(self.path) or _FILE.match(self.path)
        if found is None or found[1] not in hub.models:
            self._refuse(401, "RepoNotFound")
        elif found[1] in hub.gated and self.headers.get("authorization") != "Bearer good":
            self._refuse(403, "GatedRepo")
        elif found[2] not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        else:
            self._tell(found, hub.models[found[1]])

    def _tell(self, found: re.Match[str], folder: Path) -> None:
        if found.re is _INFO:
            self._send_json({"id": found[1], "sha": COMMIT, "siblings": []})
        elif found.re is _TREE:
            self._send_json([_entry(path, folder) for path in sorted(folder.rglob("*"))])
        elif (file := folder / found[3]).is_file():
            self._send_file(file.read_bytes())
        else:
            self._refuse(404, "EntryNotFound")

    def _send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, content: bytes) -> None:
        begin = re.match(r"bytes=(\d+)-", self.headers.get("range", ""))
        first = int(begin[1]) if begin else 0
        self.send_response(206 if begin else 200)
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("etag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("accept-ranges", "bytes")
        self.send_header("content-length", str(len(content) - first))
        if begin:
            self.send_header("content-range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        rest = content[first:]
        if self.served.cuts and len(content) > 4096:
            self.served.cuts -= 1
            rest = rest[: len(rest) // 2]
            self.close_connection = True
        self.wfile.write(rest)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("x-error-code", code)
        self.send_header("x-error-message", code)
        self.send_header("content-length", "0")
        self.end_headers()


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    name = str(path.relative_to(folder))
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
    size, digest = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": name, "oid": digest[:40], "size": size}
    if path.suffix == ".safetensors":
        entry["lfs"] = {"oid": digest, "size": size, "pointerSize": 130}
    return entry
