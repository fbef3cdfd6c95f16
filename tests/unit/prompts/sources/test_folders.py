"""Which files a folder or a pattern stands for: all of them, each once, whatever links lead to them."""

import json
import os

import pyarrow as pa
import pytest

from scripts.lib.core.errors import UserError
from scripts.lib.prompts.sources.files import local_paths


@pytest.fixture
def tree(tmp_path):
    """Make files (name -> content) and links (name -> ("->", target)) below a folder."""

    def make(names, root="data"):
        folder = tmp_path / root
        for name, content in names.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, tuple):
                path.symlink_to(content[1])
            else:
                path.write_text(content)
        return folder

    return make


def found(folder, pattern=""):
    paths = local_paths(str(folder) + pattern, "datasets.a.source")
    return [os.path.relpath(path, folder) for path in paths]


ROW = '{"prompt": "Why?"}\n'


def test_folder_and_pattern_of_the_same_tree_give_the_same_files(tree):
    tree({"b.jsonl": ROW, "deep/c.jsonl": ROW}, root="elsewhere")
    folder = tree(
        {
            "a.jsonl": ROW,
            "notes.md": "no data",
            "part2": ("->", "../elsewhere"),
            "d.jsonl": ("->", "../elsewhere/b.jsonl"),
        }
    )
    assert found(folder) == ["a.jsonl", "d.jsonl", "part2/deep/c.jsonl"]
    assert found(folder, "/**/*.jsonl") == found(folder)


def test_links_in_a_circle_end(tree):
    """Two of them are enough to give a pattern 2^40 paths."""
    folder = tree(
        {"a.jsonl": ROW, "x/b.jsonl": ROW, "loop": ("->", "."), "x/up": ("->", ".."), "x/across": ("->", "../x")}
    )
    assert found(folder) == found(folder, "/**/*.jsonl") == ["a.jsonl", "x/b.jsonl"]


def test_a_folder_and_a_link_to_it_are_one(tree):
    folder = tree({"current": ("->", "v2"), "v2/a.jsonl": ROW, "v2/b.jsonl": ("->", "a.jsonl")})
    assert found(folder) == found(folder, "/**/*.jsonl") == found(folder, "/*/*.jsonl") == ["v2/a.jsonl"]
    assert found(folder / "current") == ["a.jsonl"]


@pytest.mark.parametrize("root", ["_shared", ".cache/x", "deep/../data", "data [1]", "data*"])
def test_only_names_below_the_folder_are_looked_at(tree, root):
    folder = tree(
        {"a.jsonl": ROW, "_tmp/b.jsonl": ROW, ".git/c.jsonl": ROW, "._a.jsonl": "x", "_SUCCESS": ""}, root=root
    )
    assert found(folder) == ["a.jsonl"]


def test_a_relative_path_upwards(tree, monkeypatch):
    folder = tree({"a.jsonl": ROW})
    (folder / "work").mkdir()
    monkeypatch.chdir(folder / "work")
    assert local_paths("..", "x") == ["../a.jsonl"]
    assert local_paths("../**/*.jsonl", "x") == ["../a.jsonl"]
    monkeypatch.chdir(folder)
    assert local_paths("**/*.jsonl", "x") == local_paths("*.jsonl", "x") == ["a.jsonl"]


def test_patterns_see_hidden_names_only_when_they_ask(tree):
    folder = tree({".x/a.jsonl": ROW, "b.jsonl": ROW, "_c.jsonl": ROW})
    assert found(folder, "/**/*.jsonl") == ["_c.jsonl", "b.jsonl"]
    assert found(folder, "/**/.x/*.jsonl") == [".x/a.jsonl"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"b.jsonl": ("->", "/nowhere/b.jsonl")}, r"data/b.jsonl: a link to /nowhere/b.jsonl, which isn't there: mend"),
        ({"part2": ("->", "/mnt/disk2/part2")}, "data/part2: a link to /mnt/disk2/part2, which isn't there"),
        ({"x/y.parquet": ("->", "../.git/annex/objects/4f/y")}, "x/y.parquet: a link to .*: run `git annex get`"),
        ({"b.jsonl": ("->", "b.jsonl")}, "data/b.jsonl: a link to b.jsonl, which isn't there"),
        ({"b.jsonl.dvc": "outs:\n- md5: 4f\n"}, "data/b.jsonl: lies with DVC: run `dvc pull`"),
        ({"b.parquet.part": "PAR1"}, "b.parquet.part: a download that hasn't ended"),
        ({"b.jsonl": ROW, "b.jsonl.aria2": "x"}, "b.jsonl.aria2: a download that hasn't ended"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_stops_by_name(tree, names, message):
    folder = tree({"a.jsonl": ROW} | names)
    for source in (folder, folder / "**/*"):
        with pytest.raises(UserError, match=f"^datasets.a.source: .*{message}") as raised:
            local_paths(str(source), "datasets.a.source")
        assert "\n" not in str(raised.value)


def test_links_and_dvc_files_that_lack_nothing(tree):
    folder = tree(
        {"a.jsonl": ROW, "a.jsonl.dvc": "outs:", "README.md": ("->", "/nowhere/README.md"), "notes.part": "x"}
    )
    assert found(folder) == ["a.jsonl"]


def saved(folder, rows=("one",), **state):
    """A folder as `Dataset.save_to_disk` writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{len(rows):05}.arrow" for number in range(len(rows))]
    for name, row in zip(names, rows):
        table = pa.table({"prompt": [row]})
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table)
    content = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "4f"} | state
    (folder / "state.json").write_text(json.dumps(content))
    (folder / "dataset_info.json").write_text('{"features": {}}')
    return folder


def test_a_saved_dataset_is_its_data_files(tmp_path):
    """Beside them lie its description, and what `map` has cached: the same rows once more, changed."""
    folder = saved(tmp_path / "d", ["one", "two"])
    (folder / "cache-58494d5e7d63c741.arrow").write_bytes((folder / "data-00000-of-00002.arrow").read_bytes())
    expected = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert found(folder) == found(folder, "/*.arrow") == found(folder, "/*") == expected


def test_a_saved_dataset_of_splits(tmp_path):
    for split in ("train", "test"):
        saved(tmp_path / "d" / split)
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    names = ["test/data-00000-of-00001.arrow", "train/data-00000-of-00001.arrow"]
    assert found(tmp_path / "d") == names
    assert found(tmp_path / "d" / "train") == ["data-00000-of-00001.arrow"]


def test_a_saved_dataset_that_lacks_a_part(tmp_path):
    folder = saved(tmp_path / "d", ["one", "two"])
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"data-00001-of-00002.arrow: no such file, though .*state.json names it"):
        found(folder)


def test_a_saved_selection_by_index(tmp_path):
    folder = saved(tmp_path / "d", _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(UserError, match="save it again after flatten_indices"):
        found(folder)


def test_a_state_that_somebody_else_wrote_is_data(tree):
    assert found(tree({"state.json": '[{"prompt": "Which state?"}]', "a.arrow": "x"})) == ["a.arrow", "state.json"]


def test_a_folder_without_data_says_what_it_left_out(tree):
    with pytest.raises(UserError, match=r"holds no data files; names that begin with . or _ aren't read \(2\)"):
        found(tree({"_a.jsonl": ROW, ".b.jsonl": ROW, "c.md": "x"}))
