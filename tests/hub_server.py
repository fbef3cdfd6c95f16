"""The endpoints of the Hugging Face Hub that reading a dataset or a model needs, on this machine.

Run it as a process of its own or in a thread. What huggingface_hub asks for was read off its requests:
`GET /api/datasets/{owner}/{name}[/revision/{revision}]` and `HEAD`/`GET /datasets/{owner}/{name}/resolve/{revision}/{path}`
with ranges; models are asked for without `datasets`.
"""

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Datasets by name: path -> bytes. `requests` are the lines that were asked, with their range and token."""

    def __init__(self):
        self.datasets: dict[str, dict[str, bytes]] = {}
        self.gated: dict[str, str] = {}  # dataset -> the token that opens it
        self.cut: dict[str, int] = {}  # path -> bytes after which the connection breaks, once
        self.missing: set[str] = set()  # paths that are listed, but not there
        self.busy: list[tuple[int, dict[str, str]]] = []  # (status, headers) of the next listings
        self.busy_files: list[tuple[int, dict[str, str]]] = []  # of the next files
        self.bad_tokens: set[str] = set()
        self.without_ranges: set[str] = set()  # paths that are sent as a whole, whatever is asked for
        self.without_etag: set[str] = set()
        self.while_sent: dict[str, Callable[[], None]] = {}  # path -> what happens while its bytes of now are sent next
        self.requests: list[tuple[str, str, str | None, str | None]] = []
        self.url = ""

    def asked(self, method: str, path: str) -> list[str | None]:
        """Ranges of the requests for a file."""
        return [asked[2] for asked in self.requests if asked[0] == method and asked[1].endswith(path)]


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            hub.requests.append((self.command, path, self.headers.get("Range"), token))
            parts = path.removeprefix("/api").removeprefix("/datasets/").removeprefix("/models").lstrip("/").split("/")
            name = "/".join(parts[:2])
            if name not in hub.datasets:
                return self.fail(404, "RepoNotFound")
            if token in hub.bad_tokens:
                return self.fail(401, "", "Invalid credentials in Authorization header")
            if path.startswith("/api/") and hub.busy:
                status, headers = hub.busy.pop(0)
                return self.fail(status, "", headers=headers)
            if name in hub.gated and hub.gated[name] != token:
                return self.fail(403 if token else 401, "GatedRepo")
            if parts[3:] and parts[3] not in ("main", COMMIT):
                return self.fail(404, "RevisionNotFound")
            if path.startswith("/api/"):
                told = self.tree(name) if parts[2:3] == ["tree"] else self.describe(name)
                return self.send(json.dumps(told).encode(), "application/json", body)
            file = "/".join(parts[4:])
            if hub.busy_files:
                status, headers = hub.busy_files.pop(0)
                return self.fail(status, "", headers=headers)
            if file not in hub.datasets[name] or file in hub.missing:
                return self.fail(404, "EntryNotFound")
            return self.send_file(hub.datasets[name][file], file, body)

        def describe(self, name: str) -> dict:
            files = [
                {"rfilename": path, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
                for path, data in hub.datasets[name].items()
            ]
            return {"id": name, "sha": COMMIT, "siblings": files, "private": False, "tags": [], "downloads": 0}

        def tree(self, name: str) -> list[dict]:
            return [
                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for path, data in hub.datasets[name].items()
            ]

        def fail(self, status: int, code: str, message: str = "", headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"X-Error-Code": code, "X-Error-Message": message or code, **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def send(self, data: bytes, kind: str, body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def send_file(self, data: bytes, path: str, body: bool) -> None:
            start = 0
            asked = self.headers.get("Range")
            if asked and path not in hub.without_ranges:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                start, end = int(first), int(last or len(data) - 1)
                part = data[start : end + 1]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(data)}")
            else:
                part = data
                self.send_response(200)
            if path not in hub.without_etag:
                self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            if not body:
                return
            cut = hub.cut.pop(path, None)
            hub.while_sent.pop(path, lambda: None)()
            with contextlib.suppress(ConnectionError):  # the client has seen enough
                self.wfile.write(part[:cut])
            if cut is not None:
                self.close_connection = True
                self.wfile.flush()
                self.connection.shutdown(2)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
