"""The model's files: there, whole, and of a kind that the engine reads."""

import struct
from pathlib import Path

import orjson

from scripts.lib.config.model import Config
from scripts.lib.core.errors import UserError
from scripts.lib.doctor.findings import OK, PROBLEM, WARNING, Finding
from scripts.lib.engines import ENGINES
from scripts.lib.target.gguf import read_header
from scripts.lib.target.location import ModelLocation

_INDEX = "model.safetensors.index.json"


def whole_safetensors(path: Path) -> bool:
    """Whether a file is as long as its header says (format: safetensors README)."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(8)
        if len(head) < 8:
            return False
        length = struct.unpack("<Q", head)[0]
        if length > size - 8:
            return False
        try:
            header = orjson.loads(file.read(length))
        except orjson.JSONDecodeError:
            return False
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return size == 8 + length + max(ends, default=0)


def check_folder(folder: Path) -> list[Finding]:
    """A folder in Hugging Face's layout: config, tokenizer, and every weight file whole."""
    again = f"download it again: `hf download OWNER/NAME --local-dir {folder}`"
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).is_file()]
    if (folder / _INDEX).is_file():
        names = sorted(set(orjson.loads((folder / _INDEX).read_bytes())["weight_map"].values()))
        missing += [name for name in names if not (folder / name).is_file()]
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names and not list(folder.glob("*.bin")):
            missing.append("*.safetensors")
    broken = [name for name in names if (folder / name).is_file() and not whole_safetensors(folder / name)]
    if missing or broken:
        detail = "; ".join(
            f"{what}: {', '.join(files)}" for what, files in (("missing", missing), ("cut off", broken)) if files
        )
        return [Finding("model", PROBLEM, f"{folder}: {detail}", again)]
    return [Finding("model", OK, f"{folder}: {len(names)} weight files, all whole")]


def check_model(config: Config) -> list[Finding]:
    """The model that the configuration names."""
    if config.engine.endpoints:
        return []
    name = config.model.name
    location = ModelLocation(name)
    try:
        if location.gguf:
            facts = read_header(location.gguf)
            return [Finding("model", OK, f"{location.gguf}: {facts.get('general.architecture')}")]
    except (UserError, OSError) as error:
        return [Finding("model", PROBLEM, str(error), "correct model.name, or download the file again")]
    if ENGINES[config.engine.kind].only_gguf:
        needs = f"{name}: {config.engine.kind} needs a .gguf file"
        return [Finding("model", PROBLEM, needs, "name a .gguf file in model.name")]
    if location.folder:
        return check_folder(location.folder)
    try:
        hub_id = location.hub_id
    except UserError as error:
        return [Finding("model", PROBLEM, str(error), "correct model.name")]
    if config.model.revision is None:
        problem = f"{hub_id}: no revision: the model may change between two runs"
        return [Finding("model", WARNING, problem, "set model.revision to a commit of its repository")]
    return [Finding("model", OK, f"{hub_id} at {config.model.revision}, downloaded by the engine")]
