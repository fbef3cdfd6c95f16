"""Answers to a shard's prompts that lie elsewhere in the run, found by the prompt that they answer.

Another number of shards moves prompts to other shards; another name of a dataset or a new `id` column gives the same
prompts other ids; finished shards may be put back without their state. Nothing of that is worth paying twice. An answer is
found by its prompt's id or, when the prompt that it was made for is no prompt of this run any more, by the ids that
were sent: they hold messages, tools and template. Everything else that it depends on is its `identity`.

Files are only read. Those that can't hold anything are not: finished files are looked through by id, journals only where
the prompts of their dataset were made anew since.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from scripts.lib.completions import foreign_journal
from scripts.lib.completions.answers import Borrowed, ShardAnswers
from scripts.lib.completions.dialogue import history
from scripts.lib.completions.finished_file import FinishedFile
from scripts.lib.completions.foreign_journal import ForeignJournal
from scripts.lib.completions.job import ShardJob
from scripts.lib.core.errors import UserError
from scripts.lib.core.paths import State
from scripts.lib.core.provenance import differences
from scripts.lib.core.records import OUTCOMES, Completion, Prompt, read_columns
from scripts.lib.prompts.shard import first_prompts, made_from, prompt_ids, read_prompts
from scripts.lib.target.model import Target
from scripts.lib.target.output import add_text

Source = FinishedFile | ForeignJournal


@dataclass
class Found:
    """What a search has come to: prompts by the file that their answers are taken from, and answers that are not taken."""

    taken: Counter[Path] = field(default_factory=Counter)
    other_settings: dict[Path, tuple[int, str]] = field(default_factory=dict)  # (prompts, which settings)
    unreadable: dict[Path, str] = field(default_factory=dict)
    unmatched: int = 0  # answers of this dataset, or of one that is gone, to prompts that nobody asks any more

    def lines(self) -> Iterator[str]:
        """What people should know before anything is paid."""
        if self.taken:
            where = ", ".join(f"{count} in {path}" for path, count in self.taken.most_common())
            yield f"{self.taken.total()} prompts are answered elsewhere in the run, and are not asked again: {where}"
        for path, (count, changed) in self.other_settings.items():
            yield (
                f"warning: {path} has answers to {count} of the prompts left, made with other settings ({changed}): "
                "they can't be used, the prompts are asked again"
            )
        for path, reason in self.unreadable.items():
            yield f"warning: {path} is not looked through for answers: {reason}"
        if self.unmatched:
            yield (
                f"{self.unmatched} answers of earlier runs are to prompts that are none of this run's any more: they stay "
                "where they are"
            )


class Search:
    """Looks for answers to the prompts of one shard that have none."""

    def __init__(self, job: ShardJob, target: Target, answers: ShardAnswers) -> None:
        self.job, self.target, self.answers = job, target, answers
        self.state = State(job.state)
        self.found = Found()
        here = set(prompt_ids(job.prompts))
        self.missing = {prompt_id for prompt_id in here if prompt_id not in answers}
        self._live = here  # of all prompts of this run, as far as they were needed
        self._all_live = False

    def run(self) -> Found:
        """Give `answers` what there is."""
        if not self.missing:
            return self.found
        sources = list(self._sources())
        for source in sources:
            self._by_id(source)
        orphans = [(source, ids) for source in sources if (ids := self._orphans(source))]
        if self.missing and orphans:
            self._by_prompt(sources, orphans)
        return self.found

    # --- where to look ---

    def _sources(self) -> Iterator[Source]:
        """Files that may hold something. A journal comes before the files that its job moves its answers to."""
        for path in sorted(self.state.journals.glob("*/*.journal")):
            if self._may_hold(path) and (journal := self._open(ForeignJournal, path)):
                yield journal
        yield self.answers.finished
        yield self.answers.unused
        finished = sorted((self.job.state / "completions").glob("*/*.parquet"))
        declared = sorted((self.state.results.root / "completions").glob("*/*.parquet"))
        seen = {path.stat().st_ino for path in (self.answers.finished_path, self.answers.unused_path) if path.exists()}
        for path in [*finished, *declared]:
            try:
                number = path.stat().st_ino
            except OSError:
                continue  # its job replaces it now
            if number not in seen and (file := self._open(FinishedFile, path)):
                seen.add(number)
                yield file

    def _may_hold(self, journal: Path) -> bool:
        """Whether a journal holds answers to other prompts than its dataset's present ones."""
        try:
            recorded = foreign_journal.made_from(journal)
            present = self.state.results.shard("prompts", journal.parent.name, journal.stem)
            return not recorded or not present.exists() or recorded != made_from(present)
        except (OSError, UserError):
            return True

    def _open(self, kind: type[Source], path: Path) -> Source | None:
        try:
            return kind(path)
        except (UserError, OSError, KeyError, ValueError) as error:
            self.found.unreadable[path] = str(error)
            return None

    def _orphans(self, source: Source) -> set[str]:
        """Ids of answers whose prompts are none of this run's any more."""
        if source.path.parent.name in self._without_prompts:
            return set()  # they are being made anew: nobody knows which of its answers are still asked for
        left = source.rows.keys() - self._live
        if left and not self._all_live:
            self._all_live = True
            for dataset in self.job.config.by_class("B"):
                for shard in self.job.config.shard_names():
                    path = self.state.results.shard("prompts", dataset, shard)
                    if path.exists() and not path.samefile(self.job.prompts):
                        self._live = self._live | set(prompt_ids(path))
            left = source.rows.keys() - self._live
        return set(left)

    @functools.cached_property
    def _without_prompts(self) -> set[str]:
        config, results = self.job.config, self.state.results
        return {
            dataset
            for dataset in config.by_class("B")
            for shard in config.shard_names()
            if dataset != self.job.dataset and not results.shard("prompts", dataset, shard).exists()
        }

    # --- by id ---

    def _by_id(self, source: Source) -> None:
        partial = source.partial.keys() if isinstance(source, ForeignJournal) else set()
        wanted = self.missing & (source.rows.keys() | partial)
        if not wanted or not self._same_settings(source, len(wanted)):
            return
        self._take(source, {prompt_id: prompt_id for prompt_id in wanted & source.rows.keys()})
        if isinstance(source, ForeignJournal):
            for prompt_id in wanted & partial:
                self.answers.take_over_begun(prompt_id, source.partial[prompt_id])

    def _same_settings(self, source: Source, count: int) -> bool:
        if source.identity == self.answers.identity:
            return True
        changed = differences(source.identity or {}, self.answers.identity)
        self.found.other_settings[source.path] = (
            count,
            "; ".join(changed) if source.identity else "nothing tells which",
        )
        return False

    # --- by what was sent ---

    def _by_prompt(self, sources: list[Source], orphans: list[tuple[Source, set[str]]]) -> None:
        sent: dict[bytes, list[str]] = defaultdict(list)
        for prompt_id, digest in first_prompts(self.job.prompts, self.missing):
            sent[digest].append(prompt_id)
        # By what was sent, then by the answer: copies of it may lie in several files, under several ids.
        candidates: dict[bytes, dict[bytes, tuple[Source, str]]] = defaultdict(dict)
        for source, ids in sorted(orphans, key=lambda pair: pair[0].identity != self.answers.identity):
            for turn in source.first_turns(ids):
                if turn.sent in sent:
                    candidates[turn.sent].setdefault(turn.answer, (source, turn.prompt_id))
        ranks = self._ranks({prompt_id for digest in candidates for prompt_id in sent[digest]})
        held = self._held(sources, candidates.keys()) if any(ranks.values()) else set()
        pairs: dict[str, tuple[Source, str]] = {}
        for digest, by_answer in candidates.items():
            answers = sorted(by_answer)
            for prompt_id in sent[digest]:
                # Of several prompts of the same words each has its own, whichever job looks for it, and whenever.
                if ranks[prompt_id] < len(answers) and answers[ranks[prompt_id]] not in held:
                    pairs[prompt_id] = by_answer[answers[ranks[prompt_id]]]
        self._take_answering(pairs)
        if self.missing:
            self.found.unmatched = self._unmatched(orphans)

    def _held(self, sources: list[Source], sent: Set[bytes]) -> set[bytes]:
        """Answers that prompts of this run have already."""
        return {turn.answer for source in sources for turn in source.first_turns(self._live) if turn.sent in sent}

    def _unmatched(self, orphans: list[tuple[Source, set[str]]]) -> int:
        """Answers of this dataset or of one that is gone that are to none of this dataset's prompts."""
        gone = {source.path.parent.name for source, _ in orphans} - set(self.job.config.by_class("B"))
        paths = [
            self.state.results.shard("prompts", self.job.dataset, shard) for shard in self.job.config.shard_names()
        ]
        asked = {digest for path in paths if path.exists() for _, digest in first_prompts(path)}
        return len(
            {
                turn.answer
                for source, ids in orphans
                if source.path.parent.name in gone | {self.job.dataset}
                for turn in source.first_turns(ids)
                if turn.sent not in asked
            }
        )

    def _ranks(self, wanted: set[str]) -> dict[str, int]:
        """How many prompts of the dataset have the same words and an id before a prompt's."""
        keys: dict[str, list[str]] = defaultdict(list)
        for shard in self.job.config.shard_names():
            path = self.state.results.shard("prompts", self.job.dataset, shard)
            for prompt_id, key in read_columns(path, ["id", "key"]) if path.exists() else ():
                keys[key].append(prompt_id)
        ranks = dict.fromkeys(wanted, 0)
        for same in keys.values():
            if len(same) > 1:
                ranks |= {prompt_id: number for number, prompt_id in enumerate(sorted(same)) if prompt_id in wanted}
        return ranks

    def _take_answering(self, pairs: dict[str, tuple[Source, str]]) -> None:
        """Take the answers that are of the same settings, and answer every turn of the prompt that they are to be for."""
        by_source: dict[int, tuple[Source, dict[str, str]]] = {}
        for prompt in read_prompts(self.job.prompts, pairs.__contains__):
            source, orphan = pairs[prompt.id]
            if self._answers_all(prompt, source, orphan):
                by_source.setdefault(id(source), (source, {}))[1][prompt.id] = orphan
        for source, taken in by_source.values():
            if self._same_settings(source, len(taken)):
                self._take(source, taken)

    def _answers_all(self, prompt: Prompt, source: Source, orphan: str) -> bool:
        users = sum(message.role == "user" for message in prompt.messages)
        if users == 1:
            return True
        completion = source.read(source.rows[orphan])
        if len(completion.turns) != users or not OUTCOMES[completion.outcome].answered:
            return False
        for number, turn in enumerate(completion.turns):
            add_text(self.target, turn)
            past = history(prompt.messages, completion.turns[:number])
            if self.target.render(past, prompt.tools, prompt.template_kwargs) != turn.prompt_ids:
                return False
        return True

    def _take(self, source: Source, taken: dict[str, str]) -> None:
        """`taken`: the id in `source` of the answer to each prompt."""
        self.missing -= taken.keys()
        self.found.taken[source.path] += len(taken)
        if isinstance(source, ForeignJournal):
            for prompt_id, theirs in taken.items():
                # Into our own journal, where canaries vouch for it.
                self._copy(source, theirs, prompt_id)
            return
        mine = defaultdict(list)
        for prompt_id, theirs in taken.items():
            mine[theirs].append(prompt_id)
        for theirs, ended in source.ended():
            for prompt_id in mine.get(theirs, ()):
                self.answers.elsewhere[prompt_id] = Borrowed(source, source.rows[theirs], ended)

    def _copy(self, source: ForeignJournal, theirs: str, prompt_id: str) -> None:
        completion: Completion = source.read(source.rows[theirs])
        taken = replace(completion, id=prompt_id, dataset=self.job.dataset, taken_from=str(source.path))
        self.answers.take_over(taken, source.doubtful_endpoint(theirs))


def search(job: ShardJob, target: Target, answers: ShardAnswers, say: Callable[[str], None]) -> None:
    """Let `answers` know all that the run has of its missing ones, and say what that is."""
    for line in Search(job, target, answers).run().lines():
        say(line)
