"""The server: one aiohttp application for all protocols."""

import asyncio
import contextlib
import logging
import os
import random
import signal
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import orjson
from aiohttp import web

from tests.fault_server import facts
from tests.fault_server.answers import LAST, Answers, digest, states_of, text_of
from tests.fault_server.delivery import SWAPS, deliver, gone, send, silence
from tests.fault_server.faults import FAULTS
from tests.fault_server.shapes import Generation, Wire, error, good

OUTAGE_SECONDS = 0.3  # of `503_no_workers`


@dataclass
class Settings:
    """One server."""

    name: str
    dialect: str = "sglang"  # of chat, models and metrics: sglang | vllm | openrouter | llamacpp
    answers: Answers = field(default_factory=Answers)
    faults: dict[str, float] = field(default_factory=dict)
    tokens_per_second: float = 0.0  # of one request; 0: at once
    slots: int = 64  # requests decoded at once; more wait
    model: str = "target"
    context_length: int = 8192
    most_tokens: int | None = None  # requests for more are refused
    target: Path | None = None  # folder of the target, for routes that take messages instead of ids
    layers: list[int] | None = None  # SGLang: returns the hidden states that come out of these layers
    pool: int = 1 << 20  # tokens of SGLang's key-value cache: longer answers are cut short without a word
    thinks: bool = False  # the hosted API thinks unless it is told not to
    last: bool = False  # SGLang: returns those of the last layer
    log: Path | None = None
    hang_after: int | None = None  # generations until it falls silent
    die_after: int | None = None  # generations until it is gone
    tls: tuple[Path, Path] | None = None  # certificate and key


class FaultServer:
    """The application; `run` serves it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.asked: Counter[str] = Counter()  # by prompt, for the dice
        self.seen: WeakKeyDictionary[asyncio.BaseTransport, int] = WeakKeyDictionary()  # requests by connection
        self.running = self.queued = self.generated = self.finished = 0
        self.peak = 0  # most requests at once
        self.injected: Counter[str] = Counter()
        self.slots = asyncio.Semaphore(settings.slots)
        self.hung = asyncio.Event()
        self.aborted: dict[str, asyncio.Event] = {}
        self.no_workers_until = 0.0
        self.log = os.open(settings.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if settings.log else None
        self.target: Any = None
        if settings.target:
            from scripts.lib.target.model import load_target

            self.target = load_target(settings.target)

    def application(self) -> web.Application:
        application = web.Application(client_max_size=1 << 28)
        application[SWAPS] = []
        routes = application.router
        routes.add_post("/completion", self.completion)
        routes.add_post("/generate", self.sglang_generate)
        routes.add_post("/v1/completions", self.openai_completions)
        routes.add_post("/v1/chat/completions", self.chat)
        routes.add_post("/abort_request", self.abort)
        routes.add_post("/control", self.control)
        routes.add_get("/stats", self.stats)
        for path in ("/health", "/health_generate", "/ready"):
            routes.add_get(path, self.health)
        settings = self.settings
        for path, document in facts.documents(
            settings.dialect,
            settings.model,
            settings.context_length,
            settings.slots,
            settings.layers,
            settings.last,
            settings.pool,
        ).items():
            routes.add_get(path, constant(document))
        routes.add_get("/metrics", self.metrics)
        return application

    # --- generation routes ---

    async def completion(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        return await self.generate(request, "llamacpp", body["prompt"], body["n_predict"], body.get("seed"), "")

    async def sglang_generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        sampling = body["sampling_params"]
        seed = sampling.get("sampling_seed")
        rid = body.get("rid") or ""
        states = hidden_states(body["input_ids"], self.settings) if body.get("return_hidden_states") else None
        return await self.generate(request, "sglang", body["input_ids"], sampling["max_new_tokens"], seed, rid, states)

    async def openai_completions(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        rid = body.get("request_id") or request.headers.get("X-Request-Id", "")
        return await self.generate(request, "vllm", body["prompt"], body["max_tokens"], body.get("seed"), rid)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        protocol = {"sglang": "sglang_chat", "vllm": "vllm_chat"}.get(self.settings.dialect, "openrouter")
        prompt_ids = body.get("input_ids") or self.render(body)
        limit = body.get("max_completion_tokens") or body["max_tokens"]
        rid = body.get("rid") or body.get("request_id") or ""
        off = (body.get("reasoning") or {}).get("enabled") is False
        thought = "Let me count." if self.settings.thinks and not off else None
        return await self.generate(request, protocol, prompt_ids, limit, body.get("seed"), rid, thought=thought)

    def render(self, body: dict) -> list[int]:
        """Prompt ids of a chat request; without a target its bytes serve as ids."""
        if self.target is None:
            return list(orjson.dumps(body["messages"], option=orjson.OPT_SORT_KEYS))
        from scripts.lib.core.records import Message

        messages = [Message(message["role"], message["content"]) for message in body["messages"]]
        return self.target.render(messages, orjson.dumps(body["tools"]).decode() if body.get("tools") else None)

    async def generate(
        self,
        request: web.Request,
        protocol: str,
        prompt_ids: list[int],
        limit: int,
        seed: int | None,
        rid: str,
        states: list[list[float]] | None = None,
        thought: str | None = None,
    ) -> web.StreamResponse:
        """Answer one request, or fail it."""
        if self.hung.is_set():
            await silence(request)
        generation = self.answer(protocol, prompt_ids, limit, rid)
        generation.states, generation.seed, generation.reasoning = states, seed, thought
        generation.key = request.headers.get("Authorization", "").removeprefix("Bearer ") or generation.key
        name, reply = self.reply(request, protocol, generation, limit)
        if reply.status != 200 or reply.delivery in ("drop", "silence"):
            return await deliver(request, reply)
        begun, delivered = time.monotonic(), False
        try:
            if await self.decode(request, generation.request_id, len(generation.ids)):
                response = await deliver(request, reply)
                delivered = reply.delivery in ("whole", "split", "doubled", "doubled_late") and not gone(request)
            else:
                name = "aborted"
                abort = FAULTS["abort_200"](protocol, generation, random.Random(0), time.time())
                response = await send(request, abort or reply)
        finally:
            self.finished += 1
            self.write_log(
                server=self.settings.name,
                prompt=digest(prompt_ids),
                output=digest(generation.ids),
                tokens=len(generation.ids),
                fault=name,
                delivered=delivered,
                seed=seed,
                rid=generation.request_id,
                seconds=round(time.monotonic() - begun, 4),
            )
            self.after_generation()
        return response

    def answer(self, protocol: str, prompt_ids: list[int], limit: int, rid: str) -> Generation:
        """The generation that this prompt gets."""
        if protocol.startswith("sglang"):
            limit = min(limit, self.settings.pool - 2 - len(prompt_ids))
        ids, finish = self.settings.answers(prompt_ids, limit)
        stop = self.settings.answers.stop_id
        text = text_of([token for token in ids if token != stop])
        if protocol == "openrouter" and self.target is not None and finish == "stop":
            ids = [*self.target.encode(text), stop]  # as many as the client will count
        rid = rid or f"{self.settings.name}-{self.finished}"
        return Generation(prompt_ids, ids, text, finish, None, self.settings.model, rid, stop)

    def reply(self, request: web.Request, protocol: str, generation: Generation, limit: int) -> tuple[str | None, Wire]:
        """(fault or None, what goes over the wire)."""
        assert request.transport is not None
        self.seen[request.transport] = self.seen.get(request.transport, 0) + 1
        prompt = digest(generation.prompt_ids)
        self.asked[prompt] += 1
        dice = random.Random(f"{self.settings.answers.seed} {self.settings.name} {prompt} {self.asked[prompt]}")
        name = self.draw(dice)
        now = time.monotonic()
        if now < self.no_workers_until:
            name = "503_no_workers"  # an outage meets every request
        elif name == "503_no_workers":
            self.no_workers_until = now + OUTAGE_SECONDS
        if name == "disconnect_idle" and self.seen[request.transport] < 2:
            name = None  # only a connection that was idle can be stale
        if len(generation.prompt_ids) >= self.settings.context_length:
            name = "400_overlong_input"
        elif protocol != "llamacpp" and len(generation.prompt_ids) + limit > self.settings.context_length:
            name = "400_context"
        if self.settings.most_tokens is not None and limit > self.settings.most_tokens:
            return "too much asked", error(protocol, 400, f"max_tokens: at most {self.settings.most_tokens}")
        reply = FAULTS[name](protocol, generation, dice, time.time()) if name else None
        if name and reply:
            self.injected[name] += 1
            return name, reply
        return None, good(protocol, generation)

    def draw(self, dice: random.Random) -> str | None:
        """The fault of one request, or none."""
        point = dice.random()
        for name, rate in self.settings.faults.items():
            if name == "health_false_negative":
                continue
            point -= rate
            if point < 0:
                return name
        return None

    async def decode(self, request: web.Request, rid: str, tokens: int) -> bool:
        """Take the time that `tokens` tokens take, in a slot. False: the request was aborted."""
        stop = self.aborted[rid] = asyncio.Event()
        self.queued += 1
        self.peak = max(self.peak, self.running + self.queued)
        try:
            async with self.slots:
                self.queued -= 1
                self.running += 1
                try:
                    rate = self.settings.tokens_per_second
                    if rate:
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(stop.wait(), tokens / rate)
                    if self.hung.is_set():
                        await silence(request)
                    self.generated += tokens
                finally:
                    self.running -= 1
        finally:
            self.aborted.pop(rid, None)
        return not stop.is_set()

    def after_generation(self) -> None:
        if self.finished == self.settings.hang_after:
            self.hung.set()
        if self.finished == self.settings.die_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def write_log(self, **record: Any) -> None:
        if self.log is not None:
            os.write(self.log, orjson.dumps(record) + b"\n")

    # --- everything else ---

    async def abort(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        stops = list(self.aborted.values()) if body.get("abort_all") else [self.aborted.get(body.get("rid"))]
        for stop in stops:
            if stop is not None:
                stop.set()
        return web.Response()

    async def control(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        if "hang" in body:
            (self.hung.set if body["hang"] else self.hung.clear)()
        if "faults" in body:
            self.settings.faults, self.no_workers_until = body["faults"], 0.0
        if "tokens_per_second" in body:
            self.settings.tokens_per_second = body["tokens_per_second"]
        if body.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        return web.json_response({})

    async def stats(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "running": self.running,
                "queued": self.queued,
                "peak": self.peak,
                "finished": self.finished,
                "hung": self.hung.is_set(),
                "injected": self.injected,
            }
        )

    async def health(self, request: web.Request) -> web.Response:
        sick = random.random() < self.settings.faults.get("health_false_negative", 0)
        return web.Response(status=503 if sick else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        usage = min(1.0, self.running / self.settings.slots)
        text = facts.metrics(self.settings.model, self.running, self.queued, usage, self.generated)
        return web.Response(text=text)


def hidden_states(ids: list[int], settings: Settings) -> list[list[float]] | None:
    """What this server returns of a prompt: one row per id, its layers joined."""
    if settings.layers is not None:
        return states_of(ids, settings.layers)
    return states_of(ids, [LAST]) if settings.last else None


def constant(document: bytes) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler that always answers with the same JSON."""

    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=document, content_type="application/json")

    return handle


async def serve(settings: Settings, port: int, *, until_stdin_closes: bool = False) -> None:
    """Serve until the process ends, or until whoever holds the other end of stdin is gone."""
    # Connections that are broken off on purpose would be reported as errors of the handler.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    server = FaultServer(settings)
    # Longer than the client keeps connections: stale ones come from the fault, not by accident.
    runner = web.AppRunner(server.application(), access_log=None, keepalive_timeout=75)
    await runner.setup()
    context = None
    if settings.tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*settings.tls)
    site = web.TCPSite(runner, "127.0.0.1", port, backlog=4096, ssl_context=context)
    await site.start()
    bound = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    print(f"{'https' if context else 'http'}://127.0.0.1:{bound}", flush=True)
    end = asyncio.Event()
    if until_stdin_closes:
        asyncio.get_running_loop().add_reader(0, lambda: end.set() if not os.read(0, 1) else None)
    await end.wait()
