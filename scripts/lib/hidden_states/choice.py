"""Which samples of the corpus are captured, and their ids and masks."""

from collections.abc import Container, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scripts.lib.config.model import HiddenStates
from scripts.lib.hidden_states.store import CorpusRow
from scripts.lib.training.reader import Corpus
from scripts.lib.training.shuffle import subset_keys


@dataclass(slots=True)
class Chosen:
    """The samples to capture: tokens by sample id."""

    tokens: dict[str, int]
    longest: int

    @property
    def total(self) -> int:
        return sum(self.tokens.values())


def choose(corpus: Corpus, settings: HiddenStates) -> Chosen:
    """The part of the corpus that the settings ask for: by a hash of id and seed, whatever the order of the corpus."""
    ids, keys, lengths = [], [], []
    for table in corpus.tables(["id", "input_ids"]):
        if len(table):
            ids.append(table["id"].combine_chunks())
            keys.append(subset_keys(table["id"], settings.seed))
            lengths.append(pc.list_value_length(table["input_ids"]).to_numpy())
    if not ids:
        return Chosen({}, 0)
    order = np.concatenate(keys)
    taken = np.flatnonzero(order < settings.fraction * 2.0**64) if settings.fraction < 1 else np.arange(len(order))
    if settings.max_samples is not None and len(taken) > settings.max_samples:
        taken = np.sort(taken[np.argsort(order[taken], kind="stable")[: settings.max_samples]])
    names = pa.concat_arrays(ids).take(pa.array(taken)).to_pylist()
    tokens = np.concatenate(lengths)[taken].tolist()
    return Chosen(dict(zip(names, tokens)), max(tokens, default=0))


def rows(corpus: Corpus, wanted: Container[str]) -> Iterator[CorpusRow]:
    """The wanted samples, in the order of the corpus."""
    for table in corpus.tables(["id", "input_ids", "loss_mask"]):
        for batch in table.to_batches(max_chunksize=64):
            for cell, ids, mask in zip(batch["id"], batch["input_ids"], batch["loss_mask"]):
                if (name := cell.as_py()) in wanted:
                    yield CorpusRow(name, ids.values.to_numpy(), mask.values.to_numpy())
