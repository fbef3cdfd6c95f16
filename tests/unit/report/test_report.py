"""The report's arithmetic: lengths, answers, times, what counts as far, and drawings that fit any page."""

import itertools
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.lib.completions.progress import RunProgress
from scripts.lib.config.file import parse_config
from scripts.lib.core.errors import UserError
from scripts.lib.core.paths import Results
from scripts.lib.core.records import Completion, Prompt, Turn, write_rows
from scripts.lib.report import plots
from scripts.lib.report.answers import TurnSums, read_answers, read_prompt_lengths
from scripts.lib.report.comparisons import times
from scripts.lib.report.costs import rule_costs, union
from scripts.lib.report.ledger import ledger_of
from scripts.lib.report.origins import OriginFact
from scripts.lib.report.run import DatasetRun, Run
from scripts.lib.report.suspicions import suspicions
from scripts.lib.validated.lengths import Lengths


def lengths(values):
    made = Lengths()
    made.add(np.asarray(values, np.int64))
    return made


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20))))
def test_union_counts_each_second_once(spans):
    covered = set(itertools.chain.from_iterable(range(start, start + length) for start, length in spans))
    assert union((float(start), float(start + length)) for start, length in spans) == len(covered)


def test_times_tells_the_direction():
    assert times(176, 1600) == (pytest.approx(9.09, abs=0.01), "9.1x shorter")
    assert times(300, 100) == (3.0, "3.0x longer")


# --- completions and prompts, read by column ---


def turn(output, finish="stop", **more):
    return Turn([1, 2], [7] * output, finish, "text", **({"endpoint": "http://a", "model": "m"} | more))


def completion(number, outcome="ok", turns=(), reason=None):
    return Completion(f"{number:032x}", "d", outcome, reason, attempts=2, turns=list(turns))


def test_answers_are_added_up_over_shards(tmp_path):
    write_rows(
        tmp_path / "0.parquet",
        Completion,
        [
            completion(0, turns=[turn(10, seconds=2.0, cost_usd=0.5), turn(4)]),
            completion(1, "length", [turn(30, "length", endpoint="http://b")], "the answer reached max_tokens"),
            completion(2, "exhausted", reason="no answer within 108 s"),
            completion(3, "exhausted", reason="no answer within 42.5 s"),
        ],
        {},
    )
    write_rows(tmp_path / "1.parquet", Completion, [completion(4, turns=[turn(0, ids_origin="reconstructed")])], {})
    write_rows(tmp_path / "2.parquet", Completion, [], {})
    answers = read_answers(tmp_path / f"{number}.parquet" for number in range(3))
    assert answers.prompts == 5
    assert answers.outcomes == {"ok": 2, "length": 1, "exhausted": 2}
    assert answers.reasons["exhausted"] == {"no answer within N s": 2}
    assert answers.attempts == 10
    assert answers.finish_reasons == {"stop": 3, "length": 1}
    assert answers.ids_origin == {"engine": 3, "reconstructed": 1}
    assert answers.endpoints == {
        ("http://a", "", "m"): TurnSums(turns=3, tokens=14, seconds=2.0, cost_usd=0.5),
        ("http://b", "", "m"): TurnSums(turns=1, tokens=30, at_limit=1),
    }
    assert answers.all == TurnSums(turns=4, tokens=44, seconds=2.0, cost_usd=0.5, at_limit=1)
    assert [answers.lengths.counts[length] for length in (0, 4, 10, 30)] == [1, 1, 1, 1]


def test_an_endpoint_is_shown_without_its_key(tmp_path):
    path = tmp_path / "0.parquet"
    write_rows(path, Completion, [completion(0, turns=[turn(1, endpoint="https://me:key@host:8/v1?key=key")])], {})
    assert [url for url, _, _ in read_answers([path]).endpoints] == ["https://host:8/v1"]


def test_prompt_lengths(tmp_path):
    path = tmp_path / "0.parquet"
    write_rows(path, Prompt, [Prompt(f"{n:032x}", "d", "f:1", "k", prompt_tokens=n) for n in (3, 3, 9)], {})
    assert read_prompt_lengths([path]).tokens == 15


# --- costs ---


def test_costs_are_added_up_by_rule(tmp_path):
    folder = tmp_path / "benchmarks" / "generate_completions"
    folder.mkdir(parents=True)
    (folder / "chat.000.jsonl").write_text('{"s": 10.0, "max_rss": 90.5, "cpu_time": 4}\n')
    (folder / "chat.001.jsonl").write_text('{"s": 0.1, "max_rss": "NA", "cpu_time": null}\n')
    (tmp_path / "benchmarks" / "merge_training.jsonl").write_text('{"s": 2.0, "max_rss": 700, "cpu_time": 1.5}\n')
    costs, intervals = rule_costs(Results(tmp_path))
    by_rule = {cost.rule: cost for cost in costs}
    assert list(by_rule) == ["generate_completions", "merge_training"]
    generation = by_rule["generate_completions"]
    assert (generation.jobs, generation.cpu_seconds, generation.max_rss) == (2, 4, 90.5)
    assert (generation.seconds, generation.longest) == (pytest.approx(10.1, abs=1e-3), pytest.approx(10, abs=1e-3))
    assert generation.span == pytest.approx(10, abs=1)  # they ended at about the same time
    assert len(intervals) == 3


def test_a_broken_benchmark_file_is_named(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "merge_training.jsonl").write_text("{oops\n")
    with pytest.raises(UserError, match=r"merge_training\.jsonl: not a benchmark file"):
        rule_costs(Results(tmp_path))


# --- findings and drawings on a run in memory ---


def validated(passed, supervised, **more):
    """What validate_tokens counts of a shard whose samples all have `supervised` supervised tokens."""
    statistics = {
        "samples": passed,
        "tokens": passed * (supervised + 10),
        "supervised_tokens": passed * supervised,
        "ids_origin": {"engine": passed},
        "flags": {},
        "lengths": {str(supervised + 10): passed},
        "supervised_lengths": {str(supervised - 1): passed // 2, str(supervised + 1): passed // 2},
    }
    counts = {
        "prompts": passed,
        "outcomes": {"ok": passed},
        "without_sample": {},
        "samples": passed,
        "passed": passed,
        "rejects": {},
        "reconstruction": {"turns": 0, "drifted": 0},
        "statistics": statistics,
    }
    return counts | more


def dataset(name, *shards, data_class="B"):
    made = DatasetRun(name, data_class, 256, {stage: [] for stage in ("prompts", "completions", "tokens", "validated")})
    made.validations = {f"{number:03d}": shard for number, shard in enumerate(shards)}
    return made


def run_of(*datasets):
    names = {one.name: {"class": one.data_class, "source": "x"} for one in datasets}
    config = parse_config({"datasets": names}, "test")
    progress = RunProgress(updated=0, datasets={})
    return Run(config, Results(Path("absent")), {one.name: one for one in datasets}, progress, None, None, False, [])


def texts(run, origins=()):
    ledgers = {name: ledger_of(one) for name, one in run.datasets.items()}
    return [f"{one.level} {one.where}: {one.text}" for one in suspicions(run, ledgers, list(origins), [])]


def test_nothing_is_found_in_a_run_without_fault():
    assert texts(run_of(dataset("a", validated(100, 200)), dataset("b", validated(100, 190)))) == []


def test_a_dataset_far_from_the_others_is_named():
    run = run_of(*(dataset(name, validated(100, size)) for name, size in (("a", 1600), ("b", 1500), ("c", 176))))
    assert texts(run) == [
        "look c: Its mean answer has 176 tokens, 8.8x shorter than the other datasets' (median 1,550)."
    ]


def test_a_shard_that_differs_from_its_dataset_is_named():
    run = run_of(dataset("a", validated(100, 200), validated(100, 200), validated(100, 80)))
    (found,) = [text for text in texts(run) if "Shard 002" in text]
    assert found.startswith(
        "wrong a: Shard 002 has answers of 80 tokens on average, 2.5x shorter than its other shards (200)"
    )


def test_small_shards_are_not_compared():
    assert texts(run_of(dataset("a", validated(20, 200), validated(20, 80)))) == []


def test_an_endpoint_is_compared_on_the_datasets_that_it_served():
    # Short answers because of the dataset, not because of the server: nothing to say.
    long, short = dataset("long"), dataset("short")
    for one, tokens in ((long, 1000), (short, 100)):
        for url, turns in (("http://a", 90 if one is long else 10), ("http://b", 10 if one is long else 90)):
            part = TurnSums(turns=turns, tokens=turns * tokens)
            one.answers.endpoints[url, "", ""] = part
            one.answers.all.add(part)
    assert texts(run_of(long, short)) == []

    bad = TurnSums(turns=100, tokens=100 * 300)
    long.answers.endpoints["http://c", "", ""] = bad
    long.answers.all.add(bad)
    found = [text for text in texts(run_of(long, short)) if "http://c" in text]
    assert found == [
        "look http://c: Its 100 answers have 300 tokens on average, 3.3x shorter than the other endpoints give on the same datasets (1,000)."
    ]


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ({"ok": 96, "length": 4}, []),
        (
            {"ok": 90, "length": 10},
            ["look a: 10.0% of the prompts (10) have an answer that was cut at max_tokens (256)."],
        ),
        (
            {"ok": 50, "length": 50},
            ["wrong a: 50.0% of the prompts (50) have an answer that was cut at max_tokens (256)."],
        ),
        (
            {"ok": 70, "reasoning_only": 30},
            ["wrong a: 30.0% of the prompts (30) have a thought that never ended, and no answer."],
        ),
        ({"ok": 98, "repetition": 2}, []),
        ({"ok": 97, "repetition": 3}, ["look a: 3.0% of the prompts (3) ended in a loop."]),
        ({"ok": 70, "exhausted": 30}, ["wrong a: 30.0% of the prompts (30) failed on every attempt."]),
        ({"ok": 99, "over_budget": 1}, ["look a: 1 prompts were not sent: the budget is used up."]),
        ({"ok": 99, "lost": 1}, ["wrong a: Unknown outcomes: lost."]),
    ],
)
def test_outcomes_above_a_threshold_are_named(outcomes, expected):
    one = dataset("a")
    one.answers.outcomes.update(outcomes)
    one.answers.prompts = sum(outcomes.values())
    assert texts(run_of(one)) == expected


def test_the_same_trouble_of_several_datasets_is_told_once():
    several = [dataset(name) for name in "abc"]
    for one, length in zip(several, (10, 20, 60)):
        one.answers.outcomes.update({"ok": 100 - length, "length": length})
        one.answers.prompts = 100
    assert texts(run_of(*several)) == [
        "wrong c: 60.0% of the prompts (60) have an answer that was cut at max_tokens (256).",
        "look 2 datasets: a 10.0%, b 20.0% of the prompts have an answer that was cut at max_tokens.",
    ]


def test_reconstructed_ids_beside_exact_ones_are_named():
    rebuilt = validated(50, 190)
    rebuilt["statistics"]["ids_origin"] = {"reconstructed": 50}
    exact = validated(100, 200, reconstruction={"turns": 100, "drifted": 3})
    (found,) = texts(run_of(dataset("a", exact), dataset("b", rebuilt)))
    assert found == (
        "look b: The ids of 50 samples were reconstructed from text, and 100 samples of the run have the engine's own: "
        "both are in one corpus. Where both are known, 3.0% of answers get other ids."
    )


def test_reconstructed_answers_of_another_length_than_was_billed_are_named():
    rebuilt = validated(50, 190)
    rebuilt["statistics"] |= {"ids_origin": {"reconstructed": 50}, "flags": {"length_mismatch": 20}}
    (found,) = texts(run_of(dataset("b", rebuilt)))
    assert found == (
        "look b: The ids of 50 samples were reconstructed from text. 40.0% of them hold an answer of another length than "
        "the API counted."
    )


def test_thoughts_that_the_target_does_not_know_are_named():
    strange = validated(100, 200)
    strange["statistics"]["flags"] = {"thought_in_text": 30, "reasoning_dropped": 1}
    (found,) = texts(run_of(dataset("a", strange)))
    assert (
        found == "look a: 30.0% of its samples (30) begin with what looks like a thought, which is text to the target."
    )


def test_reconstructed_answers_without_their_thought_are_named():
    rebuilt = validated(50, 190)
    rebuilt["statistics"] |= {"ids_origin": {"reconstructed": 50}, "flags": {"reasoning_dropped": 50}}
    found = texts(run_of(dataset("b", rebuilt)))
    assert any(
        text.startswith("look b: The ids of 50 samples were reconstructed from text. 100.0% of them lack a thought")
        for text in found
    )


def test_rejects_above_the_limit_stop_the_run_below_it_they_are_named():
    many = validated(60, 200, samples=100, prompts=100, outcomes={"ok": 100}, rejects={"stop_token": 40})
    some = validated(90, 200, samples=100, prompts=100, outcomes={"ok": 100}, rejects={"bos": 9, "script": 1})
    found = texts(run_of(dataset("a", many), dataset("b", some)))
    assert found == [
        "wrong a: 40.0% of its samples were refused (stop_token 40), more than max_reject_rate 20%.",
        "look b: 9.0% of its samples (9) were refused by the check bos.",
    ]


def test_a_lossy_source_is_named_but_not_what_max_samples_left_out():
    def source(**reasons):
        return {
            "rows": 100,
            "kept": 100 - sum(reasons.values()),
            "reasons": {r: {"count": n} for r, n in reasons.items()},
        }

    lossy, chosen = dataset("a"), dataset("b")
    lossy.source, chosen.source = source(empty_turn=35, duplicate=5), source(not_selected=90)
    lossy.prompt_rows, chosen.prompt_rows = 60, 10
    (found,) = texts(run_of(lossy, chosen))
    assert found == "look a: 40.0% of the source's rows became no prompt (empty_turn 35, duplicate 5)."


def test_columns_that_nobody_reads_and_how_answers_begin_are_named():
    one = dataset("chat", data_class="A")
    one.source = {
        "rows": 256,
        "kept": 256,
        "reasons": {},
        "answered": 256,
        "answers_begin_with": {"\n\n": 216, "Sure,": 30},
    }
    one.source["unused_columns"] = {
        "context": {"rows": 256, "characters": 256 * 400}, "category": {"rows": 256, "characters": 256 * 9}
    }  # fmt: skip
    found = [line for line in texts(run_of(one)) if "olumn" in line or "begins" in line]
    assert found == [
        "look chat: 84.4% of the source's own conversations (216) have an answer that begins with '\\n\\n'.",
        "note chat: Columns with text that nobody reads: context.",
    ]


def test_two_tokenizers_in_one_run_are_named():
    origin = OriginFact("tokenizer", None, must_agree=True)
    for value, place in (("aa", "target.json"), ("bb", "tokens/a/000"), ("bb", "tokens/a/001")):
        origin.add(value, place)
    (found,) = texts(run_of(dataset("a")), [origin])
    assert found == "wrong run: tokenizer differs within the run: aa (target.json); bb (tokens/a/000, tokens/a/001)."


def test_sums_that_contradict_each_other_are_named():
    (found,) = texts(run_of(dataset("a", validated(100, 200, samples=90, prompts=90, outcomes={"ok": 90}))))
    assert found == "wrong a: The numbers don't add up: samples with all changes make 90 passed, there are 100."


def test_drawings_take_colours_and_fonts_from_the_page():
    run = run_of(dataset("a", validated(100, 200)), dataset("b", validated(50, 90)))
    run.datasets["a"].answers.outcomes.update({"ok": 80, "length": 20})
    run.datasets["a"].answers.lengths = lengths([5, 70, 900])
    limits = plots.token_range(run)
    drawings = [plots.mean_answers(run), plots.outcomes(run), plots.lengths(run.datasets["a"], limits)]
    for svg in drawings:
        assert svg.startswith("<svg viewBox=")
        ElementTree.fromstring(svg.replace("xlink:href", "href"))
        assert "var(--" in svg
        assert "font-family" not in svg
        assert "<style" not in svg
        assert not any(colour in svg for colour in plots._COLOURS.values())
        assert "http" not in svg.replace("http://www.w3.org/", "")


def test_nothing_is_drawn_of_a_run_that_has_not_begun():
    run = run_of(dataset("a"))
    assert plots.mean_answers(run) is None
    assert plots.outcomes(run) is None
    assert plots.lengths(run.datasets["a"], plots.token_range(run)) is None
