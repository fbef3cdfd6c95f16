import json

import pytest

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.training.manifest import read_manifest
from tests.corpora import corpus


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("{", "not valid JSON"),
        ('{"schema_version": 99}', "has schema version 99, this code reads 2"),
        ('{"schema_version": 1}', "not a manifest of ours"),
        ('{"schema_version": 2, "version": 1e400}', "not (a manifest of ours|valid JSON)"),
        (
            '{"schema_version": 2, "totals": {"rows": 123456789012345678901234567890}}',
            "not (a manifest of ours|valid JSON)",
        ),
        ('{"schema_version": 2, "parts": ' + "[" * 5000, "not valid JSON"),
        ('{"schema_version": [2]}', "has schema version"),
        ('{"schema_version": true}', "not a manifest of ours"),
        ("\ufeff{}", "not valid JSON"),
        ("[]", "not a JSON object"),
    ],
)
def test_unreadable_manifests(tmp_path, text, message):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m: m["parts"][0].update(file="../victim.parquet"), "parts.0.file"),
        (lambda m: m["parts"][0].update(file="/etc/part-00000.parquet"), "parts.0.file"),
        (lambda m: m["parts"][0].update(file="part-00000.parquet/../../victim"), "parts.0.file"),
        (lambda m: m["parts"][0].update(file="part-00000.parquet\n"), "parts.0.file"),
        (lambda m: m["parts"][0].update(file="part-00000.parquet\x00"), "parts.0.file"),
        (lambda m: m["parts"][0].update(file="manifest.json"), "parts.0.file"),
        (lambda m: m["parts"][0].update(file=""), "parts.0.file"),
        (lambda m: m["parts"][0].update(file=["part-00000.parquet"]), "parts.0.file"),
        (lambda m: m["parts"].append(m["parts"][0]), "a part is named twice"),
        (lambda m: m.update(version="../../escaped"), "version"),
        (lambda m: m.update(version="."), "version"),
        (lambda m: m.update(version=""), "version"),
        (lambda m: m.update(version=7), "version"),
        (lambda m: m["parts"][0].update(rows=-1), "parts.0.rows"),
        (lambda m: m["parts"][0].update(rows="5"), "parts.0.rows"),
        (lambda m: m["parts"][0].update(bytes=1.5), "parts.0.bytes"),
        (lambda m: m["parts"][0].update(bytes=True), "parts.0.bytes"),
        (lambda m: m["parts"][0].update(sha256="0"), "parts.0.sha256"),
        (lambda m: m["parts"][0].update(more=1), "parts.0.more"),
        (lambda m: m.update(parts={}), "parts"),
        (lambda m: m.update(parts=[None]), "parts.0"),
        (lambda m: m.update(datasets=[]), "datasets"),
        (lambda m: m["datasets"].update(alpha={}), "datasets.alpha.read"),
        (lambda m: m["datasets"]["alpha"].update(dropped=[]), "datasets.alpha.dropped"),
        (lambda m: m["datasets"]["alpha"].update(funnel=[]), "datasets.alpha.funnel"),
        (lambda m: m["datasets"]["alpha"]["funnel"].pop("passed"), "datasets.alpha.funnel.passed"),
        (lambda m: m.update(settings=[]), "settings"),
        (lambda m: m.update(target=None), "target"),
        (lambda m: m.update(inputs=[[]]), "inputs.0"),
        (lambda m: m.update(totals={}), "totals.rows"),
        (lambda m: m.update(provenance={"x": 1}), "provenance.x"),
        (lambda m: m.update(added=1), "added"),
    ],
)
def test_odd_manifests_are_one_line_and_lead_nowhere(tmp_path, change, field):
    corpus(tmp_path)
    path = tmp_path / "training/manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    durable.write_json(path, manifest)
    with pytest.raises(UserError, match=rf"manifest\.json: not a manifest of ours: .*{field}") as raised:
        read_manifest(tmp_path / "training")
    assert "\n" not in str(raised.value)
