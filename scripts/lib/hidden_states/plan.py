"""What is captured and how large it gets: arithmetic, cheap enough for a dry run.

Layers are counted as transformers counts `hidden_states`: state i is what comes out of i layers and goes
into layer i (0 is the embedding). EAGLE, vLLM and speculators name layers so; SGLang and SpecForge name
the layer that the state comes out of, which is one less.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib.config.model import Config
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import digest
from scripts.lib.engines import ENGINES
from scripts.lib.engines.launching import merged_flags
from scripts.lib.target.gguf import read_header
from scripts.lib.target.location import ModelLocation

DTYPE = "bfloat16"
NUMBER_BYTES = 2
TOKEN_BYTES = 2 * 8  # input_ids and loss_mask, int64 as trainers have them
# A cached token and one of an earlier chunk have no state in the reply (SGLang 0.5.23, tried).
_COMMON_FLAGS: dict[str, Any] = {"disable-radix-cache": True, "chunked-prefill-size": -1}
# Names of the tensors in SpecForge's offline files: (layers joined, last layer).
_TENSORS = {"eagle3": ("aux_hidden_state", "hidden_state"), "dflash": ("hidden_states", "target_last_hidden_states")}
_FIELDS = {"hidden_size": ("hidden_size", "embedding_length"), "layers": ("num_hidden_layers", "block_count")}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model that hidden states depend on."""

    hidden_size: int
    layers: int


@dataclass(frozen=True, slots=True)
class Capture:
    """One pass over the samples, through servers that return one kind of state."""

    name: str  # layers | last
    tensor: str  # its name in the files
    width: int  # numbers per token
    flags: dict[str, Any]  # of SGLang
    sglang_layers: tuple[int, ...]  # () for the last layer


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """What every sample's file holds: the tensors of `captures`, bfloat16 [tokens, width], ids and mask."""

    method: str
    layers: tuple[int, ...]
    shape: Shape
    captures: tuple[Capture, ...]
    identity: str  # digest of what the numbers depend on besides the sample

    @property
    def token_bytes(self) -> int:
        return NUMBER_BYTES * sum(capture.width for capture in self.captures) + TOKEN_BYTES


def require_engine(config: Config) -> None:
    """Raise UserError when the configured engine returns no hidden states."""
    if not ENGINES[config.engine.kind].returns_hidden_states:
        able = ", ".join(f"`{kind}`" for kind, engine in ENGINES.items() if engine.returns_hidden_states)
        raise UserError(
            f"engine.kind: hidden states come from {able}, not from `{config.engine.kind}`: "
            "give hidden_states a configuration with that engine"
        )


def make_plan(config: Config) -> CapturePlan:
    """What to capture. Raises UserError when the configuration or the model has no such states."""
    settings = config.hidden_states
    require_engine(config)
    shape = model_shape(config)
    layers = tuple(settings.layers or (2, shape.layers // 2, shape.layers - 3))
    if layers[-1] >= shape.layers or list(layers) != sorted(set(layers)):
        raise UserError(
            f"hidden_states.layers: {list(layers)} are not ascending numbers from 1 to {shape.layers - 1}, the states "
            f"between the {shape.layers} layers of {config.model.name}; the last layer is hidden_states.last"
        )
    joined, last = _TENSORS[settings.method]
    outputs = tuple(layer - 1 for layer in layers)
    captures = [
        Capture(
            "layers",
            joined,
            len(layers) * shape.hidden_size,
            {
                **_COMMON_FLAGS,
                "enable-return-aux-hidden-states": True,
                # Names only how layers are counted; no draft runs. EAGLE3 counts alike in all of SGLang's models.
                "speculative-algorithm": "EAGLE3",
                "speculative-draft-model-path": None,
                "return-aux-hidden-state-layer-ids": list(outputs),
            },
            outputs,
        )
    ]
    if settings.last if settings.last is not None else settings.method == "eagle3":
        flags = {**_COMMON_FLAGS, "enable-return-hidden-states": True, "speculative-algorithm": None}
        flags["speculative-draft-model-path"] = None
        captures.append(Capture("last", last, shape.hidden_size, flags, ()))
    tensors = {capture.tensor: [capture.width, *capture.sglang_layers] for capture in captures}
    model = config.model.model_dump(mode="json", include={"name", "revision"})
    return CapturePlan(settings.method, layers, shape, tuple(captures), digest([1, model, tensors, DTYPE]))


def model_shape(config: Config) -> Shape:
    """Sizes from the model's config.json (or GGUF header). Raises UserError when it does not tell them."""
    location = ModelLocation(config.model.name)
    if location.gguf:
        header = read_header(location.gguf)
        prefix = f"{header.get('general.architecture')}."
        values = {key.removeprefix(prefix): value for key, value in header.items()}
        return _shape(values, 1, location.name)
    folder, _ = location.small_files(config.model.revision, ("config.json",))
    values = durable.read_json(folder / "config.json")
    return _shape(values | (values.get("text_config") or {}), 0, str(folder / "config.json"))


def _shape(values: dict[str, Any], column: int, where: str) -> Shape:
    found = {field: value for field, names in _FIELDS.items() if isinstance(value := values.get(names[column]), int)}
    missing = [names[column] for field, names in _FIELDS.items() if field not in found]
    if missing:
        raise UserError(f"{where}: does not tell {' and '.join(missing)}, which the size of hidden states follows from")
    return Shape(**found)


def capturing(config: Config, capture: Capture) -> Config:
    """The configuration whose servers return these states: the capture's flags over the user's."""
    launch = config.engine.launch
    launch = launch.model_copy(update={"flags": merged_flags(launch.flags, capture.flags)})
    return config.model_copy(update={"engine": config.engine.model_copy(update={"launch": launch})})


def size_line(plan: CapturePlan, samples: int, tokens: int, about: bool = False) -> str:
    """The plan for people: what, of how much, how large."""
    kept = ", ".join(map(str, plan.layers)) + (" and the last" if len(plan.captures) > 1 else "")
    return (
        f"states {kept} of {plan.shape.layers} layers, {plan.shape.hidden_size} wide, {DTYPE}: "
        f"{plan.token_bytes:,} bytes a token x {'about ' if about else ''}{tokens:,} tokens of {samples:,} samples "
        f"= {plan.token_bytes * tokens / 1e9:,.2f} GB, {plan.token_bytes * tokens / max(1, samples) / 1e6:,.2f} MB a sample"
    )


def dry_run(config: Config, training: Path | str) -> str:
    """`size_line` from the manifest's totals alone, or why there is none yet. Asks no network, raises nothing."""
    able = ENGINES[config.engine.kind].returns_hidden_states
    if able and not ModelLocation(config.model.name).is_local:
        return "hidden states: the size is told when the job begins"
    try:
        plan = make_plan(config)
        manifest = Path(training) / "manifest.json"
        if not manifest.exists():
            return f"hidden states: {plan.token_bytes:,} bytes a token; there is no corpus yet to count"
        totals = durable.read_json(manifest)["totals"]
    except UserError as error:
        return f"hidden states: {error}"
    settings = config.hidden_states
    samples = min(round(totals["rows"] * settings.fraction), settings.max_samples or totals["rows"])
    tokens = round(totals["tokens"] * samples / max(1, totals["rows"]))
    return size_line(plan, samples, tokens, about=samples < totals["rows"])
