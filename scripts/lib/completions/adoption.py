"""Finished shards that were put where declared outputs lie: kept before Snakemake deletes them.

A workflow deletes a job's declared outputs before it runs the job. A shard under results/completions that the state folder
doesn't know, since it came from a store or another machine, or since the state was deleted, would be gone before its
job could look at it.
"""

import hashlib
from pathlib import Path

import pyarrow.parquet as pq

from scripts.lib.core import durable
from scripts.lib.core.paths import Results


def adopt(results: Results) -> list[Path]:
    """Give every finished shard a name in the state folder as well, if it has none. Returns those that were new there."""
    adopted = []
    for declared in sorted((results.root / "completions").glob("*/*.parquet")):
        known = results.state.finished(declared.parent.name, declared.stem)
        if known.exists():
            if known.samefile(declared) or _footer(known) == (footer := _footer(declared)) or not footer:
                continue
            # Another one, such as an older one from a store: its answers are found by their prompts.
            known = known.with_name(f"{declared.stem}.{hashlib.sha256(footer).hexdigest()[:8]}.parquet")
            if known.exists():
                continue
        known.parent.mkdir(parents=True, exist_ok=True)
        durable.link_or_copy(declared, known)
        adopted.append(known)
    return adopted


def _footer(path: Path) -> bytes:
    """What a Parquet file says of all its rows; empty for a file that is none."""
    try:
        metadata = pq.read_metadata(path)
    except (OSError, ValueError):
        return b""
    return repr((metadata.to_dict(), metadata.metadata)).encode()
