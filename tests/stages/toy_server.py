"""A server that speaks enough of llama.cpp's protocol to be supervised, and that misbehaves when told to.

Installed by the fleet tests as `bin/llama-server` of an environment. `TOY` in its environment names
what it does from the start; POST /do/NAME makes it do that later.

    crash     exit with status 3
    relapse   crash, and once more when it is started again
    hang      go on answering /metrics with one request running, but never make a token again
    stubborn  ignore SIGTERM
    refuseN   answer every request for tokens with HTTP status N
    warm-up   ask itself for a page at the start, as SGLang does, and exit when that fails
    family    start a child in a session of its own, whose pid GET /child tells
"""

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

RELAPSE = Path(__file__).with_name("relapse")
hung = threading.Event()
children: list[int] = []
refusals: list[int] = []


def do(name: str) -> None:
    if name == "crash":
        print("toy: no kernel image is available", file=sys.stderr, flush=True)
        os._exit(3)
    elif name == "relapse":
        RELAPSE.touch()
        do("crash")
    elif name == "hang":
        hung.set()
    elif name.startswith("refuse"):
        refusals.append(int(name.removeprefix("refuse")))
    elif name == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif name == "family":
        children.append(subprocess.Popen(["sleep", "100000"], start_new_session=True).pid)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        if self.path == "/child":
            self.answer(str(children[0]))
        else:
            self.answer(f"llamacpp:requests_processing {int(hung.is_set())}\nllamacpp:n_decode_total 7\n")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/do/"):
            do(self.path.removeprefix("/do/"))
        elif hung.is_set():
            threading.Event().wait()
        if refusals:
            self.answer("toy says no", refusals[0])
        else:
            self.answer("{}")


def warm_up(port: int) -> None:
    """The page that the server has for everybody, by way of whatever proxy its environment names."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30).close()
    except OSError as error:
        print(f"toy: warm-up failed: {error}", file=sys.stderr, flush=True)
        os._exit(4)


if __name__ == "__main__":
    if RELAPSE.exists():
        RELAPSE.unlink()
        do("crash")
    for name in filter(None, os.environ.get("TOY", "").split(",")):
        do(name)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    if "warm-up" in os.environ.get("TOY", ""):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        warm_up(port)
        threading.Event().wait()
    server.serve_forever()
