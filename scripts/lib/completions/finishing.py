"""The finished file of a shard: one row per prompt, made of what has been answered.

Order matters for crashes: first everything is durable in the finished file, then the journal is emptied, then the
declared output appears.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.lib.completions.answers import ShardAnswers
from scripts.lib.completions.finished_file import FinishedFile, Totals
from scripts.lib.completions.journal import encode
from scripts.lib.completions.journal_records import Ended, TurnDone, TurnPart
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.core.records import Completion, Message, Turn, write_rows
from scripts.lib.prompts.shard import prompt_ids, read_prompts

Unpaid = Callable[[str], str | None]  # why a prompt is over budget, None when it is not


def finish(answers: ShardAnswers, prompts: Path, output: Path, unpaid: Unpaid, provenance: dict) -> Counter[str]:
    """Write the finished shard, in the prompts' order, and give it the declared name. Returns the prompts by outcome."""
    answers.journal.write()
    answers.journal.sync()
    if answers.journal.problem:
        raise answers.journal.problem
    here, order = set(), hashlib.sha256()
    for prompt_id in prompt_ids(prompts):
        here.add(prompt_id)
        order.update(prompt_id.encode())
    if answers.journal.empty and answers.finished.order == order.hexdigest():
        outcomes = answers.finished.totals.outcomes
    else:
        answers.index_journal()
        keep_unused(answers, here, provenance)
        answers.unused = FinishedFile(answers.unused_path)
        outcomes = write_finished(answers, prompts, unpaid, provenance)
        empty_journal(answers)
        if answers.unused.rows.keys() <= here:
            answers.unused_path.unlink(missing_ok=True)
    if outcomes.total() != len(here):
        raise UserError(
            f"{prompts}: {len(here)} different prompts, {outcomes.total()} outcomes: make the prompts again"
        )
    link(answers.finished_path, output)
    return outcomes


def empty_journal(answers: ShardAnswers) -> None:
    """Forget what is now in the finished file; keep the turns of conversations that ran out of budget."""
    kept = []
    for prompt_id, partial in answers.partial.items():
        kept += [encode(TurnDone(prompt_id, turn.endpoint), turn) for turn in partial.turns]
        if partial.part is not None:
            kept.append(encode(TurnPart(prompt_id, partial.part.endpoint), partial.part))
    answers.journal.replace(kept)


def write_finished(answers: ShardAnswers, prompts: Path, unpaid: Unpaid, provenance: dict) -> Counter[str]:
    """Replace the finished file. Returns the prompts by outcome."""
    totals = Totals()

    def rows() -> Iterator[Completion]:
        for prompt in read_prompts(prompts, lambda prompt_id: True):
            completion = answers.get(prompt.id)
            if completion is not None and completion.id != prompt.id:
                raise UserError(
                    f"{prompts}: the answer to prompt {completion.id} was found in the place of {prompt.id}: its file "
                    "was changed meanwhile; nothing is written, run again"
                )
            if completion is None:
                reason = unpaid(prompt.id)
                if reason is None:
                    raise UserError(f"{prompts}: {prompt.source}: prompt {prompt.id} has no outcome: run again")
                completion = Completion(prompt.id, answers.dataset, "over_budget", reason, attempts=0)
            completion.messages = conversation(prompt.messages, completion.turns)
            totals.add(Ended.of(completion.outcome, completion.turns), completion.taken_from)
            yield completion

    write_rows(
        answers.finished_path,
        Completion,
        rows(),
        lambda: {**provenance, "identity": answers.identity, "totals": totals.plain()},
    )
    return totals.outcomes


def keep_unused(answers: ShardAnswers, here: set[str], provenance: dict) -> None:
    """Before the finished file is replaced: keep its answers to prompts that are not in the shard any more.

    Answers whose prompts came back stay in the file of unused ones as well, until all of them did.
    """
    sources = ((answers.arrived, answers.read_journal), (answers.finished.rows, answers.finished.read))
    if all(places.keys() <= here for places, _ in sources):
        return
    seen: set[str] = set()

    def rows() -> Iterator[Completion]:
        for places, read in sources:
            for prompt_id, place in places.items():
                if prompt_id not in here and prompt_id not in seen:
                    seen.add(prompt_id)
                    completion = read(place)
                    completion.messages = conversation(completion.messages, completion.turns)
                    yield completion
        for prompt_id, row in answers.unused.rows.items():
            if prompt_id not in seen:
                yield answers.unused.read(row)

    write_rows(answers.unused_path, Completion, rows(), {**provenance, "identity": answers.identity})


def conversation(messages: list[Message], turns: list[Turn]) -> list[Message]:
    """The prompt's system and user messages with each turn's answer after its user message."""
    answers = iter(turns)
    whole: list[Message] = []
    for message in messages:
        if message.role == "assistant":
            continue
        whole.append(message)
        if message.role == "user" and (turn := next(answers, None)) is not None:
            whole.append(Message("assistant", turn.text, turn.reasoning))
    return whole


def link(source: Path, output: Path) -> None:
    """Give a finished file its declared name: a hard link, or a copy on another file system."""
    if output.exists() and output.samefile(source):
        return
    with durable.replacing(output) as temporary:
        durable.link_or_copy(source, temporary)
