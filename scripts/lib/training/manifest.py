"""manifest.json: what a corpus holds, where every part of it came from, and whether its bytes are still there."""

import hashlib
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import canonical_json, digest

SCHEMA_VERSION = 2
UNSEALED = 1  # version of manifests without `seal`, which are still read
MANIFEST = "manifest.json"

# A manifest may come from elsewhere, so its names can't lead out of its folder.
Version = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
PartName = Annotated[str, Field(pattern=r"^part-[0-9]{5,9}\.parquet$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]


@dataclass(slots=True)
class Part:
    """One Parquet file of the corpus."""

    file: PartName
    sha256: Sha256
    bytes: Count
    rows: Count
    tokens: Count
    supervised_tokens: Count


@dataclass(slots=True)
class Input:
    """One file that was merged: a validated shard, or a file of the base corpus."""

    name: str  # {dataset}/{shard}.parquet
    kind: str  # base | shard
    sha256: Sha256
    rows: Count
    provenance: str  # key into Manifest.provenance


class CorpusTotals(TypedDict):
    """Of the whole corpus."""

    rows: Count
    tokens: Count
    supervised_tokens: Count


class Funnel(TypedDict):
    """What the stages before counted of a dataset (`validated.funnel`)."""

    source_rows: NotRequired[Count]
    dropped: NotRequired[dict[str, Count]]
    kept: NotRequired[Count]
    prompts: Count
    outcomes: dict[str, Count]
    without_sample: dict[str, Count]
    samples: Count
    rejected: dict[str, Count]
    passed: Count


class DatasetCounts(TypedDict):
    """What became of a dataset's samples: `read` = `rows` + the sum of `dropped`."""

    read: Count
    from_base: Count
    rows: Count
    tokens: Count
    supervised_tokens: Count
    dropped: dict[str, Count]
    ids_origin: dict[str, Count]
    outcome: dict[str, Count]
    funnel: NotRequired[Funnel]


@dataclass(slots=True)
class Manifest:
    """The ledger of one corpus version. Holds no time and no absolute path: equal inputs, equal bytes.

    A dataset's `funnel` tells what the stages before counted, and ends with the `passed` samples that were read from
    shards here. `seal` is the SHA-256 of all the rest, so that no field can change unnoticed.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    version: Version
    totals: CorpusTotals
    parts: list[Part]
    datasets: dict[str, DatasetCounts]
    settings: dict[str, Any]
    target: dict[str, Any]  # what the ids depend on, `Target.provenance()`; {} when no input tells it
    inputs: list[Input]
    provenance: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    schema_version: int = SCHEMA_VERSION
    seal: str = ""


_MANIFEST = TypeAdapter(Manifest)


def seal_of(manifest: Manifest) -> str:
    """What `seal` must be."""
    values = asdict(manifest)
    del values["seal"]
    return hashlib.sha256(canonical_json(values)).hexdigest()


def version_of(settings: dict[str, Any], inputs: list[tuple[str, str, str]], funnels: dict[str, Any]) -> str:
    """The name of the corpus that these inputs (name, kind, sha256) make: 16 hex digits."""
    return digest({"settings": settings, "inputs": [list(one) for one in inputs], "funnels": funnels})[:16]


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Seal the manifest and write `directory`/manifest.json durably."""
    manifest.seal = seal_of(manifest)
    durable.write_json(directory / MANIFEST, asdict(manifest))


def read_manifest(directory: Path) -> Manifest:
    """Read `directory`/manifest.json. Raises UserError when it is missing, broken or of a newer schema."""
    path = directory / MANIFEST
    if not directory.exists():
        raise UserError(f"{directory}: there is no corpus: `snakemake --cores 8 merge_training` makes one")
    _require_file(path)
    found = durable.read_json(path).get("schema_version")
    if found not in (UNSEALED, SCHEMA_VERSION):
        raise UserError(f"{path}: has schema version {found}, this code reads {SCHEMA_VERSION}")
    manifest = read_as(_MANIFEST, path, "a manifest")
    names = [part.file for part in manifest.parts]
    if len(set(names)) < len(names):
        raise UserError(f"{path}: not a manifest of ours: a part is named twice")
    return manifest


def read_as(adapter: TypeAdapter, path: Path, what: str) -> Any:
    """The JSON of a file as the type that it must have. Raises UserError naming the first field that it hasn't."""
    _require_file(path)
    try:
        return adapter.validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "its content"
        raise UserError(f"{path}: not {what} of ours: {place}: {first['msg']}") from None


def _require_file(path: Path) -> None:
    """Raise UserError for a folder, a pipe or a device, which would be read for ever."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is not a file")


def files_of(manifest: Manifest) -> list[str]:
    """Names of all files of a corpus folder, the manifest last: it exists only when the parts do."""
    return [part.file for part in manifest.parts] + [MANIFEST]


def part_damage(path: Path, part: Part) -> str | None:
    """What is wrong with the bytes of one part, None when they are those that the manifest tells."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return f"{path}: is not a file"
        if status.st_size != part.bytes:
            return f"{path}: has {status.st_size} bytes, the manifest says {part.bytes}"
        if durable.sha256_file(path) != part.sha256:
            return f"{path}: its sha256 differs from the manifest's"
    except OSError as error:
        return f"{path}: {error.strerror.lower() if error.strerror else error}"
    return None


def damaged_parts(directory: Path, manifest: Manifest) -> list[str]:
    """One line for each part whose bytes are not those that the manifest tells. Reads every byte."""
    found = [part_damage(directory / part.file, part) for part in manifest.parts]
    return [problem for problem in found if problem]


def broken_seal(directory: Path, manifest: Manifest) -> list[str]:
    """A line when a field of the manifest was changed since it was written."""
    whole = manifest.schema_version == UNSEALED or manifest.seal == seal_of(manifest)
    return [] if whole else [f"{directory / MANIFEST}: was changed: its seal doesn't fit"]


def damages(directory: Path, manifest: Manifest) -> list[str]:
    """All of both."""
    return [*broken_seal(directory, manifest), *damaged_parts(directory, manifest)]


def require_whole(directory: Path) -> Manifest:
    """Read the manifest and check every byte. Raises UserError naming the first damage."""
    manifest = read_manifest(directory)
    problems = damages(directory, manifest)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(
            f"{problems[0]}{more}: the corpus is damaged: bring a backup back with restore_training, "
            "or remove that folder and merge again"
        )
    return manifest
