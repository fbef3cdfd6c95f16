"""Stage 1's shards as stage 2 reads them: as cheaply as a prompt that is answered once allows."""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path

import numpy as np
import pyarrow as pa

from scripts.lib.core.provenance import digest
from scripts.lib.core.records import Message, Prompt, batches, open_parquet, read_columns, read_provenance

_READ_ROWS = 256  # prompts in memory at once
_PROMPT_COLUMNS = ["id", "dataset", "source", "key", "messages", "tools", "prompt_tokens"]


def prompt_ids(path: Path) -> Iterator[str]:
    """The ids of a prompt shard, in order."""
    return (own_id for (own_id,) in read_columns(path, ["id"]))


def made_from(path: Path) -> str:
    """Digest of what the prompts of a shard were made from: other settings or sources may give other ids."""
    return digest({key: value for key, value in read_provenance(path).items() if key not in ("shard", "code")})


def first_prompts(path: Path, wanted: Set[str] | None = None) -> Iterator[tuple[str, bytes]]:
    """(id, digest of the ids that are sent first) of the wanted prompts, or all. Shards of before don't hold those ids."""
    with open_parquet(path) as file:
        if "prompt_ids" not in file.schema_arrow.names:
            return
        for batch in batches(file, ["id", "prompt_ids"]):
            for prompt_id, sent in zip(batch.column("id").to_pylist(), id_lists(batch.column("prompt_ids"))):
                if len(sent) and (wanted is None or prompt_id in wanted):
                    yield prompt_id, ids_digest(sent)


def id_lists(column: pa.ListArray) -> Iterator[np.ndarray]:
    """The lists of a column of int32, int32 themselves; null ones are empty."""
    numbers = column.values.to_numpy()
    return (numbers[begin:end] for begin, end in itertools.pairwise(column.offsets.to_pylist()))


def ids_digest(ids: np.ndarray | Sequence[int], seed: int = 0) -> bytes:
    """128 bits that tell one list of token ids from another, or what was drawn with another seed."""
    numbers = np.ascontiguousarray(ids, np.int32)
    return hashlib.blake2b(numbers.data, digest_size=16, salt=seed.to_bytes(8, "little", signed=True)).digest()


def read_prompts(path: Path, wanted: Callable[[str], bool]) -> Iterator[Prompt]:
    """The prompts of a shard whose id is wanted, some rows in memory at once.

    Without ready tokens, which class-B prompts don't have. Read column by column: pyarrow makes nested
    Python objects a row at a time, which would cost as much as half a request.
    """
    with open_parquet(path) as file:
        # Shards of before these columns were: prompts without ids are rendered when they are sent.
        later = [name for name in ("prompt_ids", "template_kwargs") if name in file.schema_arrow.names]
        columns = _PROMPT_COLUMNS + later
        for batch in file.iter_batches(batch_size=_READ_ROWS, columns=columns):
            ids = batch.column("id").to_pylist()
            keep = [row for row, own_id in enumerate(ids) if wanted(own_id)]
            if not keep:
                continue
            lists = batch.column("messages")
            offsets = lists.offsets.to_pylist()
            turns = lists.values
            messages = [
                Message(*values)
                for values in zip(
                    *(
                        _values(turns.field(field.name))
                        if field.name in turns.type.names
                        else [field.default] * len(turns)
                        for field in dataclasses.fields(Message)
                    )
                )
            ]
            dataset, source, key, tools, tokens = (
                _values(batch.column(name)) for name in ("dataset", "source", "key", "tools", "prompt_tokens")
            )
            sent: list[list[int]] = (
                [ids.tolist() for ids in id_lists(batch.column("prompt_ids"))]
                if "prompt_ids" in later
                else [[]] * len(ids)
            )
            kwargs = _values(batch.column("template_kwargs")) if "template_kwargs" in later else [None] * len(ids)
            for row in keep:
                own = messages[offsets[row] : offsets[row + 1]]
                yield Prompt(
                    ids[row],
                    dataset[row],
                    source[row],
                    key[row],
                    own,
                    tools[row],
                    tokens[row],
                    sent[row] or None,
                    template_kwargs=kwargs[row],
                )


def _values(column: pa.Array) -> list:
    """A column's Python values. Most optional ones hold none, which needs no look at each."""
    return [None] * len(column) if column.null_count == len(column) else column.to_pylist()
