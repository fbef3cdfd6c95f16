"""Every kind of engine that a configuration may name is known in full, by its one class."""

import inspect
import re
from pathlib import Path
from typing import get_args

import pytest

from scripts.lib.config.file import parse_config
from scripts.lib.config.model import EngineKind, Sampling
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import PROJECT
from scripts.lib.core.records import Message
from scripts.lib.engines import ENGINES, adapter_for
from scripts.lib.engines.base import Adapter, Request
from scripts.lib.engines.metrics import MetricNames

KINDS = sorted({*get_args(EngineKind), *ENGINES})
FACTS = (
    "exact",
    "hosted",
    "names_its_model",
    "returns_hidden_states",
    "only_gguf",
    "compiles",
    "environment",
    "metrics",
)
REPLIES = Path(__file__).parent / "replies"
READERS = [Path(__file__).with_name(name) for name in ("test_adapters.py", "test_odd_replies.py")]


def missing(kind: str) -> list[str]:
    """What a kind of engine lacks, each with the place where it belongs."""
    if kind not in get_args(EngineKind):
        return ["its name in EngineKind (scripts/lib/config/model.py)"]
    if kind not in ENGINES:
        return ["its class in ENGINES (scripts/lib/engines/__init__.py)"]
    engine = ENGINES[kind]
    place = inspect.getsourcefile(engine)
    found = [f"`{name}` ({place})" for name in FACTS if name not in vars(engine)]
    if found:
        return found
    if engine.kind != kind:
        found.append(f"the kind `{kind}`: it calls itself `{engine.kind}` ({place})")
    if not engine.hosted:
        launched = ("one_token", "server_plan")
        found += [f"`{name}`, since it isn't hosted ({place})" for name in launched if name not in vars(engine)]
        if not isinstance(engine.metrics, MetricNames):
            found.append(f"the names of its metrics, since it isn't hosted ({place})")
        if not list(REPLIES.glob(f"{kind}_*")):
            found.append(f"recorded replies of a real server ({REPLIES})")
        if not any(f'"kind": "{kind}"' in test.read_text() for test in READERS):
            found.append(f"tests that read its replies ({', '.join(test.name for test in READERS)})")
    if engine.environment is not None:
        locks = (PROJECT / "envs" / f"{engine.environment}{end}" for end in (".in", ".txt"))
        found += [f"its environment's lock, {lock}" for lock in locks if not lock.is_file()]
    documents = (PROJECT / "docs" / "engines.md").read_text()
    if not re.search(rf"^\| `{kind}` \|", documents, re.MULTILINE):
        found.append("its row in the table of docs/engines.md")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_known_in_full(kind: str) -> None:
    lacking = missing(kind)
    assert not lacking, f"engine kind `{kind}` lacks " + "; ".join(lacking)


def test_what_a_kind_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing(Adapter):
        kind = "vllm"

    class Little(Nothing):
        exact = names_its_model = True
        hosted = returns_hidden_states = only_gguf = compiles = False
        environment, metrics = "moon", None

    assert missing("moon") == ["its name in EngineKind (scripts/lib/config/model.py)"]
    monkeypatch.delitem(ENGINES, "vllm")
    assert missing("vllm") == ["its class in ENGINES (scripts/lib/engines/__init__.py)"]
    monkeypatch.setitem(ENGINES, "vllm", Nothing)
    assert [entry.split("`")[1] for entry in missing("vllm")] == list(FACTS)
    monkeypatch.setitem(ENGINES, "vllm", Little)
    lacking = " ".join(missing("vllm"))
    for name in ("`one_token`", "`server_plan`", "its metrics", "moon.in", "moon.txt"):
        assert name in lacking


def test_kinds_are_compared_nowhere_else() -> None:
    """What an engine is stands in its class, not in comparisons of its name."""
    compared = re.compile(rf"""kind\s*(==|!=|in|not in)\W+["']({"|".join(KINDS)})["']""")
    files = [*PROJECT.glob("scripts/**/*.py"), *PROJECT.glob("rules/*.smk"), PROJECT / "Snakefile"]
    found = [
        f"{file.relative_to(PROJECT)}:{number}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if compared.search(line)
    ]
    assert not found


SAMPLING = {
    "temperature": 0.3,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
    "seed": 11,
}


@pytest.mark.parametrize("kind", sorted(ENGINES))
def test_a_request_carries_every_setting_of_sampling(kind: str) -> None:
    """One that is left out is sampled with the server's own default, and nothing shows it in the corpus."""
    engine = adapter_for(configured(kind=kind, endpoints=["http://127.0.0.1:1"]))

    def sent(max_tokens: int = 32, seed: int | None = 7, **sampling: float) -> bytes | None:
        asked = Request("p-0-1", [1, 2], max_tokens, seed, Sampling(**sampling), [Message("user", "q")])
        return engine.request(asked).body

    changed = {name: sent(**{name: value}) for name, value in {**SAMPLING, "max_tokens": 33}.items()}
    assert SAMPLING.keys() == Sampling.model_fields.keys()
    unheeded = [name for name, body in changed.items() if body == sent()]
    assert not unheeded, f"engine kind `{kind}` sends nothing of {', '.join(unheeded)}"


def configured(**engine: object) -> object:
    return parse_config({"engine": engine, "datasets": {"d": {"class": "B", "source": "x"}}}, "test")


def test_an_unknown_kind_is_one_line() -> None:
    with pytest.raises(UserError, match="engine.kind") as error:
        configured(kind="moon")
    assert "\n" not in str(error.value)
    assert all(kind in str(error.value) for kind in get_args(EngineKind))


def test_a_hosted_engine_needs_its_address() -> None:
    with pytest.raises(UserError, match="engine.endpoints: kind `openai` needs the API's base URL"):
        adapter_for(configured(kind="openai"))
