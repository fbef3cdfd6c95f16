"""What an `expected.json` says is right, checked against what came.

`expected` is a text, or an object of texts by input (a file's stem, a folder's name). A text is read for the claims
below, `; ` apart or in one sentence; `, or ` parts alternatives, of which one must hold. A text without any claim is a
failure: it would prove nothing.

| words | what must hold |
|---|---|
| `supervised ⟦text⟧ for row 1` | the supervised text of the sample of that row |
| `"supervised": [texts]`, `"not_supervised": [texts]` | each is a part of what is supervised, for every input, or of nothing |
| `"messages": [[role, text], ...]`, `"rows": 3`, `"kept": 2`, `"reasons": {...}`, `"changes": {...}` | of the prompts, of report.json; under `"A"` or `"B"` of that class |
| `{"name": ..., "arguments": ...}` | every sample supervises this call |
| `user: ... / assistant: ...` | a prompt of class A has these turns |
| `the same samples as from a.jsonl` or `"same_ids_as": "a.jsonl"` | the other files give its ids and masks |
| `rows 3`, `REASON 2` | rows that were read; rows or samples that were counted so |
| `REASON`, `a refusal`, `dropped and counted` | rows are refused (by that reason); those whose `label` is false are |
| `error that names FILE` | the stage ends with one line that names it |
| `COLUMN, blank line, COLUMN`; `the COLUMN after the COLUMN` | the user's turn holds the columns' texts so |
| `one conversation`, `split into turns`, `2 user turns`, `a system turn`, `a counted change`, `kept in class B` | of the prompts |
| `KEY/KEY of 0 or false get mask 0` | turns with one of these keys so are not supervised, all other answers are |
| `functions.NAME:0` | the supervised text holds it |
| `<TAG> texts ... are calls` | answers with the tag became tool calls, with what follows as their results |
| `content "..."`, `reasoning "..."`, `outcome NAME`, `one request`, `cost_usd 0.5 each`, `NAME after 2 answers` | of the answers that a case's server.py gave |
| `FILE.json` under a key with the word `prompt` | one of its texts is the prompt before the last answer |
"""

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib.core.records import Prompt
from scripts.lib.prompts.defects import CHANGES, DEFECTS, NOT_USED
from tests.cases.stages import Run, ids_of

NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5}
_ALTERNATIVE = re.compile(r",\s+or\s+|\.\s+Better:\s+")


@dataclass
class Case:
    """A folder of inputs, with the runs of each: by input, class A and B (or the answers of its server)."""

    folder: Path
    expected: Any
    runs: dict[str, list[Run]]

    def rows(self, run: Run) -> list[dict[str, Any]]:
        """The rows of a JSON Lines input, as JSON reads them."""
        path = Path(run.source)
        if path.suffix != ".jsonl":
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


Problems = list[str]
Checker = Callable[[Case, list[Run], re.Match], Problems]
CLAIMS: list[tuple[re.Pattern, Checker]] = []


def claim(pattern: str) -> Callable[[Checker], Checker]:
    def register(checker: Checker) -> Checker:
        CLAIMS.append((re.compile(pattern, re.DOTALL), checker))
        return checker

    return register


def judge(case: Case) -> Problems:
    """What of the case's expectation does not hold."""
    every = [run for runs in case.runs.values() for run in runs]
    return _judge(case, every, "", case.expected)


def _judge(case: Case, runs: list[Run], key: str, value: Any) -> Problems:
    """The claims of `value`, which stands under `key`, about these runs."""
    where = f"{key}: " if key not in ("", "all") else ""
    if _is_value(key, value):
        return [where + problem for problem in VALUES[key](runs, value)]
    if isinstance(value, dict):
        return _judge_keys(case, runs, value)
    if key == "same_ids_as":
        return _same(case, runs, [value.split()[0]])
    if "prompt" in key and (path := case.folder / value.split()[0].rstrip(":,")).suffix == ".json":
        return _last_prompts(runs, path)
    if isinstance(value, str):
        return [where + problem for problem in _either(case, runs, value)]
    return [f"{where}nothing here that can be checked: {value!r}"]


def _judge_keys(case: Case, runs: list[Run], values: dict[str, Any]) -> Problems:
    """Keys name inputs, or what must hold; inputs that aren't there are passed over where others are."""
    inputs = {key for key, value in values.items() if key in case.runs and not _is_value(key, value)}
    problems: Problems = []
    for key, value in values.items():
        if key in inputs:
            problems += _judge(case, case.runs[key], key, value)
        elif key in ("A", "B"):
            problems += _judge(case, _class(runs, key), key, value)
        elif not inputs or key == "all" or _is_value(key, value):
            problems += _judge(case, runs, key, value)
    return problems


def _either(case: Case, runs: list[Run], text: str) -> Problems:
    """[] when one of the text's alternatives holds, else what is wrong with the first that says anything."""
    wrong: list[Problems] = []
    for alternative in _ALTERNATIVE.split(text):
        problems, claims = [], 0
        for pattern, checker in CLAIMS:
            for match in pattern.finditer(alternative):
                claims += 1
                problems += checker(case, runs, match)
        if claims and not problems:
            return []
        if claims:
            wrong.append(problems)
    if not wrong:
        return [f"nothing here that can be checked: {text!r}"]
    return [*wrong[0], *(f"came: {run.name}: {run.seen()}" for run in runs)]


def _class(runs: list[Run], data_class: str) -> list[Run]:
    return [run for run in runs if run.data_class == data_class]


def _answered(runs: list[Run]) -> list[Run]:
    return _class(runs, "A") or [run for run in runs if run.completions]


def _is_value(key: str, value: Any) -> bool:
    return key in VALUES and not isinstance(value, str)


def _turns_of(runs: list[Run], right: list) -> Problems:
    """`messages`: the turns of all prompts as [role, text], or of the only one."""
    right = [right] if right and isinstance(right[0][0], str) else right
    wanted = sorted([tuple(turn) for turn in turns] for turns in right)
    problems = []
    for run in runs:
        found = sorted([(m.role, m.content) for m in prompt.messages] for prompt in run.prompts)
        problems += [f"{run.name}: {found or run.error}, right is {wanted}"] * (found != wanted)
    return problems


def _figure(name: str) -> Callable[[list[Run], Any], Problems]:
    def check(runs: list[Run], right: int) -> Problems:
        return [
            f"{run.name}: {run.report.get(name)} {run.error}, right is {right}"
            for run in runs
            if run.report.get(name) != right
        ]

    return check


def _counts(kind: str) -> Callable[[list[Run], Any], Problems]:
    def check(runs: list[Run], right: dict[str, int]) -> Problems:
        found = [{name: entry["count"] for name, entry in run.report.get(kind, {}).items()} for run in runs]
        return [f"{run.name}: {counts}, right is {right}" for run, counts in zip(runs, found) if counts != right]

    return check


def _unlearnt_parts(runs: list[Run], parts: list[str]) -> Problems:
    found = [(run, text) for run in _answered(runs) for sample in run.samples for text in run.supervised(sample)]
    return [f"{run.name}: supervised: {part}" for part in parts for run, text in found if part in text]


@claim(r"supervised ⟦(.+?)⟧(?: for row (\d+))?")
def _supervised(case: Case, runs: list[Run], match: re.Match) -> Problems:
    right = match[1].replace("\\n", "\n")
    problems = []
    for run in _answered(runs):
        of_row = {prompt.id for prompt in run.prompts if match[2] is None or prompt.source.endswith(f":{match[2]}")}
        found = [text for sample in run.samples if sample.prompt_id in of_row for text in run.supervised(sample)]
        if right not in found:
            problems.append(f"{run.name}: supervised is {found}, right is {[right]}")
    return problems


def _supervised_parts(runs: list[Run], parts: list[str]) -> Problems:
    problems = []
    for run in _answered(runs):
        found = "\n".join(text for sample in run.samples for text in run.supervised(sample))
        problems += [f"{run.name}: not supervised: {part} (but {found!r})" for part in parts if part not in found]
    return problems


@claim(r'(\{"name".*\})')
def _call(case: Case, runs: list[Run], match: re.Match) -> Problems:
    _, end = json.JSONDecoder().raw_decode(match[1])
    right = match[1][:end]
    problems = []
    for run in _answered(runs):
        for sample in run.samples:
            texts = run.supervised(sample)
            if not any(right in text for text in texts):
                problems.append(f"{run.name}: supervised is {texts}, right is {right}")
        if not run.samples or len(run.prompts) < run.report.get("rows", 0):
            problems.append(f"{run.name}: {run.seen()}")
    return problems


@claim(r"user: (.+?) / assistant: (.+?)(?= —|;|$)")
def _turns(case: Case, runs: list[Run], match: re.Match) -> Problems:
    right = [("user", match[1]), ("assistant", match[2])]
    found = [[(m.role, m.content) for m in prompt.messages] for run in _class(runs, "A") for prompt in run.prompts]
    return [] if right in found else [f"no prompt with {right}"]


@claim(r"the same samples as from ([\w., -]+\.jsonl)")
def _same_as_files(case: Case, runs: list[Run], match: re.Match) -> Problems:
    return _same(case, runs, re.findall(r"[\w.-]+\.jsonl", match[1]))


def _same(case: Case, runs: list[Run], names: list[str]) -> Problems:
    """Every other input gives the samples (A) and prompts (B) of one of these files."""
    problems = []
    originals = [run for run in runs if Path(run.source).name in names]
    right = {name: [run for run in originals if run.data_class == name] for name in "AB"}
    for run in runs:
        if run in originals:
            continue
        if run.data_class == "A":
            same = any(run.samples and ids_of(run.samples) == ids_of(other.samples) for other in right["A"])
        else:
            same = any(_asked(run) == _asked(other) for other in right["B"])
        if not same:
            problems.append(f"{run.name}: not as from any of {', '.join(names)}: {run.seen()}")
    return problems or ([] if originals else [f"none of {', '.join(names)} is there"])


def _asked(run: Run) -> tuple:
    """What class B makes of a source: its prompts, or that there are none, and why."""
    return sorted(prompt.prompt_ids or [] for prompt in run.prompts), run.counted


@claim(r"\brows (\d+)")
def _rows(case: Case, runs: list[Run], match: re.Match) -> Problems:
    return [
        f"{run.name}: rows {run.report.get('rows')} {run.error}, right are {match[1]}"
        for run in runs
        if run.report.get("rows") != int(match[1])
    ]


@claim(r"\b([a-z]+(?:_[a-z]+)+)\b(?: (\d+))?")
def _counted(case: Case, runs: list[Run], match: re.Match) -> Problems:
    """Any name of the product's own tables: rows, changes, outcomes."""
    name, count = match[1], match[2]
    if name not in CHANGES | DEFECTS | NOT_USED:
        return []
    found = [run.counted.get(name, 0) for run in _class(runs, "A")]
    if (count and sum(found) == int(count)) or (count is None and any(found)):
        return []
    return [f"{name} {sum(found)}" + (f", right is {count}" if count else "")]


@claim(r"error(?: that names (\S+?))?(?=[:,;]|$)")
def _error(case: Case, runs: list[Run], match: re.Match) -> Problems:
    return [
        f"{run.name}: no error that names {match[1]}: {run.seen()}"
        for run in runs
        if not run.error or (match[1] or "") not in run.error
    ]


@claim(r"(\w+), blank line, (\w+)")
def _joined(case: Case, runs: list[Run], match: re.Match) -> Problems:
    return _texts_of_users(case, runs, lambda row: "\n\n".join((row[match[1]], row[match[2]])), exact=True)


@claim(r"the (\w+) after the (\w+)")
def _after(case: Case, runs: list[Run], match: re.Match) -> Problems:
    def parts(row: dict) -> str | None:
        return None if match[1] not in row or match[2] not in row else row[match[2]]

    problems = _texts_of_users(case, runs, parts, exact=False)
    for run in runs:
        for row, text in zip(case.rows(run), _users(run.prompts)):
            missing = [word for word in _leaves(row.get(match[1])) if word not in text]
            problems += [f"{run.name}: not in the prompt: {missing}"] * bool(missing)
    return problems


def _texts_of_users(case: Case, runs: list[Run], right: Callable[[dict], str | None], exact: bool) -> Problems:
    problems = []
    for run in _class(runs, "B"):
        found = _users(run.prompts)
        for row in case.rows(run):
            text = right(row)
            if text is None:
                continue
            if not any(text == one if exact else one.startswith(text) for one in found):
                problems.append(f"{run.name}: asked {found}, right is {text!r}")
    return problems


def _users(prompts: list[Prompt]) -> list[str]:
    return [message.content for prompt in prompts for message in prompt.messages if message.role == "user"]


def _leaves(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    return [value] if isinstance(value, str) else [text for one in value or [] for text in _leaves(one)]


@claim(r"\bone conversation\b")
def _one(case: Case, runs: list[Run], match: re.Match) -> Problems:
    return [f"{run.name}: {len(run.prompts)} prompts" for run in runs if len(run.prompts) != 1]


@claim(r"^a refusal\b")
def _refused(case: Case, runs: list[Run], match: re.Match) -> Problems:
    return [
        f"{run.name}: {len(run.prompts)} kept" for run in runs if run.prompts or not run.counted.keys() & DEFECTS.keys()
    ]


@claim(r"\bsplit into turns\b")
def _split(case: Case, runs: list[Run], match: re.Match) -> Problems:
    problems = []
    for run in _class(runs, "A"):
        whole = json.dumps(case.rows(run), ensure_ascii=False)
        roles = [[message.role for message in prompt.messages] for prompt in run.prompts]
        if not roles or any("user" not in one or "assistant" not in one for one in roles):
            problems.append(f"{run.name}: turns of {roles}")
        texts = [message.content for prompt in run.prompts for message in prompt.messages]
        problems += [
            f"not a part of the row: {text!r}"
            for text in texts
            if json.dumps(text, ensure_ascii=False)[1:-1] not in whole
        ]
    return problems


@claim(r"\b(\d+|one|two|three|four|five) user turns\b")
def _user_turns(case: Case, runs: list[Run], match: re.Match) -> Problems:
    right = NUMBERS.get(match[1]) or int(match[1])
    found = [sum(m.role == "user" for m in prompt.messages) for run in _class(runs, "B") for prompt in run.prompts]
    return [] if found and set(found) == {right} else [f"user turns of the prompts: {found}, right are {right}"]


@claim(r"\ba system turn\b")
def _system(case: Case, runs: list[Run], match: re.Match) -> Problems:
    return [
        f"{run.name}: no system turn"
        for run in runs
        if not run.prompts or any(prompt.messages[0].role != "system" for prompt in run.prompts)
    ]


@claim(r"\ba counted change\b")
def _changed(case: Case, runs: list[Run], match: re.Match) -> Problems:
    ordinary = {"answers_cut", "unanswered_cut"}
    return [f"{run.name}: no change is counted" for run in runs if not run.report.get("changes", {}).keys() - ordinary]


@claim(r"\bkept in class ([AB])\b")
def _kept(case: Case, runs: list[Run], match: re.Match) -> Problems:
    return [
        f"{run.name}: {run.seen()}"
        for run in _class(runs, match[1])
        if not run.prompts or len(run.prompts) != run.report["rows"]
    ]


@claim(r"\bdropped and counted\b")
def _disliked(case: Case, runs: list[Run], match: re.Match) -> Problems:
    problems = []
    for run in _class(runs, "A"):
        good = sum(row.get("label") is not False for row in case.rows(run))
        dropped = sum(entry["count"] for entry in run.report.get("reasons", {}).values())
        if len(run.prompts) != good or dropped != run.report.get("rows", 0) - good:
            problems.append(
                f"{run.name}: {len(run.prompts)} kept, {dropped} dropped: {good} have a label that is not false"
            )
    return problems


@claim(r"([\w/]+) of 0 or false get mask 0")
def _masked(case: Case, runs: list[Run], match: re.Match) -> Problems:
    keys = match[1].split("/")
    problems = []
    for run in _class(runs, "A"):
        found = " ".join(text for sample in run.samples for text in run.supervised(sample))
        for row in case.rows(run):
            for turn in row.get("messages", []):
                if turn["role"] != "assistant":
                    continue
                learnt = not any(key in turn and not turn[key] for key in keys)
                count = found.count(turn["content"])
                if bool(count) != learnt:
                    problems.append(f"{turn}: {'supervised' if count else 'not supervised'}")
    return problems


@claim(r"\bfunctions\.\w+:\d+")
def _call_ids(case: Case, runs: list[Run], match: re.Match) -> Problems:
    """Each sample with calls supervises this id, or those that its row brought."""
    problems, seen = [], False
    for run in _class(runs, "A"):
        own = {prompt.id: set(re.findall(r'"id":"([^"]+)"', _calls_of(prompt))) for prompt in run.prompts}
        for sample in run.samples:
            found = "".join(run.supervised(sample))
            seen = seen or match[0] in found
            if not any(one in found for one in {match[0], *own[sample.prompt_id]}):
                problems.append(f"{run.name}: supervised is {found!r}")
    return problems if seen else [*problems, f"nowhere is {match[0]}"]


def _calls_of(prompt: Prompt) -> str:
    return "".join(message.tool_calls or "" for message in prompt.messages)


@claim(r"<(\w+)> texts .*?are calls")
def _calls_in_text(case: Case, runs: list[Run], match: re.Match) -> Problems:
    problems = []
    for run in _class(runs, "A"):
        turns = [message for prompt in run.prompts for message in prompt.messages]
        if not any(turn.tool_calls for turn in turns) or any(f"<{match[1]}>" in turn.content for turn in turns[1:]):
            problems.append(f"{run.name}: {run.seen()}")
        followed = [after.role for turn, after in itertools.pairwise(turns) if turn.tool_calls]
        problems += [f"after a call comes {role}" for role in followed if role != "tool"]
    return problems


def _last_prompts(runs: list[Run], path: Path) -> Problems:
    right = list(json.loads(path.read_bytes()).values())
    problems = []
    for run in _class(runs, "A"):
        for prompt in run.prompts:
            found = run.target.render_text(prompt.messages[:-1], prompt.tools, prompt.template_kwargs)
            if found not in right:
                problems.append(f"{run.name}: {found!r}, right is {right[-1]!r}")
    return problems


@claim(r'\b(content|reasoning) "(.+?)"')
def _said(case: Case, runs: list[Run], match: re.Match) -> Problems:
    found = [getattr(turn, match[1]) for run in runs for answer in run.completions for turn in answer.turns]
    return [] if found and set(found) == {match[2]} else [f"{match[1]} is {found}, right is {match[2]!r}"]


@claim(r"\boutcome (\w+)")
def _outcome(case: Case, runs: list[Run], match: re.Match) -> Problems:
    found = [answer.outcome for run in runs for answer in run.completions]
    return [] if found and set(found) == {match[1]} else [f"outcomes {found}, right is {match[1]}"]


@claim(r"\bone request\b")
def _requests(case: Case, runs: list[Run], match: re.Match) -> Problems:
    found = [answer.attempts for run in runs for answer in run.completions]
    return [] if found and set(found) == {1} else [f"attempts {found}"]


@claim(r"\bcost_usd ([\d.]+) each")
def _costs(case: Case, runs: list[Run], match: re.Match) -> Problems:
    found = [turn.cost_usd for run in runs for answer in run.completions for turn in answer.turns]
    return [] if found and set(found) == {float(match[1])} else [f"cost_usd {found}, right is {match[1]} each"]


@claim(r"\b(\w+) after (\d+) answers")
def _stops(case: Case, runs: list[Run], match: re.Match) -> Problems:
    outcomes = [answer.outcome for run in runs for answer in run.completions]
    # Canaries are answers, too, and cost as much.
    answered = {sum(outcome != match[1] for outcome in outcomes), *(run.asked for run in runs)}
    if int(match[2]) in answered and match[1] in outcomes:
        return []
    asked = sum(run.asked for run in runs)
    return [f"outcomes {outcomes} of {asked} requests, right is {match[1]} after {match[2]} answers"]


# Keys whose values are no words.
VALUES: dict[str, Callable[[list[Run], Any], Problems]] = {
    "supervised": _supervised_parts,
    "not_supervised": _unlearnt_parts,
    "messages": _turns_of,
    "rows": _figure("rows"),
    "kept": _figure("kept"),
    "reasons": _counts("reasons"),
    "changes": _counts("changes"),
}
