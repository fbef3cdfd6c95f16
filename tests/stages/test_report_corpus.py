"""The report of runs whose stages are the real ones: what it says of them, finished, half done, and gone wrong."""

import html
import html.parser
import re
import shutil
import time
from datetime import UTC, datetime

import orjson
import pytest

from scripts import report_corpus
from scripts.lib.core import durable
from scripts.lib.report.page import write_report
from scripts.lib.training import backup
from tests.made_runs import MadeRun

VOID = {"meta", "br", "img", "link", "hr", "input", "path", "use", "rect"}


class Outline(html.parser.HTMLParser):
    """Reads a page: every tag is closed in order; what it refers to; its text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.references, self.text = [], set(), [], []
        self.feed(page)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.references += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)
        self.references += [value for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text.append(data)


def report(run):
    """(page, its text in one line, findings by level)."""
    output = run.folder / "report.html"
    findings = write_report(run.config, run.results, output, clock=lambda: datetime(2026, 1, 2, 3, 4, tzinfo=UTC))
    levels = {level: sum(finding.level == level for finding in findings) for level in ("wrong", "look", "note")}
    page = output.read_text(encoding="utf-8")
    return page, " ".join(" ".join(Outline(page).text).split()), levels


def found(page):
    """`level where text` of every finding on the page, in its order."""
    items = re.findall(
        r'<li class="(wrong|look|note)">.*?<b>(.*?)</b>&ensp;(.*?)(?: <span class="advice">.*?)?</span></li>', page
    )
    return [f"{level} {where} {html.unescape(re.sub('<.*?>', '', text))}" for level, where, text in items]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run without fault."""
    run = MadeRun(tmp_path_factory.mktemp("made"))
    run.finish()
    return run


@pytest.fixture(scope="module")
def page_of_made(made):
    """(page, text, findings by level) of the finished run."""
    return report(made)


@pytest.fixture
def copy(made, tmp_path):
    """The finished run, to be spoilt. Modification times stay as they were."""
    shutil.copytree(made.folder, tmp_path / "run", symlinks=True)
    run = MadeRun(tmp_path / "run")
    run.values = made.values
    return run


def test_a_finished_run(made, page_of_made):
    _, text, levels = page_of_made
    manifest = durable.read_json(made.results / "training" / "manifest.json")
    assert levels == {"wrong": 0, "look": 0, "note": 0}
    assert "Nothing suspicious in what is there." in text
    assert "finished drafter-corpus · 3 datasets" in text
    assert "made 2026-01-02 03:04 UTC" in text
    for key, value in manifest["totals"].items():
        assert f"{value:,}" in text or key == "supervised_tokens", key
    for name, entry in manifest["datasets"].items():
        # 40 prompts, one duplicate, one blank row
        assert re.search(rf"{name} [AB] 42 40 40 40 {entry['rows']} {entry['rows']} 95.2% \d+ – yes", text)
    assert "not yet" not in text


def test_the_page_needs_nothing_else(made, page_of_made):
    page, _, _ = page_of_made
    outline = Outline(page)
    assert not outline.tags & {"script", "link", "img", "iframe", "object"}
    assert all(reference.startswith("#") for reference in outline.references)
    assert not re.search(r"url\((?!#)|@import", page)
    assert str(made.folder) not in page


def test_texts_of_prompts_are_no_markup(page_of_made):
    page, _, _ = page_of_made
    assert "&lt;b&gt;&amp;" in page
    assert not re.search(r"of (code|chat|kept) <b>", page)


def test_keys_in_addresses_are_not_shown(page_of_made):
    page, _, _ = page_of_made
    assert "http://127.0.0.1:3000/v1" in page
    assert "secret" not in page


def test_supervised_tokens_are_marked(page_of_made):
    page, _, _ = page_of_made
    samples = re.findall(r'<div class="sample">(.*?)</div>', page, re.DOTALL)
    assert len(samples) == 3
    for sample in samples:
        prompt, answer = re.fullmatch(r"(.*?)<mark>(.*?)</mark>\s*", sample, re.DOTALL).groups()
        assert "&lt;|im_start|&gt;user" in prompt
        assert answer.endswith("&lt;|im_end|&gt;")
        assert "im_start" not in answer


def test_unfinished_stages_are_not_errors(tmp_path):
    run = MadeRun(tmp_path)
    run.results.joinpath("target").rename(tmp_path / "target")
    _, text, levels = report(run)
    assert "next: prompts (0 of 3 done)" not in text  # shards are counted, not datasets
    assert "next: prompts (0 of 6 done)" in text
    assert "target not yet" in text
    assert not any(levels.values())

    (tmp_path / "target").rename(run.results / "target")
    run.prompts()
    _, text, levels = report(run)
    assert "next: completions (0 of 4 done)" in text
    assert "code B 42 40 – – – – – – – yes" in text
    assert not any(levels.values())

    run.completions(shards=1)
    run.validated()
    page, text, levels = report(run)
    assert "completions 2 of 4" in text
    assert "validated 4 of 6" in text
    assert re.search(r"waiting −\d+", text)
    assert "passed so far" in text
    assert found(page) == []

    run.completions()
    run.validated()
    _, text, levels = report(run)
    assert "next: corpus (0 of 1 done)" in text
    assert not any(levels.values())


def test_progress_is_shown_before_the_first_shard_is_finished(tmp_path):
    run = MadeRun(tmp_path)
    run.prompts()
    part = run.results / "state" / "progress" / "chat" / "000.json"
    durable.write_json(
        part,
        {"total": 20, "completed": 9, "failed": 1, "total_output_tokens": 1000, "tokens_per_sec": 250.0, "eta_hours": 0.5,
         "in_flight": 4, "elapsed_hours": 0.1, "outcomes": {"ok": 4, "length": 5, "exhausted": 1}, "status": "running",
         "updated": time.time()},
    )  # fmt: skip
    page, text, _ = report(run)
    assert re.search(r"generating: 1\d%, \d", text)  # 10 of about 80 prompts
    assert "250 output, now" in text
    assert "wrong chat 50.0% of the prompts (5) have an answer that was cut at max_tokens (256)." in found(page)


def test_a_fall_of_the_mean_answer_comes_first(copy):
    backup.back_up(copy.results / "training", copy.results / "backups", 5, say=lambda line: None)
    copy.completions(
        lambda answers, shard, prompt: answers.cut(prompt, 4) if prompt.dataset == "chat" else answers.ok(prompt, 40)
    )
    copy.validated()
    # Before the merge, against the corpus that still lies there.
    page, text, _ = report(copy)
    assert re.fullmatch(
        r"wrong chat The mean answer fell from \d+ to \d tokens: [\d.]+x shorter than in the corpus before.",
        found(page)[0],
    )
    assert any(line.startswith("note corpus results/training (version") for line in found(page))
    # After it, against the backup.
    copy.merged()
    page, text, _ = report(copy)
    assert re.fullmatch(
        r"wrong chat The mean answer fell from \d+ to \d tokens: [\d.]+x shorter than in the backup of .*",
        found(page)[0],
    )
    assert re.search(r"\d, was \d+: [\d.]+x shorter", text)
    assert not any("code The mean answer" in line for line in found(page))


def test_losses_are_told_with_their_reasons(copy):
    def answer(answers, shard, prompt):
        number = int(prompt.id[:4], 16) % 4
        if prompt.dataset == "code":
            return answers.ok(prompt, 40)
        if number == 0:
            return answers.failed(prompt, "exhausted", f"no answer within {int(prompt.id[:2], 16)} s")
        return answers.failed(prompt, "repetition") if number == 1 else answers.ok(prompt, 40)

    copy.completions(answer)
    copy.validated()
    page, text, _ = report(copy)
    lines = found(page)
    assert any(
        re.match(r"wrong chat .* failed on every attempt, mostly: no answer within N s \(\d+\)\.", line)
        for line in lines
    )
    assert any(re.match(r"wrong chat .* ended in a loop\.", line) for line in lines)
    assert not any("add up" in line for line in lines)
    assert re.search(r"exhausted −\d+ repetition −\d+ with a sample", text)


def test_rejects_are_shown_with_what_the_check_saw(copy):
    copy.values = copy.values | {"validation": {"min_supervised_tokens": 60, "max_reject_rate": 1.0}}
    copy.validated()
    page, text, _ = report(copy)
    assert any(
        re.match(r"look code [\d.]+% of its samples \(\d+\) were refused by the check min_supervised_tokens", line)
        for line in found(page)
    )
    assert "Rejects dataset check what it saw sample" in text


def test_files_of_different_runs_dont_add_up(copy):
    counts = copy.results / "validated" / "code" / "000.json"
    values = durable.read_json(counts)
    values["passed"] -= 1
    durable.write_json(counts, values)
    _, prompts = copy.shards("prompts", "chat")
    shutil.copy(copy.shards("prompts", "chat")[0], prompts)
    page, text, _levels = report(copy)
    lines = [line for line in found(page) if "don't add up" in line]
    assert any(line.startswith("wrong code") and "samples with all changes make" in line for line in lines)
    assert any(
        line.startswith("wrong code") and "shard 000:" in line and "passed samples are counted" in line
        for line in lines
    )
    assert any(line.startswith("wrong chat") and "the prompt shards hold" in line for line in lines)
    assert any(line.startswith("wrong chat") and "shard 001 has" in line for line in lines)
    assert re.search(r"code B .* no chat B", text)


def test_a_missing_part_of_the_corpus_is_named(copy):
    next((copy.results / "training").glob("part-*.parquet")).unlink()
    page, _, _ = report(copy)
    assert any(line.startswith("wrong corpus part-00000.parquet is missing, the manifest says") for line in found(page))


def test_what_was_made_with_other_settings_is_named(copy):
    copy.values = copy.values | {"sampling": {"temperature": 1.0}, "budget": {"tokens": 10**9}}
    page, _, _ = report(copy)
    assert found(page) == [
        "look 2 datasets code 2 of 2 shards, chat 2 of 2 shards of completions were made with another setting than the "
        "config has now: sampling.temperature: 0.7 -> 1.0."
    ]


def test_models_that_differ_within_the_run_are_named(copy):
    copy.completions(
        lambda answers, shard, prompt: answers.ok(prompt, 40, model="right" if shard == "000" else "wrong")
    )
    copy.validated()
    page, _, _ = report(copy)
    assert any(
        re.match(r"wrong chat served model differs within the run: \w+ \(\d+ answers\); \w+ \(\d+ answers\)\.", line)
        for line in found(page)
    )


def test_the_command(copy, capsys):
    config = copy.folder / "config.json"
    config.write_bytes(orjson.dumps(copy.values))
    output = copy.folder / "out" / "report.html"
    arguments = ["--config", str(config), "--results", str(copy.results), "--output", str(output)]
    assert report_corpus.main(arguments) == 0
    assert capsys.readouterr().err == f"{output}: nothing suspicious\n"
    assert output.read_text().startswith("<!doctype html>")

    copy.shards("completions", "code")[0].write_bytes(b"PAR1 broken")
    output.unlink()
    assert report_corpus.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "completions/code/000.parquet" in error
    assert not output.exists()

    assert report_corpus.main(["--config", str(config), "--results", str(copy.folder / "absent")]) == 1
    assert "absent: no such folder" in capsys.readouterr().err
