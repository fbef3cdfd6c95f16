"""The server of an engine that nobody has, with a wire shape of its own.

python abacus_server.py --listen-on PORT --called NAME --diary FILE
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STOP, CONTEXT = 2, 2048


def said(ids: list[int], most: int) -> tuple[list[int], str]:
    """(ids, finish reason) of the answer to a prompt."""
    words = [1000 + (sum(ids) * (place + 7)) % 15_000 for place in range(5 + sum(ids) % 40)]
    return (words[:most], "length") if len(words) >= most else ([*words, STOP], "stop")


class Handler(BaseHTTPRequestHandler):
    name, diary = "", Path()
    beads = 0

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def note(self, **what: object) -> None:
        with open(self.diary, "a") as file:
            file.write(json.dumps({"path": self.path, **what}) + "\n")

    def do_GET(self) -> None:
        self.note()
        if self.path == "/who":
            self.answer(json.dumps({"release": "7", "known": [self.name], "reach": CONTEXT}))
        else:
            self.answer(f"abacus_busy 0\nabacus_waiting 0\nabacus_beads_moved {Handler.beads}\n")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words, why = said(body["question"], body["at_most"])
        Handler.beads += len(words)
        self.note(question=body["question"])
        self.answer(json.dumps({"words": words, "because": why, "heard": len(body["question"])}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen-on", type=int)
    parser.add_argument("--called")
    parser.add_argument("--diary", type=Path)
    arguments = parser.parse_args()
    Handler.name, Handler.diary = arguments.called, arguments.diary
    ThreadingHTTPServer(("127.0.0.1", arguments.listen_on), Handler).serve_forever()


if __name__ == "__main__":
    main()
