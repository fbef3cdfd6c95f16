"""The rows that flow between the stages, and the one Arrow schema of each.

Writers and readers share these schemas, so that a column can't mean two things. A token id is an
int32, a mask is an int8 of 0 and 1, a file is zstd Parquet whose schema metadata holds the
provenance as JSON under the key `drafter-corpus`.
"""

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.core.exact_json import parse_json

PROVENANCE_KEY = b"drafter-corpus"
ROWS_PER_GROUP = 1024
_ROWS_PER_TABLE = 64  # divides ROWS_PER_GROUP
# Rows differ by a factor of 10,000: an agent's trajectory has a million ids. Fewer are in memory at once, then.
_VALUES_AT_ONCE = 1 << 20  # ids, mask values and characters / 4, as Python objects
GROUP_BYTES = 64 << 20  # of a row group in Arrow, which is written then though it has fewer rows


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one way for a prompt to end is."""

    words: str  # the prompts that ended so "..."
    drawn_as: str  # in the report
    answered: bool = False  # its last turn holds an answer; of the others only the turns before it are in the row
    generated: bool = False  # a server took the request and wrote something
    refused: bool = False  # a server did not take the request
    resumable: bool = False  # nothing was asked: the prompt is, when the job runs again
    policy: str | None = None  # setting of the dataset that decides whether its last turn becomes a sample


# Every prompt ends in exactly one of these (docs/architecture.md says what each means). In the report's order.
OUTCOMES = {
    "ok": Outcome("were answered", "ok", answered=True, generated=True),
    "length": Outcome(
        "have an answer that was cut at max_tokens", "cut", answered=True, generated=True, policy="truncation"
    ),
    "reasoning_only": Outcome(
        "have a thought that never ended, and no answer",
        "thought",
        answered=True,
        generated=True,
        policy="reasoning_only",
    ),
    "repetition": Outcome("ended in a loop", "loop", generated=True),
    "content_filter": Outcome("were refused by the provider's filter", "filter", refused=True),
    "empty": Outcome("came back empty", "lost", generated=True),
    "unexpected_tool_call": Outcome("were tool calls though no tools were given", "lost", generated=True),
    "prompt_too_long": Outcome("were too long to be answered", "lost", refused=True),
    "template_error": Outcome("were refused by the chat template", "lost"),
    "rejected": Outcome("were rejected by the server", "lost", refused=True),
    "exhausted": Outcome("failed on every attempt", "failed"),
    "over_budget": Outcome("were not sent: the budget is used up", "idle", resumable=True),
}
POLICIES = {name: outcome.policy for name, outcome in OUTCOMES.items() if outcome.policy}

ROLES = ("system", "user", "assistant", "tool")


@dataclass(slots=True)
class Message:
    """One turn of a conversation, in the roles that chat templates know.

    `reasoning` is the assistant's thought without its tags; `tool_calls` is the JSON text of the
    OpenAI-style list. `name` and `tool_call_id` belong to a tool's turn: which function answers, and which of its
    calls (`functions.weather:0`, `call_9`); templates render them. `trainable`: False for an answer that its source
    says is not to be learnt; its tokens stay in the prompt, with mask 0.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    trainable: bool = True

    def for_template(self) -> dict[str, Any]:
        """The dict that a chat template reads; reasoning under both names that templates use."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
            message["reasoning"] = self.reasoning
        if self.tool_calls is not None:
            message["tool_calls"] = parse_json(self.tool_calls)
        if self.role == "tool":
            # Never a user's: Kimi's template lets the name take the role's place.
            named = {"name": self.name, "tool_call_id": self.tool_call_id}
            message |= {key: value for key, value in named.items() if value is not None}
        return message

    def identity(self) -> list[Any]:
        """What tells this turn from another, for hashes: fields that came later only where they say something.

        So rows keep the ids under which they were answered.
        """
        values: list[Any] = [self.role, self.content, self.reasoning, self.tool_calls]
        if self.name is not None or self.tool_call_id is not None or not self.trainable:
            values += [self.name, self.tool_call_id, self.trainable]
        return values


@dataclass(slots=True)
class Prompt:
    """Stage 1. A conversation to answer (class B), to keep (class A), or ready tokens (class A).

    Class B `messages` hold an optional system turn and the user turns only: the target answers each
    user turn in order. Ready tokens have empty `messages` and their `input_ids` + `loss_mask`.
    """

    id: str  # hash of dataset, source row identity and normalised messages
    dataset: str
    source: str  # "file:row", for error messages
    key: str  # hash of the normalised prompt text: equal keys are duplicates
    messages: list[Message] = field(default_factory=list)
    tools: str | None = None  # JSON text of the tool definitions
    prompt_tokens: int = 0  # of the first prompt, in the target's tokens
    prompt_ids: list[int] | None = None  # of the first prompt, class B only: what is sent is what was counted
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None
    template_kwargs: str | None = None  # JSON text: this row's own template variables, over the configured ones


@dataclass(slots=True)
class Turn:
    """One generation: what was sent and what the engine sampled, as token ids."""

    prompt_ids: list[int]
    output_ids: list[int]  # verbatim, the stop token included
    finish_reason: str  # stop | length
    content: str | None  # text after the reasoning: for people and exports. None until the ids are decoded
    reasoning: str | None = None
    ids_origin: str = "engine"  # engine | reconstructed
    eos_appended: bool = False  # the engine withheld the stop token that it reported as matched
    flags: list[str] = field(default_factory=list)  # suspicions that keep the turn but are counted
    model: str = ""  # as the endpoint reported it
    provider: str = ""  # of a hosted API
    endpoint: str = ""
    cost_usd: float = 0.0
    seconds: float = 0.0  # from send to last byte
    seed: int = 0  # of the request
    engine: str = ""  # its kind
    served_model: str = ""  # as it was asked for
    billed_tokens: int = 0  # prompt and output as the endpoint counted them; 0 where nobody noted it

    def pack(self) -> None:
        """Hold the ids in a ninth of the memory: a long conversation repeats its history in every turn."""
        self.prompt_ids = np.array(self.prompt_ids, np.int32)  # type: ignore[assignment]
        self.output_ids = np.array(self.output_ids, np.int32)  # type: ignore[assignment]

    @property
    def text(self) -> str:
        """`content`, once the ids are decoded."""
        assert self.content is not None
        return self.content


@dataclass(slots=True)
class Completion:
    """Stage 2. The one terminal outcome of a prompt. `turns` has one entry per answered user turn."""

    id: str
    dataset: str
    outcome: str
    reason: str | None = None  # one line, for every outcome but ok
    attempts: int = 1
    messages: list[Message] = field(default_factory=list)  # the whole conversation, answers included
    turns: list[Turn] = field(default_factory=list)
    taken_from: str = ""  # the file of the run where it was found, when another shard has paid for it


@dataclass(slots=True)
class Sample:
    """Stages 3 to 5. One training sample.

    `loss_mask[i]` is 1 iff the target sampled `input_ids[i]` (unshifted, stop token included).
    """

    id: str  # prompt id, or `{prompt id}/{turn}` where turns don't merge
    prompt_id: str
    dataset: str
    input_ids: list[int]
    loss_mask: list[int]
    ids_origin: str  # engine | reconstructed | rendered (class A conversations) | given (ready tokens)
    outcome: str  # of its last turn: ok | length | reasoning_only (both kept by policy) | kept (class A)
    messages: list[Message] = field(default_factory=list)
    tools: str | None = None
    flags: list[str] = field(default_factory=list)
    template_kwargs: str | None = None  # of its prompt


@dataclass(slots=True)
class Reject(Sample):
    """A sample that validation refused, kept with the name of the check and what it saw."""

    check: str = ""
    detail: str = ""


_message = pa.struct(
    [
        pa.field("role", pa.string(), nullable=False),
        pa.field("content", pa.string(), nullable=False),
        pa.field("reasoning", pa.string()),
        pa.field("tool_calls", pa.string()),
        pa.field("name", pa.string()),
        pa.field("tool_call_id", pa.string()),
        pa.field("trainable", pa.bool_(), nullable=False),
    ]
)
_ids = pa.list_(pa.field("element", pa.int32(), nullable=False))
_mask = pa.list_(pa.field("element", pa.int8(), nullable=False))
_strings = pa.list_(pa.field("element", pa.string(), nullable=False))
_messages = pa.list_(pa.field("element", _message, nullable=False))
_turn = pa.struct(
    [
        pa.field("prompt_ids", _ids, nullable=False),
        pa.field("output_ids", _ids, nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("content", pa.string(), nullable=False),
        pa.field("reasoning", pa.string()),
        pa.field("ids_origin", pa.string(), nullable=False),
        pa.field("eos_appended", pa.bool_(), nullable=False),
        pa.field("flags", _strings, nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("provider", pa.string(), nullable=False),
        pa.field("endpoint", pa.string(), nullable=False),
        pa.field("cost_usd", pa.float64(), nullable=False),
        pa.field("seconds", pa.float64(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("engine", pa.string(), nullable=False),
        pa.field("served_model", pa.string(), nullable=False),
        pa.field("billed_tokens", pa.int64(), nullable=False),
    ]
)


def _schema(*fields: tuple[str, pa.DataType, bool]) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=nullable) for name, kind, nullable in fields])


PROMPT_SCHEMA = _schema(
    ("id", pa.string(), False),
    ("dataset", pa.string(), False),
    ("source", pa.string(), False),
    ("key", pa.string(), False),
    ("messages", _messages, False),
    ("tools", pa.string(), True),
    ("prompt_tokens", pa.int32(), False),
    ("prompt_ids", _ids, True),
    ("input_ids", _ids, True),
    ("loss_mask", _mask, True),
    ("template_kwargs", pa.string(), True),
)
COMPLETION_SCHEMA = _schema(
    ("id", pa.string(), False),
    ("dataset", pa.string(), False),
    ("outcome", pa.string(), False),
    ("reason", pa.string(), True),
    ("attempts", pa.int32(), False),
    ("messages", _messages, False),
    ("turns", pa.list_(pa.field("element", _turn, nullable=False)), False),
    ("taken_from", pa.string(), False),
)
SAMPLE_SCHEMA = _schema(
    ("id", pa.string(), False),
    ("prompt_id", pa.string(), False),
    ("dataset", pa.string(), False),
    ("input_ids", _ids, False),
    ("loss_mask", _mask, False),
    ("ids_origin", pa.string(), False),
    ("outcome", pa.string(), False),
    ("messages", _messages, False),
    ("tools", pa.string(), True),
    ("flags", _strings, False),
    ("template_kwargs", pa.string(), True),
)
REJECT_SCHEMA = _schema(
    *((f.name, f.type, f.nullable) for f in SAMPLE_SCHEMA),
    ("check", pa.string(), False),
    ("detail", pa.string(), False),
)

_CODES = {pa.int8(): "b", pa.int32(): "i"}  # of the array module

SCHEMAS: dict[type, pa.Schema] = {
    Prompt: PROMPT_SCHEMA,
    Completion: COMPLETION_SCHEMA,
    Sample: SAMPLE_SCHEMA,
    Reject: REJECT_SCHEMA,
}


# Columns and fields of messages that came later, or that files of others lack, with what it means that they do.
_LATER: dict[str, Any] = {
    "template_kwargs": None,
    "reasoning": None,
    "tool_calls": None,
    "name": None,
    "tool_call_id": None,
    "trainable": True,
}


def columns_of(kind: type, file: pa.Schema) -> list[str] | None:
    """The columns of `kind` that a file holds, be it of an earlier version; None when it is of no such kind."""
    names = [name for name in SCHEMAS[kind].names if name in file.names]
    missing = set(SCHEMAS[kind].names) - set(names)
    return names if missing <= _LATER.keys() else None


def in_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Rows of an earlier version in today's `schema`: what they lack is filled in."""
    if batch.schema.equals(schema, check_metadata=False):
        return batch
    rows = len(batch)
    columns = [
        in_type(batch[field.name], field.type)
        if field.name in batch.schema.names
        else pa.repeat(pa.scalar(_LATER[field.name], field.type), rows)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def in_type(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column of messages with the fields that it lacks; any other column as it is."""
    if kind != _messages or array.type.equals(kind) or not pa.types.is_list(array.type):
        return array
    held = array.values
    names = {field.name for field in held.type} if pa.types.is_struct(held.type) else set()
    if not {field.name for field in _message} - names <= _LATER.keys():
        return array
    children = [
        held.field(field.name)
        if field.name in names
        else pa.repeat(pa.scalar(_LATER[field.name], field.type), len(held))
        for field in _message
    ]
    structs = pa.StructArray.from_arrays(children, fields=list(_message))
    # A list that is null has no offset of its own.
    return pa.ListArray.from_arrays(array.offsets, structs, type=kind)


def with_provenance(schema: pa.Schema, provenance: dict) -> pa.Schema:
    """The schema with `provenance` (any JSON object) in its metadata."""
    return schema.with_metadata({PROVENANCE_KEY: orjson.dumps(provenance, option=orjson.OPT_SORT_KEYS)})


def write_rows(path: Path | str, kind: type, rows: Iterable[Any], provenance: dict | Callable[[], dict]) -> int:
    """Write records of `kind` to a Parquet file, durably and atomically. Returns the row count.

    There may be one writer only. Rows are streamed: memory holds one row group. Equal rows give equal bytes. A function as
    `provenance` is asked after the last row, for what only then is known.
    """
    schema = SCHEMAS[kind] if callable(provenance) else with_provenance(SCHEMAS[kind], provenance)
    count = 0
    durable.remove_remains(path)  # as large as the file itself
    with durable.replacing(path) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        # Python ints take 36 bytes, Arrow's 4: few rows wait as Python objects, the row group as tables.
        rows_waiting: list[Any] = []
        tables: list[pa.Table] = []
        values = size = 0
        for row in rows:
            rows_waiting.append(row)
            values += _values_of(row)
            count += 1
            if len(rows_waiting) == _ROWS_PER_TABLE or values > _VALUES_AT_ONCE or count % ROWS_PER_GROUP == 0:
                tables.append(_table(rows_waiting, schema))
                rows_waiting.clear()
                values, size = 0, size + tables[-1].nbytes
            if count % ROWS_PER_GROUP == 0 or size > GROUP_BYTES:
                writer.write_table(pa.concat_tables(tables).combine_chunks())
                tables.clear()
                size = 0
        if rows_waiting:
            tables.append(_table(rows_waiting, schema))
        if tables:
            writer.write_table(pa.concat_tables(tables).combine_chunks())
        if callable(provenance):
            late = with_provenance(SCHEMAS[kind], provenance()).metadata
            writer.add_key_value_metadata(late)
    return count


def _values_of(row: Any) -> int:
    """How much a record holds: ids and mask values, and its text as if four characters were one."""
    values = len(getattr(row, "input_ids", None) or ()) + len(getattr(row, "loss_mask", None) or ())
    for turn in getattr(row, "turns", ()):
        values += len(turn.prompt_ids) + len(turn.output_ids)
    return values + sum(len(message.content) + len(message.reasoning or "") for message in row.messages) // 4


def _table(rows: list[Any], schema: pa.Schema) -> pa.Table:
    columns = [_column([getattr(row, field.name) for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Lists field by field and their numbers as buffers: `pa.array` looks at each id, which takes twice as long."""
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    inner = kind.value_type
    items = [value or () for value in values]
    if pa.types.is_struct(inner):
        records = list(itertools.chain.from_iterable(items))
        fields = [_column([getattr(record, field.name) for record in records], field.type) for field in inner]
        elements = pa.StructArray.from_arrays(fields, fields=list(inner))
    elif inner in _CODES:
        numbers = array(_CODES[inner])
        for one in items:
            numbers.fromlist(one) if type(one) is list else numbers.extend(one)
        elements = pa.Array.from_buffers(inner, len(numbers), [None, pa.py_buffer(numbers)])
    else:
        elements = pa.array(list(itertools.chain.from_iterable(items)), inner)
    ends = list(itertools.accumulate(map(len, items), initial=0))
    starts = [None if value is None else start for value, start in zip(values, ends)]
    return pa.ListArray.from_arrays(pa.array([*starts, ends[-1]], pa.int32()), elements, type=kind)


class _ParquetFile(pq.ParquetFile):
    """A Parquet file whose damaged pages are an error of its user, too: the footer alone shows none of them."""

    def __init__(self, path: Path | str, advice: str) -> None:
        self._path, self._advice = path, advice
        with _readable(path, advice):
            super().__init__(path)

    def iter_batches(self, *args: Any, **kwargs: Any) -> Iterator[pa.RecordBatch]:
        with _readable(self._path, self._advice):
            yield from super().iter_batches(*args, **kwargs)

    def read_row_group(self, *args: Any, **kwargs: Any) -> pa.Table:
        with _readable(self._path, self._advice):
            return super().read_row_group(*args, **kwargs)


@contextmanager
def _readable(path: Path | str, advice: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:  # the last: names of columns
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a readable Parquet file ({reason}): {advice}") from None


def open_parquet(path: Path | str, advice: str = "delete it and run again") -> pq.ParquetFile:
    """Open a Parquet file. It and its reads raise UserError naming the file when it is missing or broken.

    `advice` says what to do then; the usual one is for files of ours, which a run makes anew.
    """
    return _ParquetFile(path, advice)


def batches(file: pq.ParquetFile, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of a file in batches of at most a row group, smaller ones where rows are large."""
    footer = file.metadata
    chunks = [
        footer.row_group(group).column(i) for group in range(footer.num_row_groups) for i in range(footer.num_columns)
    ]
    held = sum(max(chunk.num_values, chunk.total_uncompressed_size // 4) for chunk in chunks)
    rows = _VALUES_AT_ONCE * footer.num_rows // max(1, held)
    return file.iter_batches(batch_size=max(1, min(ROWS_PER_GROUP, rows)), columns=columns)


def read_rows(path: Path | str, kind: type) -> Iterator[Any]:
    """Yield the records of a Parquet file that `write_rows` wrote, some of them in memory at a time."""
    with open_parquet(path) as file:
        for batch in batches(file):
            for row in batch.to_pylist():
                yield from_dict(kind, row)


def read_columns(path: Path | str, names: list[str]) -> Iterator[tuple]:
    """Yield the values of some columns, row by row, of a Parquet file of ours."""
    with open_parquet(path) as file:
        for batch in file.iter_batches(columns=names):
            yield from zip(*(batch.column(name).to_pylist() for name in names))


def read_provenance(path: Path | str) -> dict:
    """The provenance that the writer stored; {} for a file of someone else."""
    with open_parquet(path) as file:
        return provenance_in(file)


def provenance_in(file: pq.ParquetFile) -> dict:
    """As `read_provenance`, of an open file."""
    return orjson.loads((file.metadata.metadata or {}).get(PROVENANCE_KEY, b"{}"))


def from_dict(kind: type, row: dict) -> Any:
    """Build a record from a plain dict (of Parquet or JSON), nested records included."""
    row = dict(row)
    if "messages" in row:
        row["messages"] = [Message(**message) for message in row["messages"]]
    if "turns" in row:
        row["turns"] = [Turn(**turn) for turn in row["turns"]]
    return kind(**row)
