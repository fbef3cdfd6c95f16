"""What README and docs name is there: files, links, commands with their options, rules, make targets, modules."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.lib.core.modules import modules_text
from scripts.lib.core.provenance import PROJECT

DOCUMENTS = sorted([*PROJECT.glob("*.md"), *PROJECT.glob("[!r]*/*.md"), *PROJECT.glob(".github/**/*.md")])
FOLDERS = "scripts|rules|config|envs|profiles|tests|benchmarks|docs"


def code(text: str) -> str:
    """Fenced blocks and inline code of a page, a piece per line."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return "\n".join([*fenced, *inline])


def named(pattern: str, *, part=code):
    """Parameters of a test: (page, what the pattern finds in it)."""
    found = {(page, name) for page in DOCUMENTS for name in re.findall(pattern, part(page.read_text(encoding="utf-8")))}
    return [pytest.param(page, name, id=f"{page.name}: {name}"[:90]) for page, name in sorted(found)]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(("page", "link"), named(r"\]\(((?!https?:|mailto:)[^)\s]+)\)", part=str))
def test_links_lead_somewhere(page, link):
    file, _, anchor = link.partition("#")
    aim = page.parent / file if file else page
    assert aim.exists()
    assert not anchor or anchor in anchors(aim)


@pytest.mark.parametrize(("page", "name"), named(rf"(?m)^((?:{FOLDERS})/(?:[\w/*{{}}<>-]|\.(?!\.))*)$"))
def test_files_are_there(page, name):
    assert any(PROJECT.glob(re.sub(r"\{[^}]*\}|<[^>]*>", "*", name).rstrip("/")))


@pytest.mark.parametrize(("page", "target"), named(r"\bmake ([a-z][a-z-]+)"))
def test_make_targets(page, target):
    assert f"\n{target}:" in (PROJECT / "Makefile").read_text(encoding="utf-8")


@functools.cache
def usage(entry: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"scripts.{entry}", "--help"], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("page", "command"), named(r"python -m scripts\.([a-z_]+[^\n#]*)"))
def test_commands_and_their_options(page, command):
    entry, *words = command.split()
    if entry.startswith("lib"):
        return
    text = usage(entry)
    assert [word for word in words if word.startswith("--") and word not in text] == []


def rules() -> set[str]:
    files = [PROJECT / "Snakefile", *PROJECT.glob("rules/*.smk")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return set(re.findall(r"^\s*rule (\w+):", text, re.MULTILINE))


@pytest.mark.parametrize(("page", "rule"), named(r"snakemake (?:--(?:cores|profile) \S+ )([a-z_]{4,})(?![\w{.])"))
def test_rules_that_commands_name(page, rule):
    assert rule in rules()


def test_every_module_stands_in_the_docs_with_its_idea():
    assert (PROJECT / "docs" / "modules.md").read_text(encoding="utf-8") == modules_text(), "stale: run `make schema`"
