"""A hub of a few files on this machine, as huggingface_hub asks one; HF_ENDPOINT names it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40
Files = Mapping[str, Mapping[str, bytes]]


class FakeHub(ThreadingHTTPServer):
    """A server of repositories: `files` of each by name. The first answer that is longer is cut."""

    files: Files
    cut: int | None = None
    requests: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """Answers what the hub's library asks before and while it downloads."""

    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append(
            f"{self.command} {path} {self.headers.get('Range', '')}".strip()
        )
        if path.startswith("/api/models/"):
            name = "/".join(path.split("/")[3:5])
            files = self.server.files.get(name)
            if files is None:
                self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
                return
            listed = [{"rfilename": x, "size": len(data)} for x, data in files.items()]
            model_info = {
                "id": name,
                "modelId": name,
                "sha": COMMIT,
                "siblings": listed,
                "gated": False,
            }
            self.send(
                200, json.dumps(model_info).encode(), {"Content-Type": "application/json"}, body
            )
            return
        repository, _, file = path.strip("/").partition("/resolve/")
        data = self.server.files.get(repository, {}).get(file.partition("/")[2])
        if data is None:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            return
        tag = f'"{hashlib.sha256(data).hexdigest()}"'
        begin, status = 0, 200
        if given := self.headers.get("Range"):
            begin, status = int(given.removeprefix("bytes=").split("-")[0]), 206
        headers = {"X-Repo-Commit": COMMIT, "ETag": tag, "Accept-Ranges": "bytes"}
        if status == 206:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self.send(status, data[begin:], headers, body)

    def send(self, status: int, data: bytes, headers: Mapping[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        cut = self.server.cut
        if body and cut is not None and len(data) > cut:
            self.server.cut = None
            self.wfile.write(data[:cut])
            self.close_connection = True
        elif body:
            self.wfile.write(data)


@contextmanager
def fake_hub(files: Files) -> Iterator[FakeHub]:
    """Serve repositories until the block ends."""
    with FakeHub(("127.0.0.1", 0), Handler) as server:
        server.files, server.requests = files, []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
