"""Run the golden samples and the cases of a folder, print what differs. See `tests.cases`."""

import argparse
import json
import re
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from scripts.lib.prompts.sources.rows import kind_of
from tests.cases import golden
from tests.cases.expectations import Case, judge
from tests.cases.stages import Bench, Run, served

# The tokenizer and template that a case's own words ask for; the first is for those that name none.
TARGETS = {
    "": "qwen3|Qwen-Qwen3-4B-Instruct-2507",
    r"<\|eot_id\|>|\bllama": "llama3.1|meta-llama-Llama-3.1-8B-Instruct",
    r"\bkimi": "kimi-k2.5-shaped|own",
    r"\bdeepseek": "deepseek_v3|own",
    r'\breasoning \\?"': "qwen3|Qwen-Qwen3-4B-Thinking-2507",
}
PRICES = {"price_prompt": 1.0, "price_output": 1.0}
# A server that is never believed must not hold this up for an hour.
PATIENCE = {"outage_seconds": 10, "backoff_first": 0.1, "backoff_cap": 1}


def main(argv: list[str] | None = None) -> int:
    """0 when every case holds, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.cases", description=__doc__)
    parser.add_argument(
        "folder", type=Path, help="holds golden_ids.json and tokenizers/, found/*/expected.json, or both"
    )
    parser.add_argument("names", nargs="*", help="only these cases; default: all")
    options = parser.parse_args(argv)
    folder = options.folder.resolve()
    failed = count = 0
    with tempfile.TemporaryDirectory(prefix="cases-") as work:
        bench = Bench(Path(work), folder / "tokenizers", folder / "templates")
        for name, problems in _judged(bench, folder, options.names):
            count += 1
            failed += bool(problems)
            print(f"{'FAIL' if problems else 'pass'}  {name}", flush=True)
            for problem in problems:
                print(f"        {problem}", flush=True)
    print(f"{count - failed} of {count} pass")
    return int(failed > 0 or count == 0)


def _judged(bench: Bench, folder: Path, names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(name, problems) of each case."""
    for entry in golden.entries(folder / "golden_ids.json"):
        if not names or entry["id"] in names:
            yield entry["id"], [problem for problem in [golden.check(bench, entry)] if problem]
    for expected in sorted(folder.glob("found/*/expected.json")) or sorted(folder.glob("*/expected.json")):
        if not names or expected.parent.name in names:
            yield expected.parent.name, judge(_run(bench, expected.parent, (folder / "tokenizers").is_dir()))


def _run(bench: Bench, folder: Path, tokenizers: bool) -> Case:
    """The case in `folder`, all its inputs run in a copy of it."""
    values = json.loads((folder / "expected.json").read_bytes())
    words = json.dumps([values.get(key) for key in ("got", "expected", "kind")], ensure_ascii=False)
    tokenizer = values.get("tokenizer") or _tokenizer(words) if tokenizers else ""
    own = bench.folder() / folder.name
    shutil.copytree(folder, own, symlinks=True)
    _restore_links(own)
    runs = _answers(bench, own, tokenizer, words) if (own / "server.py").is_file() else _sources(bench, own, tokenizer)
    return Case(own, values["expected"], runs)


def _tokenizer(words: str) -> str:
    for pattern, name in TARGETS.items():
        if pattern and re.search(pattern, words, re.IGNORECASE):
            return name
    return TARGETS[""]


def _sources(bench: Bench, folder: Path, tokenizer: str) -> dict[str, list[Run]]:
    """Each input as class A and B; a folder also as the glob of its files."""
    runs: dict[str, list[Run]] = {}
    linked = {path.resolve() for path in folder.rglob("*") if path.is_symlink()}
    for path in sorted(folder.iterdir()):
        if path.resolve() in linked or path.name.startswith((".", "_")):
            continue
        if path.is_dir():
            sources = [str(path)]
            if any(child.is_dir() for child in path.iterdir()):
                sources.append(f"{path}/**/*.jsonl")
        elif kind_of(path.name) and path.suffix != ".json":
            sources = [str(path)]
        else:
            continue
        found = [bench.run(source, data_class, tokenizer) for source in sources for data_class in "AB"]
        runs.setdefault(path.name.split(".")[0], []).extend(found)
    return runs


def _answers(bench: Bench, folder: Path, tokenizer: str, words: str) -> dict[str, list[Run]]:
    """The prompts of a case with a server, answered by it; `budget of $1` in its words is the budget."""
    budget = re.search(r"budget of \$([\d.]+)", words)
    sections = {"budget": {"cost": float(budget[1])}} if budget else {}
    with served(folder / "server.py") as url:
        engine = {"kind": "openai", "endpoints": [url], "served_model": "m", **PRICES}
        source = str(folder / "prompts.jsonl")
        run = bench.run(source, "B", tokenizer, engine=engine, transport=PATIENCE, **sections)
        with urllib.request.urlopen(url, timeout=10) as told:
            run.asked = json.load(told).get("asked", 0)
        return {"prompts": [run]}


def _restore_links(folder: Path) -> None:
    """Links that a copy flattened to files of their own path, as git does where there are none."""
    for path in list(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 200 and not path.suffix:
            text = path.read_text(encoding="utf-8", errors="replace").strip()
            if text.startswith(("./", "../")) and (path.parent / text).exists():
                path.unlink()
                path.symlink_to(text)


if __name__ == "__main__":
    sys.exit(main())
