"""A small S3 on loopback that refuses as it is told: what real servers answer when credentials, clocks or regions are wrong."""

import base64
import contextlib
import hashlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

_STATUS = {
    "AccessDenied": 403, "AuthorizationHeaderMalformed": 400, "ExpiredToken": 400, "InvalidAccessKeyId": 403,
    "InvalidToken": 400, "NoSuchBucket": 404, "NoSuchKey": 404, "PermanentRedirect": 301, "RequestTimeTooSkewed": 403,
    "SignatureDoesNotMatch": 403, "QuotaExceeded": 403, "AccountProblem": 403, "InvalidArgument": 400,
}  # fmt: skip


class FaultyS3(ThreadingHTTPServer):
    """`objects` by path. `refusal` is the code that every request gets; `keys` the access keys that are known."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.refusal = ""
        self.keys: set[str] | None = None
        self.readable = True
        self.redirects = False  # as a web server in front that wants https
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def verdict(self, method: str, authorization: str) -> str:
        """The code of the error, or nothing."""
        key = re.search(r"Credential=([^/]+)/", authorization)
        if self.keys is not None and (key is None or key[1] not in self.keys):
            return "InvalidAccessKeyId"
        if not self.readable and method != "PUT":
            return "AccessDenied"
        return self.refusal


class _Handler(BaseHTTPRequestHandler):
    server: FaultyS3
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", headers.get("length", str(len(body))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>told: {code}</Message><Region>eu-west-9</Region></Error>"
        region = {"x_amz_bucket_region": "eu-west-9"} if code == "PermanentRedirect" else {}
        self._answer(_STATUS[code], text.encode(), Content_Type="application/xml", **region)

    def _serve(self) -> None:
        self.server.requests.append(self.command)
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.redirects:
            self._answer(301, b"<html>moved</html>", Location=f"https://elsewhere.invalid{self.path}")
        elif code := self.server.verdict(self.command, self.headers.get("Authorization", "")):
            self._refuse(code)
        elif self.command == "PUT":
            kept = {name: value for name, value in self.headers.items() if name.lower().startswith("x-amz-meta-")}
            self.server.objects[path] = (body, kept)
            checksum = base64.b64encode(hashlib.sha256(body).digest()).decode()
            self._answer(200, x_amz_checksum_sha256=checksum, ETag=f'"{hashlib.md5(body).hexdigest()}"')
        elif path not in self.server.objects:
            self._refuse("NoSuchKey")
        else:
            held, kept = self.server.objects[path]
            self._answer(200, held, **kept)

    do_GET = do_HEAD = do_PUT = _serve


@contextlib.contextmanager
def faulty_s3() -> Iterator[FaultyS3]:
    """A running server that is gone afterwards."""
    with FaultyS3() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
