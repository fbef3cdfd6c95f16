"""What is written is what is read, for every record, and the schema is the same on both sides."""

import dataclasses
import itertools

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.lib.config.file import parse_config
from scripts.lib.core import records
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import PROJECT
from scripts.lib.core.records import (
    OUTCOMES,
    POLICIES,
    SAMPLE_SCHEMA,
    SCHEMAS,
    Completion,
    Message,
    Prompt,
    Reject,
    Sample,
    Turn,
    batches,
    columns_of,
    in_schema,
    open_parquet,
    read_provenance,
    read_rows,
    write_rows,
)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=8)
mask = st.lists(st.integers(0, 1), max_size=8)
messages = st.lists(
    st.builds(Message, text, text, st.none() | text, st.none(), st.none() | text, st.none() | text, st.booleans()),
    max_size=3,
)
turns = st.lists(
    st.builds(
        Turn, ids, ids, text, text, st.none() | text, flags=st.lists(text, max_size=2), seconds=st.floats(0, 1e6)
    ),
    max_size=3,
)
KINDS = {
    Prompt: st.builds(
        Prompt, text, text, text, text, messages, st.none() | text, st.integers(0, 9), st.none() | ids, st.none() | mask
    ),
    Completion: st.builds(
        Completion, text, text, st.sampled_from(list(OUTCOMES)), st.none() | text, st.integers(1, 9), messages, turns
    ),
    Sample: st.builds(
        Sample, text, text, text, ids, mask, text, text, messages, st.none() | text, st.lists(text, max_size=2)
    ),
    Reject: st.builds(Reject, text, text, text, ids, mask, text, text, messages, check=text, detail=text),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_rows_survive_the_round_trip(kind, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")

    @settings(max_examples=25, deadline=None)
    @given(st.lists(KINDS[kind], max_size=5))
    def check(rows):
        assert write_rows(folder / "a.parquet", kind, rows, {"b": 1}) == len(rows)
        assert list(read_rows(folder / "a.parquet", kind)) == rows

    check()


@pytest.mark.parametrize("kind", SCHEMAS, ids=lambda kind: kind.__name__)
def test_every_field_has_its_column(kind):
    assert [field.name for field in dataclasses.fields(kind)] == SCHEMAS[kind].names


def test_equal_rows_give_equal_bytes_and_provenance_is_kept(tmp_path):
    rows = [Prompt("1", "d", "f:1", "k", [Message("user", "hé\u2028\U0001f600")])]
    for name in "ab":
        write_rows(tmp_path / name, Prompt, rows, {"z": 1, "a": {"b": [2]}})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert read_provenance(tmp_path / "a") == {"a": {"b": [2]}, "z": 1}


def earlier_file(path):
    """A file of samples of before messages had names and rows had template variables."""
    turns = pa.struct([(name, pa.string()) for name in ("role", "content", "reasoning", "tool_calls")])
    rows = [
        {
            "id": "1",
            "prompt_id": "1",
            "dataset": "d",
            "input_ids": [1, 2],
            "loss_mask": [0, 1],
            "ids_origin": "engine",
            "outcome": "ok",
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "reasoning": "h"}],
            "tools": None,
            "flags": ["a"],
        }
    ]
    schema = pa.schema(
        [
            pa.field(field.name, pa.list_(turns) if field.name == "messages" else field.type)
            for field in SAMPLE_SCHEMA
            if field.name != "template_kwargs"
        ]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return Sample(**{**rows[0], "messages": [Message("user", "Hi"), Message("assistant", "Ho", "h")]})


def test_files_of_before_a_column_was_are_read_as_if_nobody_had_given_it(tmp_path):
    sample = earlier_file(tmp_path / "a.parquet")
    assert list(read_rows(tmp_path / "a.parquet", Sample)) == [sample]
    with open_parquet(tmp_path / "a.parquet") as file:
        names = file.schema_arrow.names
        assert columns_of(Sample, file.schema_arrow) == names
        assert columns_of(Completion, file.schema_arrow) is None
        (batch,) = file.iter_batches()
    today = in_schema(batch, SAMPLE_SCHEMA)
    assert today.schema == SAMPLE_SCHEMA
    assert today.to_pylist()[0]["messages"][0] == {
        "role": "user",
        "content": "Hi",
        "reasoning": None,
        "tool_calls": None,
        "name": None,
        "tool_call_id": None,
        "trainable": True,
    }


def test_only_what_is_said_tells_turns_apart():
    """Else every row would lose the id under which it was answered."""
    assert Message("tool", "7", None, None).identity() == ["tool", "7", None, None]
    turns = [Message("tool", "7"), Message("tool", "7", tool_call_id="a"), Message("tool", "7", name="a")]
    turns += [Message("assistant", "7"), Message("assistant", "7", trainable=False)]
    assert len({str(turn.identity()) for turn in turns}) == len(turns)


def test_names_belong_to_the_turns_of_tools():
    assert Message("tool", "7", name="f", tool_call_id="c").for_template()["tool_call_id"] == "c"
    assert "name" not in Message("user", "7", name="Bob").for_template()


def test_rows_are_written_in_groups(tmp_path):
    rows = (Prompt(str(i), "d", "f", "k") for i in range(2500))
    assert write_rows(tmp_path / "a", Prompt, rows, {}) == 2500
    assert pq.ParquetFile(tmp_path / "a").num_row_groups == 3


def test_large_rows_are_written_and_read_few_at_a_time(tmp_path, monkeypatch):
    """The ids of an agent's trajectory are a million, and a thousand of those are no row group."""
    monkeypatch.setattr(records, "GROUP_BYTES", 1 << 20)
    monkeypatch.setattr(records, "_VALUES_AT_ONCE", 100_000)
    ids = list(range(100_000))
    rows = [Sample(str(n), "p", "d", ids, [1] * len(ids), "engine", "ok") for n in range(12)]
    assert write_rows(tmp_path / "a", Sample, iter(rows), {}) == 12
    with open_parquet(tmp_path / "a") as file:
        assert file.num_row_groups == 4  # of three rows, the first that are more than a megabyte
        assert {len(batch) for batch in batches(file)} == {1}
    assert list(read_rows(tmp_path / "a", Sample)) == rows


@pytest.mark.parametrize("where", [b"prompt number", b"source_of_it"], ids=["a page", "the names of columns"])
def test_files_that_are_damaged_inside_are_named_on_one_line(tmp_path, where):
    path = tmp_path / "a.parquet"
    table = pa.table({"id": [f"prompt number {i}" for i in range(50)], "source_of_it": ["f"] * 50})
    pq.write_table(table, path, compression="none", use_dictionary=False, store_schema=False)
    damaged = path.read_bytes()
    if where == b"source_of_it":  # stops being UTF-8
        damaged = damaged.replace(where, b"\xff" * len(where))
    else:  # the first text of the page gets another length
        at = damaged.index(where) - 4
        damaged = damaged[:at] + b"\xff" * 4 + damaged[at + 4 :]
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"a\.parquet: not a readable Parquet file \(.+\): delete it") as caught:
        list(open_parquet(path).iter_batches())
    assert "\n" not in str(caught.value)


def test_broken_files_are_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match=r"a\.parquet: not a readable Parquet file"):
        list(read_rows(tmp_path / "a.parquet", Prompt))
    with pytest.raises(UserError, match="no such file"):
        list(read_rows(tmp_path / "absent", Prompt))


def test_the_docs_name_each_outcome_once_and_say_whether_it_becomes_a_sample():
    """docs/architecture.md has the table of outcomes; what becomes a sample follows from the code's."""
    lines = (PROJECT / "docs" / "architecture.md").read_text().splitlines()
    begin = lines.index("| outcome | meaning | becomes a sample |") + 2
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in itertools.takewhile(bool, lines[begin:])]
    assert [name for name, _, _ in table] == [f"`{name}`" for name in OUTCOMES]
    for (_, meaning, sample), outcome in zip(table, OUTCOMES.values()):
        assert meaning
        assert sample.split(",")[0] == ("when kept" if outcome.policy else "yes" if outcome.answered else "no")


def test_an_outcome_is_one_thing_only():
    for outcome in OUTCOMES.values():
        assert outcome.generated + outcome.refused + outcome.resumable <= 1
        assert outcome.generated >= outcome.answered >= bool(outcome.policy)
    datasets = parse_config({"datasets": {"d": {"class": "B", "source": "x"}}}, "here").datasets
    assert all(hasattr(datasets["d"], policy) for policy in POLICIES.values())
