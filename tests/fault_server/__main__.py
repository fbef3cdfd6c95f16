"""Start a fault server by hand or from a test; it prints its URL."""

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path

from tests.fault_server.answers import Answers
from tests.fault_server.faults import CURABLE, FAULTS
from tests.fault_server.server import Settings, serve


def parse_faults(text: str) -> dict[str, float]:
    """`abort_200=0.02,502_html=0.05`, or `curable=0.02` for each fault that a resend cures."""
    rates: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, rate = part.partition("=")
        names = CURABLE if name == "curable" else (name,)
        unknown = set(names) - set(FAULTS)
        if unknown:
            raise SystemExit(f"no fault {', '.join(unknown)}; there are {', '.join(FAULTS)}")
        rates |= dict.fromkeys(names, float(rate))
    return rates


def parse_layers(text: str) -> list[int]:
    """`1,14,26`."""
    return [int(layer) for layer in text.split(",")]


def parse_tls(text: str) -> tuple[Path, Path]:
    certificate, key = text.split(",")
    return Path(certificate), Path(key)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fault_server", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0, help="0: any free one; the URL is printed")
    parser.add_argument(
        "--name", default="one", help="distinguishes the servers of a fleet: other faults, one log each"
    )
    parser.add_argument("--dialect", choices=["llamacpp", "sglang", "vllm", "openrouter"], default="sglang")
    parser.add_argument("--seed", type=int, default=0, help="of answers and faults")
    parser.add_argument("--median-tokens", type=float, default=30.0, help="median length of an answer")
    parser.add_argument("--spread", type=float, default=0.8, help="sigma of the logarithm of the length")
    parser.add_argument("--faults", type=parse_faults, default={}, help="name=rate,...; curable=rate for many")
    parser.add_argument("--tokens-per-second", type=float, default=0.0, help="of one request; 0: at once")
    parser.add_argument("--slots", type=int, default=64, help="requests decoded at once")
    parser.add_argument("--model", default="target", help="model name that the server reports")
    parser.add_argument("--context-length", type=int, default=8192)
    parser.add_argument("--most-tokens", type=int)
    parser.add_argument("--target", type=Path, help="folder of prepare_target: renders chat messages to real ids")
    parser.add_argument("--layers", type=parse_layers, help="SGLang: return the states that come out of these: 1,14,26")
    parser.add_argument(
        "--thinks", type=int, default=0, help="OpenRouter: 1: think unless `reasoning.enabled` is false"
    )
    parser.add_argument("--pool", type=int, default=1 << 20, help="SGLang: tokens that its key-value cache holds")
    parser.add_argument("--last", type=int, default=0, help="SGLang: 1: return the hidden states of the last layer")
    parser.add_argument("--log", type=Path, help="JSON lines of all generations")
    parser.add_argument("--hang-after", type=int, help="fall silent after so many generations")
    parser.add_argument("--die-after", type=int, help="SIGKILL itself after so many generations")
    parser.add_argument("--tls", type=parse_tls, help="certificate,key: files in PEM")
    parser.add_argument("--until-stdin-closes", action="store_true", help="end with the process that started it")
    parsed = vars(parser.parse_args(argv))
    answers = Answers(parsed.pop("seed"), parsed.pop("median_tokens"), parsed.pop("spread"))
    port, attached = parsed.pop("port"), parsed.pop("until_stdin_closes")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(Settings(answers=answers, **parsed), port, until_stdin_closes=attached))


if __name__ == "__main__":
    sys.exit(main())
