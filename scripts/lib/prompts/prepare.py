"""Stage 1: rows of a dataset's sources to prompts with stable ids, cut into shards.

Two passes. Reading turns each row into a clean candidate on disk or counts why not; choosing goes through the
candidates in seeded order, drops duplicates, evaluation prompts and prompts that don't fit, and stops at
`max_samples`, so that only prompts that may be used are tokenized.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.lib.config.model import Config, Dataset, Fields
from scripts.lib.config.stage_settings import stage_settings
from scripts.lib.core import command, durable
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import code_version
from scripts.lib.core.records import Prompt, open_parquet, with_provenance, write_rows
from scripts.lib.prompts.candidates import Candidate, Candidates, candidates_in
from scripts.lib.prompts.cleaning import Cleaner
from scripts.lib.prompts.defects import Defect
from scripts.lib.prompts.selection import (
    Decontamination,
    NearDuplicates,
    prompt_id,
    prompt_key,
    prompt_texts,
    seeded_order,
    shard_of,
)
from scripts.lib.prompts.sources import conversation_of, read_rows, source_files
from scripts.lib.prompts.sources.files import local_file, local_paths
from scripts.lib.prompts.sources.formats import Conversation, question_alone, to_conversation
from scripts.lib.prompts.sources.presets import Plan, plan_of
from scripts.lib.prompts.sources.reading import SourceFile
from scripts.lib.prompts.tally import EXAMPLES, Tally, summary
from scripts.lib.target.model import Target, TemplateError

# A source of which not one of so many first rows can be used was configured wrongly: don't read on for hours.
HOPELESS_ROWS = 10_000
ROWS_PER_LINE = 200_000
BATCH = 256
KEYS_SCHEMA = pa.schema([pa.field("id", pa.string(), nullable=False), pa.field("key", pa.string(), nullable=False)])


def prepare_prompts(
    config: Config,
    name: str,
    target: Target,
    output: Path,
    earlier: Sequence[Path] = (),
    say: Callable[[str], None] = command.say,
) -> dict[str, Any]:
    """Write the prompts of dataset `name` to `output`: `{shard}.parquet`, keys.parquet, report.json.

    `earlier` are keys.parquet of the datasets that have priority. Returns the report. Raises UserError when the
    dataset is unknown, its source can't be read, too many rows are unfit, or no prompt is left.
    """
    if name not in config.datasets:
        raise UserError(f"no dataset `{name}` in the config; there are {', '.join(config.datasets)}")
    dataset = config.datasets[name]
    limit = longest_prompt(config, dataset, target)
    files = source_files(name, dataset)
    with candidates_in(output) as candidates:
        preparation = _Preparation(config, name, target, limit, candidates, say)
        preparation.read(files)
        preparation.choose(earlier)
        provenance = {
            "stage": "prompts",
            "dataset": name,
            "settings": stage_settings(config, "prompts", name),
            "target": target.provenance(),
            "sources": [{"name": file.name, **file.describe()} for file in files],
            "code": code_version(),
        }
        report = preparation.finish(output, provenance)
        for file in files:
            # One that is replaced now looks older than what was made of its predecessor: nobody would notice later.
            file.describe()
        return report


def longest_prompt(config: Config, dataset: Dataset, target: Target) -> int:
    """Most tokens that the first prompt may have. Raises UserError when an answer can't fit at all."""
    room = target.context_length - 1
    if dataset.data_class == "B":
        answer = config.lanes[dataset.lane].max_tokens
        room = target.context_length - answer
        if room <= 0:
            raise UserError(
                f"lanes.{dataset.lane}.max_tokens: {answer} leaves no room for a prompt in the target's context of "
                f"{target.context_length} tokens"
            )
    return min(room, config.cleaning.max_prompt_tokens or room)


@dataclass
class _Preparation:
    """One dataset on its way from rows to shards; `limit` is the most tokens that a first prompt may have."""

    config: Config
    name: str
    target: Target
    limit: int
    candidates: Candidates
    say: Callable[[str], None]
    tally: Tally = field(default_factory=Tally)

    @property
    def dataset(self) -> Dataset:
        return self.config.datasets[self.name]

    def read(self, files: list[SourceFile]) -> None:
        """First pass: every row becomes a candidate or is counted."""
        plan = plan_of(self.name, self.dataset)
        clean = self._cleaner(plan)
        for row in read_rows(files, lambda file: self.say(f"{self.name}: reading {file.name}")):
            self.tally.rows += 1
            try:
                raw = conversation_of(row, plan)
                conversation, changes = clean(raw)
            except Defect as defect:
                self.tally.drop(defect.reason, row.where, defect.detail)
                self._stop_if_hopeless()
                continue
            self.tally.take(conversation, changes, raw.unused)
            self._add(row.where, conversation)
            if self.tally.rows % ROWS_PER_LINE == 0:
                self.say(f"{self.name}: {self.tally.rows:,} rows read, {self.tally.defects:,} unfit")
        self._require_fit_rows(files)

    def _cleaner(self, plan: Plan) -> Cleaner:
        return Cleaner(
            data_class=self.dataset.data_class,
            target=self.target,
            neutralise=self.config.cleaning.control_tokens == "neutralise",
            blocked_replies=self.config.cleaning.blocked_replies,
            page_residue=plan.page_residue,
        )

    def _add(self, where: str, conversation: Conversation) -> None:
        own_id = prompt_id(self.name, conversation)
        order = seeded_order(self.config.selection.seed, own_id)
        self.candidates.add(order, own_id, prompt_key(conversation), where, conversation)

    def _stop_if_hopeless(self) -> None:
        tally = self.tally
        if tally.rows == tally.defects == HOPELESS_ROWS and self.config.cleaning.max_reject_rate < 1:
            raise UserError(
                f"datasets.{self.name}: none of the first {HOPELESS_ROWS} rows can be used: {tally.first_reasons()}"
            )

    def _require_fit_rows(self, files: list[SourceFile]) -> None:
        tally, most = self.tally, self.config.cleaning.max_reject_rate
        if not tally.rows:
            raise UserError(f"datasets.{self.name}.source: no rows in {', '.join(file.name for file in files)}")
        if tally.defects > most * tally.rows:
            raise UserError(
                f"datasets.{self.name}: {tally.defects} of {tally.rows} rows ({tally.defects / tally.rows:.0%}) can't be "
                f"used, more than cleaning.max_reject_rate {most:.0%}: {tally.first_reasons()}; "
                "mend the rows, name `format` or `fields`, or raise the rate"
            )

    def choose(self, earlier: Sequence[Path]) -> None:
        """Second pass: keep candidates in seeded order until there are max_samples."""
        refuse = self._sieve(earlier)
        near = self._near_duplicates()
        wanted = self.dataset.max_samples or sys.maxsize
        reached = 0
        stream = _numbered(self.name, self.candidates.in_order())
        while self.tally.kept < wanted:
            # No more than are wanted still: what is beyond them is not looked at.
            batch = list(itertools.islice(stream, min(BATCH, wanted - self.tally.kept)))
            if not batch:
                break
            reached += len(batch)
            fresh = []
            for own_id, candidate in batch:
                reason = refuse(candidate)
                if reason is None:
                    fresh.append((own_id, candidate))
                else:
                    self.tally.drop(reason, candidate.source, own_id=own_id)
            for (own_id, candidate), ids in zip(fresh, _first_prompts(fresh, self.target)):
                self._keep_or_drop(own_id, candidate, ids, near)
        rest, examples = self.candidates.not_reached(reached, EXAMPLES)
        if rest:
            self.tally.dropped["not_selected"] = rest
            self.tally.examples["not_selected"] = [{"source": source, "id": own_id} for source, own_id in examples]
        self.candidates.index_choice()

    def _sieve(self, earlier: Sequence[Path]) -> Callable[[Candidate], str | None]:
        """The function that tells why a candidate is not wanted: its text is used already, or is an evaluation's."""
        selection, candidates = self.config.selection, self.candidates
        if selection.deduplicate == "across":
            for path in earlier:
                for keys in read_keys(path):
                    candidates.take_earlier(keys)
        deduplicates = selection.deduplicate != "none"
        if deduplicates:
            candidates.find_duplicates()
        evaluation = None
        if selection.decontaminate:
            evaluation = Decontamination(evaluation_texts(selection.decontaminate), selection.ngram)

        def refuse(candidate: Candidate) -> str | None:
            reason = candidates.duplicate(candidate) if deduplicates else None
            if evaluation and reason is None and evaluation.matches(prompt_texts(candidate.conversation.messages)):
                reason = "contaminated"
            return reason

        return refuse

    def _near_duplicates(self) -> NearDuplicates | None:
        threshold = self.config.selection.near_duplicates
        return NearDuplicates(threshold, self.candidates.database) if threshold else None

    def _keep_or_drop(
        self, own_id: str, candidate: Candidate, ids: list[int] | str, near: NearDuplicates | None
    ) -> None:
        """`ids` are the first prompt's, or why the template refuses it."""
        tally, source = self.tally, candidate.source
        if isinstance(ids, str):
            tally.drop("template_error", source, ids, own_id)
        elif (length := len(ids)) > self.limit:
            tally.drop("prompt_too_long", source, f"{length} tokens, at most {self.limit}", own_id)
        elif near is not None and (other := near.add_or_find(own_id, prompt_texts(candidate.conversation.messages))):
            tally.drop("near_duplicate", source, f"like {other}", own_id)
        else:
            kept_ids = ids if self.dataset.data_class == "B" else None
            shard = shard_of(own_id, self.config.shards)
            self.candidates.keep(shard, tally.kept, candidate.number, own_id, length, kept_ids)
            tally.keep(length)

    def finish(self, output: Path, provenance: dict[str, Any]) -> dict[str, Any]:
        """Write shards, keys and report. Raises UserError, with the report there, when no prompt is left."""
        tally = self.tally
        none_left = not tally.kept and not any(reason.startswith("duplicate") for reason in tally.dropped)
        counts = [0] if none_left else _write(self.config, self.name, self.candidates, output, provenance)
        report = tally.report(self.name, self.dataset.data_class, counts, provenance)
        durable.write_json(output / "report.json", report)
        if none_left:
            raise UserError(f"datasets.{self.name}: no prompt is left of {tally.rows} rows: {tally.first_reasons()}")
        self.say(summary(report))
        return report


def _numbered(name: str, candidates: Iterator[Candidate]) -> Iterator[tuple[str, Candidate]]:
    """Candidates with their final id: rows that are equal in everything are counted. They follow each other."""
    before, occurrence = "", 0
    for candidate in candidates:
        occurrence = occurrence + 1 if candidate.id == before else 0
        before = candidate.id
        yield prompt_id(name, candidate.conversation, occurrence) if occurrence else candidate.id, candidate


def _first_prompts(chosen: list[tuple[str, Candidate]], target: Target) -> list[list[int] | str]:
    """Ids of each first prompt, or why the template refuses it."""
    found: list[list[int] | str | None] = []
    texts: list[str] = []
    for _, candidate in chosen:
        conversation = candidate.conversation
        if conversation.input_ids is not None:
            mask = conversation.loss_mask or []
            found.append(conversation.input_ids[: mask.index(1)] if 1 in mask else conversation.input_ids)
            continue
        users = [index for index, message in enumerate(conversation.messages) if message.role == "user"]
        first = conversation.messages[: users[0] + 1]
        try:
            texts.append(target.render_text(first, conversation.tools, conversation.template_kwargs))
            found.append(None)  # filled in below, by batch
        except TemplateError as error:
            found.append(str(error))
    encoded = iter(target.encode_batch(texts))
    return [next(encoded) if one is None else one for one in found]


def evaluation_texts(paths: Sequence[str]) -> Iterator[str]:
    """The user's turns of evaluation sets, whatever their format. Raises UserError for a file without any."""
    for path in paths:
        found = 0
        files = [local_file(file) for file in local_paths(path, "selection.decontaminate")]
        for row in read_rows(files):
            if row.defect is not None:
                raise UserError(f"{row.where}: {row.defect.reason}: an evaluation set must be readable as a whole")
            try:
                texts = prompt_texts(to_conversation(row.value, "auto", Fields(), answers=False).messages)
                texts += filter(None, [question_alone(row.value)])
            except Defect as defect:
                raise UserError(f"{row.where}: {defect.reason} {defect.detail}: not an evaluation prompt") from None
            found += len(texts)
            yield from texts
        if not found:
            raise UserError(f"selection.decontaminate: {path}: holds no prompts")


def read_keys(path: Path) -> Iterator[list[bytes]]:
    """Keys of a keys.parquet, in lists. Raises UserError when it is missing or broken."""
    with open_parquet(path) as file:
        for batch in file.iter_batches(columns=["key"], batch_size=10_000):
            yield [bytes.fromhex(key) for key in batch.column(0).to_pylist()]


def _write(config: Config, name: str, candidates: Candidates, output: Path, provenance: dict) -> list[int]:
    """Write all shards (also empty ones) and the keys. Returns the rows of each shard."""

    def prompts(shard: int) -> Iterator[Prompt]:
        for own_id, tokens, ids, candidate in candidates.shard(shard):
            conversation = candidate.conversation
            yield Prompt(
                id=own_id,
                dataset=name,
                source=candidate.source,
                key=candidate.key.hex(),
                messages=conversation.messages,
                tools=conversation.tools,
                prompt_tokens=tokens,
                prompt_ids=ids,
                input_ids=conversation.input_ids,
                loss_mask=conversation.loss_mask,
                template_kwargs=conversation.template_kwargs,
            )

    counts = [
        write_rows(output / f"{shard}.parquet", Prompt, prompts(number), provenance | {"shard": shard})
        for number, shard in enumerate(config.shard_names())
    ]
    schema = with_provenance(KEYS_SCHEMA, provenance)
    with (
        durable.replacing(output / "keys.parquet") as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
    ):
        keys = candidates.keys()
        while rows := list(itertools.islice(keys, 10_000)):
            values = [own_id for own_id, _ in rows], [key.hex() for _, key in rows]
            columns = [pa.array(one, field.type) for one, field in zip(values, schema)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
    return counts
