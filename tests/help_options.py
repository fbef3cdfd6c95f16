"""Options of a server, read from what its `--help` prints. `unit/help/` holds them for the versions in envs/.

    .venvs/sglang/bin/python -m sglang.launch_server --help | python -m tests.help_options > tests/unit/help/sglang.txt
    VLLM_TARGET_DEVICE=cpu .venvs/vllm/bin/vllm serve --help=all | python -m tests.help_options > tests/unit/help/vllm.txt

No GPU is needed; without that variable vLLM looks for one before it helps.
"""

import sys
from pathlib import Path

RECORDED = Path(__file__).parent / "unit" / "help"


def options(text: str) -> dict[str, str]:
    """What follows each option: nothing (a bare flag), `{one,of,these}`, or `VALUE`.

    Reads the headings of argparse's list, `  --name VALUE, --other VALUE  What it does.`
    """
    found = {}
    for line in text.splitlines():
        if not line.startswith("  -"):
            continue
        for part in line.strip().partition("  ")[0].split(", "):
            name, _, value = part.partition(" ")
            if name.startswith("--"):
                found[name] = choices(value) if value.startswith("{") else "VALUE" if value else ""
    return found


def choices(value: str) -> str:
    """Choices in one order: SGLang prints those of some options as a set."""
    inner, _, rest = value.strip("{").partition("}")
    return "{" + ",".join(sorted(inner.split(","))) + "}" + rest


def written(found: dict[str, str]) -> str:
    """Options as they are recorded, one a line."""
    return "".join(f"{name} {value}".rstrip() + "\n" for name, value in sorted(found.items()))


def recorded(server: str) -> dict[str, str]:
    """The options that were recorded of a server, such as `sglang`."""
    lines = (RECORDED / f"{server}.txt").read_text().splitlines()
    return {name: value for name, _, value in (line.partition(" ") for line in lines)}


if __name__ == "__main__":
    sys.stdout.write(written(options(sys.stdin.read())))
