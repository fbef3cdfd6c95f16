"""What a run says and returns when its uploads fail."""

import pytest

from tests.faulty_s3 import faulty_s3
from tests.workflow.project import Project

pytestmark = pytest.mark.xdist_group("uploads")


def test_a_run_whose_uploads_were_refused_says_so_and_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "OLD")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with faulty_s3() as server:
        upload = {"target": "s3://corpora/run", "endpoint_url": server.url, "region": "us-east-1"}
        source = {"class": "B", "source": "config/prompts/code.jsonl", "max_samples": 4}
        lanes = {"short": {"max_tokens": 24, "concurrency": 8}}
        config = {"datasets": {"code": source}, "shards": 1, "lanes": lanes, "upload": upload}
        project = Project(tmp_path / "project", config)
        answers = project.folder / "results/completions/code/000.parquet"
        answers.parent.mkdir(parents=True)
        answers.write_bytes(b"answers of an earlier run")
        server.refusal = "ExpiredToken"
        refused = project.snakemake("prompts", check=False)
        assert refused.returncode == 1
        told = [line for line in refused.stdout.splitlines() if "not at s3://corpora/run" in line]
        assert len(told) == 1
        assert told[0].startswith("error: upload: 1 of 1 files are not at s3://corpora/run: ")
        assert "run: ExpiredToken: told: ExpiredToken: the credentials have expired" in told[0]
        assert "Traceback" not in refused.stdout
        server.refusal = ""
        done = project.snakemake("upload_results")
        assert server.objects["/corpora/run/completions/code/000.parquet"][0] == b"answers of an earlier run"
        assert "upload: s3://corpora/run: 1 files" in done.stdout
        # A run that fails for another reason tells what is not uploaded too.
        answers.write_bytes(b"other answers")
        server.refusal = "RequestTimeTooSkewed"
        (project.folder / "config/prompts/code.jsonl").write_text("{\n")
        failed = project.snakemake("prompts", check=False)
        assert failed.returncode == 1
        assert "upload: 1 of 1 files are not at s3://corpora/run: RequestTimeTooSkewed" in failed.stdout
