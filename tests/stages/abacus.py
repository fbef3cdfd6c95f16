"""An engine that nobody has: what a new kind takes besides its line in the registry."""

import sys
from pathlib import Path

from scripts.lib.engines.base import Adapter, Answer, Call, EngineFacts, Failure, Reply, Request, post
from scripts.lib.engines.errors import read_error
from scripts.lib.engines.launching import PORT, PROBE_IDS, ServerPlan, with_flags
from scripts.lib.engines.metrics import MetricNames
from scripts.lib.engines.values import as_count, as_object, as_text, check_ids, read_ids, read_object
from tests.stages import abacus_server


class Abacus(Adapter):
    """All that there is to know of it."""

    kind = "abacus"
    exact = True
    hosted = False
    names_its_model = True
    returns_hidden_states = False
    only_gguf = False
    compiles = False
    environment = None
    metrics = MetricNames(
        running=("abacus_busy",),
        queued=("abacus_waiting",),
        kv_usage=(),
        generated=("abacus_beads_moved",),
        progress=("abacus_beads_moved",),
        path="/load",
    )

    def request(self, request: Request) -> Call:
        return post("/count", {"question": request.prompt_ids, "at_most": request.max_tokens})

    def read(self, request: Request, reply: Reply, now: float) -> Answer | Failure:
        if reply.status != 200:
            return read_error(reply.status, reply.headers, reply.body, now)
        body = read_object(reply)
        if isinstance(body, Failure):
            return body
        ids = read_ids(body.get("words"), "is it an abacus?")
        if isinstance(ids, Failure):
            return ids
        answer = Answer(as_text(body.get("because")) or "", ids, prompt_tokens=as_count(body.get("heard")))
        return check_ids(request, answer)

    def probe(self) -> list[Call]:
        return [Call("GET", "/who")]

    def read_probe(self, replies: list[Reply | None]) -> EngineFacts:
        told = as_object(replies[0].json() if replies[0] else None)
        return EngineFacts(
            self.kind, as_text(told.get("release")), tuple(told.get("known", ())), context_length=told.get("reach")
        )

    def one_token(self) -> Call:
        return post("/count", {"question": PROBE_IDS, "at_most": 1})

    def server_plan(self, target_dir: Path) -> ServerPlan:
        ours = {"listen-on": PORT, "called": self.served_model}
        return ServerPlan(with_flags([sys.executable, abacus_server.__file__], ours, self.config.engine.launch.flags))
