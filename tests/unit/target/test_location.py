"""What a model's name means, the same for every stage that opens the model."""

from pathlib import Path

import pytest

from scripts.lib.core.errors import UserError
from scripts.lib.target.location import EMBEDDED, ModelLocation


def test_a_name_means_one_thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("model", "owner/name", "model.gguf"):
        (tmp_path / folder).mkdir(parents=True)
    meanings = {
        EMBEDDED: "gguf",
        "x.gguf": "gguf",
        "~/x.gguf": "gguf",
        "model": "folder",
        "~/model": "folder",
        "owner/name": "folder",
        "model.gguf": "folder",
        "owner/other": "hub_id",
    }
    for name, meaning in meanings.items():
        location = ModelLocation(name)
        found = {kind for kind in ("gguf", "folder", "hub_id") if getattr(location, kind) is not None}
        assert found == {meaning}, name


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/no/where", "~/nowhere", "a/b/c"])
def test_a_name_that_means_nothing_is_an_error_on_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"model `{name}`: no such folder, and not a Hugging Face id"):
        ModelLocation(name).for_engine()


def test_engines_get_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They run in a folder of their own, and expand no `~`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert ModelLocation("model").for_engine() == ModelLocation("~/model").for_engine() == str(tmp_path / "model")
    assert ModelLocation("owner/name").for_engine() == "owner/name"


def test_what_is_here_needs_no_network(tmp_path: Path):
    assert ModelLocation(EMBEDDED).is_local
    assert ModelLocation(str(tmp_path)).is_local
    assert not ModelLocation("owner/name").is_local
