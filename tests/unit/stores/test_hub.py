"""The hub's store against a stand-in that answers as HfApi does: there is no hub to be reached from a test."""

from types import SimpleNamespace

import pytest
import requests
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.stores import File, TransferError
from scripts.lib.stores.hub import HubStore, _git_blob


class Api:
    """Keeps files of one repository; those that end with .parquet as LFS, as the hub does."""

    def __init__(self, folder):
        self.folder = folder
        self.commits = 0
        self.repositories = set()
        self.failure = None
        self.busy = []

    def create_repo(self, repo_id, repo_type, private, exist_ok):
        self.repositories.add((repo_id, repo_type, private))

    def create_commit(self, repo_id, repo_type, operations, commit_message):
        if self.busy:
            raise self.busy.pop(0)
        if self.failure:
            raise self.failure
        self.commits += 1
        for one in operations:
            path = self.folder / one.path_in_repo
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(open(one.path_or_fileobj, "rb").read())  # noqa: SIM115

    def get_paths_info(self, repo_id, repo_type, paths):
        for name in paths:
            path = self.folder / name
            if path.exists():
                lfs = SimpleNamespace(sha256=durable.sha256_file(path)) if name.endswith(".parquet") else None
                yield SimpleNamespace(size=path.stat().st_size, lfs=lfs, blob_id=_git_blob(path))

    def hf_hub_download(self, repo_id, repo_type, filename):
        return str(self.folder / filename)

    def list_repo_files(self, repo_id, repo_type):
        return [str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()]

    def delete_file(self, repo_id, repo_type, path_in_repo):
        (self.folder / path_in_repo).unlink()


@pytest.fixture
def api(tmp_path):
    (tmp_path / "hub").mkdir()
    return Api(tmp_path / "hub")


@pytest.fixture
def files(tmp_path):
    made = []
    for name in ("part.parquet", "manifest.json"):
        path = tmp_path / name
        path.write_text(name * 10)
        made.append(File(path, f"training/{name}", path.stat().st_size, durable.sha256_file(path)))
    return made


def test_files_go_in_one_commit_and_come_back(api, files, tmp_path):
    store = HubStore("hf:owner/corpus", api)
    assert not any(store.holds(file) for file in files)
    store.put(files)
    assert api.commits == 1
    assert api.repositories == {("owner/corpus", "dataset", True)}
    assert all(store.holds(file) for file in files)
    assert store.keys("training/p") == ["training/part.parquet"]
    store.get("training/part.parquet", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == files[0].path.read_bytes()
    store.delete("training/part.parquet")
    assert not store.holds(files[0])


@pytest.mark.parametrize("name", ["part.parquet", "manifest.json"])
def test_other_bytes_are_seen(api, files, name):
    store = HubStore("hf:owner/corpus", api)
    store.put(files)
    path = api.folder / "training" / name
    path.write_text(path.read_text().swapcase())
    assert [file.key for file in files if not store.holds(file)] == [f"training/{name}"]


def test_git_names_a_file_as_git_does(tmp_path):
    (tmp_path / "file").write_bytes(b"hello\n")
    assert _git_blob(tmp_path / "file") == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_a_busy_hub_is_asked_again_when_it_says(api, files, monkeypatch):
    slept = []
    monkeypatch.setattr("scripts.lib.core.waiting.time.sleep", slept.append)
    response = requests.Response()
    response.status_code = 429
    response.headers["Retry-After"] = "3"
    api.busy = [HfHubHTTPError("429", response=response) for _ in range(3)]
    HubStore("hf:owner/corpus", api).put(files)
    assert (api.commits, slept) == (1, [3, 3, 4])


def test_failures_are_told_in_one_line(api, files, monkeypatch):
    monkeypatch.setattr("scripts.lib.core.waiting.BACKOFF_SECONDS", 0)
    response = requests.Response()
    response.status_code = 503
    store = HubStore("hf:owner/corpus", api)
    api.failure = HfHubHTTPError("503 busy\nrequest id: x", response=response)
    with pytest.raises(TransferError, match="hf:owner/corpus: 503 busy request id: x"):
        store.put(files)
    response.status_code = 404
    api.failure = RepositoryNotFoundError("404", response=response)
    with pytest.raises(UserError, match="no such repository, or no right to it: check HF_TOKEN"):
        store.put(files)
