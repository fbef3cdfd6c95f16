"""Loads an export with a trainer's own code and prints what the trainer sees, as JSON.

Runs in the trainers' environment, not in the client's: `python load.py LOADER DATA TARGET`. Prints a
list of rows: `input_ids` and, where the loader makes one, `loss_mask`; or the plain row of `datasets`.
"""

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

LONGEST = 100_000


def only_file(data: Path) -> str:
    (file,) = sorted(data.iterdir())
    return str(file)


def specforge(data: Path, tokenizer, **options):
    from specforge.data.prompt_builder import prepare_prompt_tasks

    tasks = prepare_prompt_tasks(
        only_file(data),
        tokenizer,
        max_length=LONGEST,
        is_preformatted=False,
        cache_dir=None,
        cache_key=None,
        num_proc=1,
        **options,
    )
    return [task["payload"] for task in tasks]


def specforge_tokens(data: Path, tokenizer):
    """`data.prompts_path`."""
    return specforge(data, None, chat_template=None, train_only_last_turn=False)


def specforge_conversations(data: Path, tokenizer):
    """`data.train_data_path` with the setting that export.json tells."""
    from specforge.data.template import TEMPLATE_REGISTRY, ChatTemplate

    chatml = ChatTemplate(
        assistant_header="<|im_start|>assistant\n", user_header="<|im_start|>user\n", end_of_turn_token="<|im_end|>"
    )
    TEMPLATE_REGISTRY.register("chatml", chatml)
    settings = json.loads((data.parent / "export.json").read_text())["settings"]
    last_only = settings["data.train_only_last_turn"]
    return specforge(data, tokenizer, chat_template="chatml", train_only_last_turn=last_only)


def specforge_features(data: Path, tokenizer):
    """Hidden states as `data.hidden_states_path`, after the conversion that docs/exports.md tells."""
    import tempfile

    import torch
    from safetensors.torch import load_file
    from specforge.algorithms.common import dflash_family_data
    from specforge.algorithms.eagle3 import data as eagle3_data
    from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

    features = Path(tempfile.mkdtemp())
    for file in data.rglob("*.safetensors"):
        torch.save(load_file(file), features / f"{file.stem}.ckpt")
    method = json.loads((data.parent / "manifest.json").read_text())["method"]
    normalize = {"eagle3": eagle3_data, "dflash": dflash_family_data}[method].normalize_offline_sample
    keys = {"feature_keys": ("input_ids", "loss_mask", "hidden_states")} if method == "dflash" else {}
    rows = []
    for reference in OfflineManifestReader(str(features), strategy=method, validate_files=True, **keys):
        raw = torch.load(reference.feature_store_uri.removeprefix("file://"), weights_only=True)
        row = normalize({name: raw[name] for name in reference.feature_keys}, max_len=LONGEST)
        rows.append({name: tensor[0].tolist() for name, tensor in row.items()})
    return rows


def speculators(data: Path, tokenizer):
    """A folder of JSON Lines, as `prepare-data` takes it."""
    from speculators.data_generation.preprocessing import build_speculator_training_dataset, load_raw_dataset

    raw, _ = load_raw_dataset(str(data))
    built = build_speculator_training_dataset(raw, tokenizer, max_length=LONGEST, num_proc=1)
    return [{"input_ids": row["input_ids"].tolist(), "loss_mask": row["loss_mask"].tolist()} for row in built]


def model_optimizer(data: Path, tokenizer):
    """`messages` through Model-Optimizer's dataset and collator."""
    from modelopt.torch.utils.plugins.transformers_dataset import LanguageDataCollator, ShardedDataset

    rows = ShardedDataset("json", data_files=only_file(data))
    collate = LanguageDataCollator(tokenizer, train_len=2048)
    batches = [collate([rows[number]]) for number in range(len(rows))]
    return [{"input_ids": batch["input_ids"][0][batch["attention_mask"][0] == 1].tolist()} for batch in batches]


def automodel(data: Path, tokenizer):
    """`messages` through NeMo AutoModel's chat dataset."""
    from nemo_automodel.components.datasets.llm.chat_dataset import ChatDataset

    # As for a block-diffusion draft: the last answer only, without its header, masks unshifted.
    rows = ChatDataset(only_file(data), tokenizer, mask_history=True, mask_generation_prompt=True, unshifted=True)
    return [{key: rows[number][key] for key in ("input_ids", "loss_mask")} for number in range(len(rows))]


def datasets_folder(data: Path, tokenizer):
    """The folder as `load_dataset` takes it, by its card."""
    from datasets import load_dataset

    return list(load_dataset(str(data.parent), split="train"))


def datasets_json(data: Path, tokenizer):
    """Any JSON Lines export, as every trainer that says `load_dataset("json")` reads it."""
    from datasets import load_dataset

    return list(load_dataset("json", data_files=only_file(data), split="train"))


def angelslim(data: Path, tokenizer):
    """AngelSlim's declared features; its wheel can't be imported (angelslim 0.5.0 lacks a module)."""
    from datasets import Features, Value, load_dataset

    features = Features(
        {"id": Value("string"), "conversations": [{"role": Value("string"), "content": Value("string")}]}
    )
    return list(load_dataset("json", data_files=only_file(data), split="train", features=features))


def main() -> None:
    loader, data, target = sys.argv[1:]
    # Whatever the trainer prints must not mix with the rows.
    out, sys.stdout = sys.stdout, sys.stderr
    tokenizer = AutoTokenizer.from_pretrained(target)
    rows = globals()[loader](Path(data), tokenizer)
    json.dump(rows, out)


if __name__ == "__main__":
    main()
