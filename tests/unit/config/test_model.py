"""Configuration: every mistake is one line that names the key; settings reach exactly the stages that read them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.config import reference
from scripts.lib.config.file import load_config, overlay, parse_config
from scripts.lib.config.model import EXPORT_FORMATS, Config, Section
from scripts.lib.config.stage_settings import stage_settings
from scripts.lib.core.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
MINIMAL = {"datasets": {"a": {"class": "B", "source": "a.jsonl"}, "b": {"class": "A", "source": "b.jsonl"}}}


def changed(**sections):
    return parse_config(overlay(MINIMAL, sections), "test")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": {}}, "unknown key `modle`, did you mean `model`?"),
        ({"engine": {"launch": {"replica": 2}}}, "unknown key `engine.launch.replica`, did you mean `replicas`?"),
        ({"lanes": {"short": {"max_tokens": 8}}}, "key `lanes.short.concurrency` is missing"),
        ({"shards": 0}, "shards: Input should be greater than 0 (got 0)"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature: Input should be a valid number"),
        ({"datasets": {"a": {"class": "B"}}}, "datasets.a: needs `source` or `preset`"),
        ({"datasets": {"a/b": {"class": "B", "source": "x"}}}, "dataset name `a/b` may hold only letters"),
        (
            {"datasets": {"a": {"class": "B", "source": "x", "lane": "slow"}}},
            "datasets.a.lane: no lane `slow`; there are short, long",
        ),
        (
            {"datasets": {"a": {"class": "B", "source": "x", "truncation": "retry"}}},
            "truncation `retry` needs `truncation_max_tokens`",
        ),
        ({"engine": {"endpoints": ["http://.farm:80"]}}, "`http://.farm:80` is not the base URL of a server"),
        ({"engine": {"endpoints": ["http://al:S3CRET@farm/v1"]}}, "`farm/v1` comes with a user or a password"),
        ({"engine": {"endpoints": ["http://farm/ż"]}}, "`http://farm/ż` is not the base URL of a server"),
        ({"datasets": {}}, "needs at least one dataset"),
    ],
)
def test_mistakes_are_named(values, message):
    with pytest.raises(UserError) as error:
        parse_config({**MINIMAL, **values}, "my.yaml")
    assert message in str(error.value)
    assert str(error.value).startswith("my.yaml: ")
    assert "\n" not in str(error.value)


def test_broken_yaml_names_file_and_line(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("shards: 2\ndatasets: {a: [}\n")
    with pytest.raises(UserError, match=r"my\.yaml.*line 2"):
        load_config(path)
    with pytest.raises(UserError, match="no such config file"):
        load_config(tmp_path / "absent.yaml")


def test_later_files_overlay_earlier_ones(tmp_path):
    (tmp_path / "base.yaml").write_text("datasets: {a: {class: B, source: x}}\nsampling: {top_p: 0.5}\n")
    (tmp_path / "over.yaml").write_text("sampling: {temperature: 0.1}\n")
    loaded = load_config(tmp_path / "base.yaml", tmp_path / "over.yaml")
    assert (loaded.sampling.top_p, loaded.sampling.temperature) == (0.5, 0.1)


def test_dumped_config_loads_to_the_same(tmp_path):
    loaded = load_config(ROOT / "config/config.yaml")
    assert parse_config(loaded.model_dump(mode="json", by_alias=True), "dump") == loaded


STAGES = ("target", "prompts", "completions", "tokens", "validated", "training")


def stages_touched(**sections):
    before, after = parse_config(MINIMAL, "test"), changed(**sections)
    return {stage for stage in STAGES if stage_settings(before, stage, "a") != stage_settings(after, stage, "a")}


@pytest.mark.parametrize(
    ("sections", "stages"),
    [
        ({"engine": {"endpoints": ["http://127.0.0.1:1"], "launch": {"replicas": 4}}}, set()),
        ({"transport": {"attempts": 9}}, set()),
        ({"lanes": {"short": {"concurrency": 3, "max_tokens": 10240}}}, set()),
        ({"backup": {"keep": 9}, "upload": {"target": "s3://x/y"}}, set()),
        ({"sampling": {"temperature": 0.1}}, {"completions"}),
        ({"budget": {"tokens": 5}}, {"completions"}),
        ({"lanes": {"short": {"max_tokens": 64, "concurrency": 150}}}, {"prompts", "completions"}),
        ({"model": {"chat_template_kwargs": {"thinking": True}}}, {"target", "completions", "tokens"}),
        ({"selection": {"seed": 4}}, {"prompts"}),
        ({"validation": {"max_period": 9}}, {"validated"}),
        ({"merge": {"seed": 3}}, {"training"}),
        ({"datasets": {"a": {"class": "B", "source": "a.jsonl", "weight": 0.5}}}, {"training"}),
    ],
)
def test_an_edit_touches_exactly_the_stages_that_read_it(sections, stages):
    assert stages_touched(**sections) == stages


def sections(model):
    yield model
    for field in model.model_fields.values():
        inner, _ = reference._inner_section(field.annotation)
        if inner is not None:
            yield from sections(inner)


def test_every_section_refuses_unknown_keys():
    for section in sections(Config):
        assert issubclass(section, Section)
        assert section.model_config["extra"] == "forbid"


def test_the_workflow_names_every_export():
    from scripts.lib.exports import FORMATS

    differing = sorted(set(EXPORT_FORMATS) ^ set(FORMATS))
    assert not differing, f"in one of EXPORT_FORMATS (config/model.py) and FORMATS (exports/__init__.py): {differing}"


STALE = "stale: run `make schema`"


def test_schema_and_reference_are_current():
    """`make schema` writes both; a stale one misleads editors and readers."""
    import orjson

    written = orjson.loads((ROOT / "config/schema.json").read_bytes())
    assert written == orjson.loads(orjson.dumps(reference.schema())), STALE
    assert (ROOT / "docs/configuration.md").read_text() == reference.reference_text(Config), STALE


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_are_valid(path):
    assert load_config(path).datasets


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda x: st.dictionaries(st.text(max_size=8), x, max_size=4),
    )
)
def test_no_value_makes_the_parser_crash(value):
    try:
        parse_config({**MINIMAL, "engine": value}, "test")
    except UserError as error:
        assert "engine" in str(error)
