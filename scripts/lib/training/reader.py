"""The corpus, read part by part: what exports and hidden states are made of."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from scripts.lib.core import records
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import same_tokenizer
from scripts.lib.core.records import Sample
from scripts.lib.target.model import Target
from scripts.lib.training import manifest


class Corpus:
    """A version of the corpus, read one row group at a time."""

    def __init__(self, training: Path) -> None:
        """Raises UserError when there is no corpus at `training`."""
        self.directory = training.resolve()  # a merge meanwhile doesn't change what is being read
        self.manifest = manifest.read_manifest(training)

    def require_tokenizer(self, target: Target, instead: str) -> None:
        """Raise UserError when the ids are not those of the target's tokenizer; `instead` says what to do then."""
        if not same_tokenizer(self.manifest.target, target.provenance()):
            raise UserError(
                f"{self.directory}: was made with another tokenizer than {target.name} (hash "
                f"{self.manifest.target['tokenizer_hash']}, not {target.tokenizer_hash}): {instead}"
            )

    def tables(self, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """Yield the row groups in order."""
        for part in self.manifest.parts:
            with records.open_parquet(self.directory / part.file) as file:
                for group in range(file.num_row_groups):
                    yield file.read_row_group(group, columns=columns)

    def samples(self) -> Iterator[Sample]:
        """Yield all samples in order."""
        for table in self.tables():
            for batch in table.to_batches(max_chunksize=64):
                for row in batch.to_pylist():
                    yield records.from_dict(Sample, row)
