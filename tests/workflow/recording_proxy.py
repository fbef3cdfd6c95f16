"""A proxy between the client and a real engine that remembers every exchange, as a second witness."""

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass
class Exchange:
    """One completed /completion call: the ids sent and the ids that the engine reported."""

    prompt_ids: list[int]
    output_ids: list[int]
    delivered: bool  # the client was still there to take the answer


@dataclass
class Recorder:
    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def delivered(self) -> list[Exchange]:
        with self.lock:
            return [exchange for exchange in self.exchanges if exchange.delivered]


@contextlib.contextmanager
def recording(engine_url: str) -> Iterator[Recorder]:
    """Serve a recording proxy for `engine_url` on a free loopback port."""
    upstream = urlsplit(engine_url).netloc
    recorder = Recorder()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            connection = http.client.HTTPConnection(upstream, timeout=120)
            headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
            connection.request(self.command, self.path, body or None, headers)
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            delivered = True
            try:
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.getheader("Content-Type", "application/json"))
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                self.wfile.flush()
            except OSError:
                delivered = False
            if self.path.startswith("/completion") and answer.status == 200:
                sent, got = json.loads(body), json.loads(data)
                with recorder.lock:
                    recorder.exchanges.append(Exchange(sent["prompt"], got["tokens"], delivered))

        do_GET = do_POST = forward

        def log_message(self, *arguments) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    recorder.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield recorder
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
