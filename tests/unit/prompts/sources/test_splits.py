"""Which files of a Hub repository make a configuration and a split."""

import pytest

from scripts.lib.core.errors import UserError
from scripts.lib.prompts.sources.hub import choose_files

CARD = {
    "configs": [
        {"config_name": "default", "data_files": [{"split": "train_sft", "path": "data/train_sft-*"},
                                                  {"split": "test_sft", "path": ["data/test_sft-*"]}]},
        {"config_name": "metadata", "data_dir": "extra", "data_files": "*.parquet"},
    ]
}  # fmt: skip
FILES = [
    "README.md", ".gitattributes", "data/train_sft-00000-of-00002-a.parquet", "data/train_sft-00001-of-00002-b.parquet",
    "data/test_sft-00000-of-00001-c.parquet", "extra/one.parquet", "dataset_infos.json",
]  # fmt: skip
CONFIGS = [
    "README.md",
    "all/train-00000-of-00001.parquet",
    "code/train-00000-of-00001.parquet",
    "code/test-00000-of-00001.parquet",
]


@pytest.mark.parametrize(
    ("paths", "card", "configuration", "split", "expected"),
    [
        (FILES, CARD, None, "train_sft", FILES[2:4]),
        (FILES, CARD, "default", "test_sft", FILES[4:5]),
        (FILES, CARD, None, "train_sft+test_sft", FILES[2:5]),
        (FILES, CARD, "metadata", None, ["extra/one.parquet"]),
        (FILES, {"configs": [{"config_name": "x", "data_files": {"train": "extra/*"}}]}, None, None, ["extra/one.parquet"]),
        (["README.md", "a.jsonl", "b.jsonl"], {}, None, None, ["a.jsonl", "b.jsonl"]),
        (["README.md", "a.jsonl", "dataset_infos.json"], {"license": "mit"}, None, "train", ["a.jsonl"]),
        (["train.csv", "test.csv"], {}, None, None, ["train.csv"]),
        (["data/my_train_1.json", "data/my_validation.json"], {}, None, "train", ["data/my_train_1.json"]),
        (FILES, {}, None, "train_sft", FILES[2:4]),
        (CONFIGS, {}, "code", None, ["code/train-00000-of-00001.parquet"]),
        (CONFIGS, {}, "code", "test", ["code/test-00000-of-00001.parquet"]),
        (["SFT/math/a.jsonl", "RL/b.jsonl"], {}, "SFT", None, ["SFT/math/a.jsonl"]),
    ],
)  # fmt: skip
def test_files_of_a_split(paths, card, configuration, split, expected):
    assert choose_files(paths, card, configuration, split, "d") == expected


@pytest.mark.parametrize(
    ("paths", "card", "configuration", "split", "message"),
    [
        (FILES, CARD, None, None, "needs `split`: train_sft, test_sft"),
        (FILES, CARD, None, "train", "no split `train`; there are train_sft, test_sft"),
        (FILES, CARD, "other", None, "no hub_config `other`; there are default, metadata"),
        (CONFIGS, {"configs": [{"config_name": n, "data_files": f"{n}/*"} for n in ("all", "code")]}, None, None,
         "needs `hub_config`: all, code"),
        (CONFIGS, {}, "science", None, "no hub_config `science`; there are all, code"),
        (["README.md", "model.bin"], {}, None, None, "holds no data files"),
    ],
)  # fmt: skip
def test_open_choice_names_what_there_is(paths, card, configuration, split, message):
    with pytest.raises(UserError, match=message):
        choose_files(paths, card, configuration, split, "d")
