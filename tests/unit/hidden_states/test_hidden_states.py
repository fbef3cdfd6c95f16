"""Hidden states: sizes, exact bfloat16, what a reply must hold, files that survive a kill."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from scripts.lib.config.file import parse_config
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import PROJECT
from scripts.lib.engines.base import Failure, Reply
from scripts.lib.engines.launching import with_flags
from scripts.lib.engines.sglang import SGLang
from scripts.lib.hidden_states import choice, tensor_file, wire
from scripts.lib.hidden_states.plan import capturing, dry_run, make_plan, size_line
from scripts.lib.hidden_states.store import CorpusRow, StateFiles, file_name
from scripts.lib.hidden_states.tensor_file import Damaged, NotBfloat16, pack, to_bfloat16
from scripts.lib.training.reader import Corpus
from tests.corpora import corpus, rows_of

LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32}


@pytest.fixture
def configured(tmp_path):
    """`configured(hidden_states=..., ...)`: a configuration whose model is a folder with a config.json."""

    def made(model=LLAMA, kind="sglang", flags=None, **hidden_states):
        durable.write_json(tmp_path / "model/config.json", model)
        return parse_config(
            {
                "model": {"name": str(tmp_path / "model")},
                "engine": {"kind": kind, "launch": {"flags": flags or {}}},
                "datasets": {"a": {"class": "B", "source": "x"}},
                "hidden_states": hidden_states,
            },
            "test",
        )

    return made


# --- the plan ---


def test_usual_layers_of_eagle3(configured):
    plan = make_plan(configured())
    assert plan.layers == (2, 16, 29)
    layers, last = plan.captures
    assert (layers.tensor, layers.width, layers.sglang_layers) == ("aux_hidden_state", 3 * 4096, (1, 15, 28))
    assert (last.tensor, last.width) == ("hidden_state", 4096)
    assert plan.token_bytes == 4 * 4096 * 2 + 16
    line = size_line(plan, 1000, 2_000_000)
    assert "2, 16, 29 and the last of 32 layers" in line
    assert "32,784 bytes a token x 2,000,000 tokens of 1,000 samples = 65.57 GB, 65.57 MB a sample" in line


def test_layers_of_dflash_have_no_last_one_unless_asked_for(configured):
    plan = make_plan(configured(method="dflash", layers=[2, 10, 18]))
    assert [capture.tensor for capture in plan.captures] == ["hidden_states"]
    plan = make_plan(configured(method="dflash", layers=[2, 10, 18], last=True))
    assert [capture.tensor for capture in plan.captures] == ["hidden_states", "target_last_hidden_states"]


def test_sizes_inside_text_config_and_gguf(configured):
    inner = {"hidden_size": 5, "num_hidden_layers": 12}
    assert make_plan(configured(model={"model_type": "vl", "text_config": inner})).shape.hidden_size == 5
    config = parse_config({"engine": {"kind": "sglang"}, "datasets": {"a": {"class": "B", "source": "x"}}}, "test")
    assert make_plan(config).shape.hidden_size == 576  # the embedded GGUF
    assert make_plan(config).layers == (2, 15, 27)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "llamacpp"}, "engine.kind: hidden states come from `sglang`, not from `llamacpp`"),
        ({"layers": [2, 32]}, r"hidden_states.layers: \[2, 32\] are not ascending numbers from 1 to 31"),
        ({"model": {"hidden_size": 8, "num_hidden_layers": 5}}, r"hidden_states.layers: \[2, 2, 2\] are not ascending"),
        ({"model": {"hidden_size": 8}}, "config.json: does not tell num_hidden_layers"),
        ({"layers": [3, 2]}, "hidden_states.layers: must be ascending numbers from 1 on"),
        ({"layers": [0, 2]}, "hidden_states.layers: must be ascending numbers from 1 on"),
        ({"method": "dflash"}, "hidden_states: layers: method `dflash` has no usual ones"),
    ],
)
def test_impossible_plans_are_one_line(configured, settings, message):
    with pytest.raises(UserError, match=message) as error:
        make_plan(configured(**settings))
    assert "\n" not in str(error.value)


def test_flags_of_the_capture_win_over_the_users(configured):
    flags = {"chunked_prefill_size": 4096, "--speculative-draft-model-path": "draft", "max-total-tokens": 9}
    config = configured(flags=flags)
    plan = make_plan(config)
    aux, last = (with_flags([], {}, capturing(config, c).engine.launch.flags) for c in plan.captures)
    assert " ".join(aux) == (
        "--chunked-prefill-size -1 --max-total-tokens 9 --disable-radix-cache --enable-return-aux-hidden-states "
        "--speculative-algorithm EAGLE3 --return-aux-hidden-state-layer-ids 1 15 28"
    )
    assert " ".join(last) == (
        "--chunked-prefill-size -1 --max-total-tokens 9 --disable-radix-cache --enable-return-hidden-states"
    )


def test_what_numbers_depend_on_is_in_the_identity(configured):
    same = make_plan(configured(max_samples=3, seed=4)).identity
    assert make_plan(configured()).identity == same
    others = [{"layers": [2, 16, 28]}, {"last": False}, {"method": "dflash", "layers": [2, 16, 29], "last": True}]
    assert len({make_plan(configured(**one)).identity for one in others} | {same}) == 4


def test_dry_run_tells_the_size_or_why_not(configured, tmp_path):
    assert "there is no corpus yet" in dry_run(configured(), tmp_path / "training")
    manifest = corpus(tmp_path)
    tokens = manifest.totals["tokens"]
    assert f"x {tokens:,} tokens of 80 samples" in dry_run(configured(), tmp_path / "training")
    assert "x about" in dry_run(configured(fraction=0.5), tmp_path / "training")
    assert "of 7 samples" in dry_run(configured(max_samples=7), tmp_path / "training")
    assert "engine.kind" in dry_run(configured(kind="llamacpp"), tmp_path / "training")


# --- which samples ---


def test_the_whole_corpus_or_a_stable_part_of_it(configured, tmp_path):
    corpus(tmp_path)
    read = Corpus(tmp_path / "training")
    lengths = {row.id: len(row.input_ids) for row in rows_of(tmp_path / "training")}

    def chosen(**settings):
        return choice.choose(read, configured(**settings).hidden_states)

    assert chosen().tokens == lengths
    assert list(chosen().tokens) == list(lengths)
    assert chosen().longest == max(lengths.values())
    ten, twenty = chosen(max_samples=10).tokens, chosen(max_samples=20).tokens
    assert (len(ten), len(twenty)) == (10, 20)
    assert ten.items() < twenty.items() < lengths.items()
    half = chosen(fraction=0.5).tokens
    assert 20 < len(half) < 60
    assert twenty.items() < half.items()
    assert chosen(max_samples=10, seed=1).tokens.keys() != ten.keys()

    rows = list(choice.rows(read, ten))
    assert [row.id for row in rows] == list(ten)
    expected = {row.id: row for row in rows_of(tmp_path / "training")}
    for row in rows:
        assert row.input_ids.tolist() == expected[row.id].input_ids
        assert row.loss_mask.tolist() == expected[row.id].loss_mask


# --- bfloat16 ---


def widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits to float64."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def test_every_finite_bfloat16_comes_back():
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[np.isfinite(widened(bits))]
    assert len(bits) == (1 << 16) - 2 * 128
    assert np.array_equal(to_bfloat16(widened(bits)), bits)
    rows = bits.reshape(-1, 256)
    text = orjson.dumps(widened(rows).tolist()).removeprefix(b"[[").removesuffix(b"]]")
    assert np.array_equal(wire.read_rows(text.split(b"],["), len(rows), 256, "s"), rows)


near_bfloat16 = st.builds(
    lambda mantissa, exponent: mantissa * 2.0**exponent, st.integers(-600, 600), st.integers(-140, 130)
)


@given(st.one_of(st.floats(), st.floats(width=16), near_bfloat16))
def test_a_number_is_kept_exactly_or_refused(value):
    try:
        bits = to_bfloat16(np.array([value]))
    except NotBfloat16 as error:
        assert error.index == 0
        # Either not finite, or its float64 has more than the 8 bits of a bfloat16, or lies outside its range.
        mantissa, _ = np.frexp(value)
        fits = np.isfinite(value) and mantissa * 256 == int(mantissa * 256) and 2.0**-126 <= abs(value) < 2.0**128
        assert not fits
    else:
        assert widened(bits)[0].tobytes() == np.float64(value).tobytes()


# --- replies ---

WIDTH = 4


def reply(states, tokens=3, status=200, **meta):
    body = {
        "text": ' "hidden_states":[[[ ',
        "output_ids": [7],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 1},
            "prompt_tokens": tokens,
            "completion_tokens": 1,
            "hidden_states": states,
            **meta,
        },
    }
    return Reply(status, {}, orjson.dumps(body))


def read(answer, tokens=3):
    config = parse_config({"engine": {"kind": "sglang"}, "datasets": {"a": {"class": "B", "source": "x"}}}, "test")
    request = wire.states_request("r", np.arange(1, tokens + 1))
    return wire.read_states(SGLang(config), request, WIDTH, "s1", answer, 0.0)


GOOD = [[1.0, -2.5, 0.0, 3e-39 * 0], [-0.0, 2.0**-133, 22400.0, 1], [0.5, 0.25, 0.125, -7]]


def test_rows_become_bits_row_by_row():
    states = read(reply([GOOD]))
    assert states.shape == (3, WIDTH)
    assert states.dtype == np.uint16
    assert widened(states).tolist() == GOOD
    assert np.signbit(widened(states)[1, 0])
    assert widened(read(reply([[GOOD[0]]], tokens=1), tokens=1)).tolist() == [GOOD[0]]


def test_the_request_asks_for_one_token_and_all_states():
    call = wire.states_call(wire.states_request("r", np.array([5, 6], np.int32)))
    body = orjson.loads(call.body)
    assert (call.path, body["input_ids"], body["rid"]) == ("/generate", [5, 6], "r")
    assert body["return_hidden_states"] is True
    assert body["sampling_params"]["max_new_tokens"] == 1


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        (reply([GOOD[:2]]), "fatal", "sample s1: 2 rows of hidden states for 3 ids: .*--disable-radix-cache"),
        (reply([[row[:3] for row in GOOD]]), "fatal", "sample s1: row 0 of its hidden states has 3 numbers, 4 were"),
        (reply([[GOOD[0], GOOD[1], GOOD[2] + [1.0]]]), "fatal", "sample s1: row 2 .* has 5 numbers"),
        (reply([[GOOD[0], [1.0, 0.1, 2.0, 3.0], GOOD[2]]]), "fatal", "sample s1: 0.1 in row 1 .* is no bfloat16"),
        (reply([[GOOD[0], [1.0, 1 + 2**-9, 2.0, 3.0], GOOD[2]]]), "fatal", "in row 1 .* set engine.launch.dtype"),
        (reply([[GOOD[0], [1.0, 1e300, 2.0, 3.0], GOOD[2]]]), "fatal", r"1e\+300 in row 1"),
        (reply([[GOOD[0], [1.0, float("nan"), 2.0, 3.0], GOOD[2]]]), "retry", "sample s1: row 1 .* is not finite"),
        (reply([[GOOD[0], [1.0, float("inf"), 2.0, 3.0], GOOD[2]]]), "retry", "sample s1: row 1 .* is not finite"),
        (reply([[GOOD[0], [1.0, "x", 2.0, 3.0], GOOD[2]]]), "retry", "sample s1: its hidden states are not all numbers"),
        (reply([GOOD, GOOD]), "fatal", "sample s1: "),
        (reply(None), "fatal", "sample s1: the answer holds no hidden states"),
        (reply([]), "fatal", "sample s1: the answer holds no hidden states"),
        (reply([GOOD], prompt_tokens=4), "fatal", "counted 4 prompt tokens, 3 were sent"),
        (reply([GOOD], finish_reason={"type": "abort", "message": "gone"}), "retry", "aborted by the engine: gone"),
        (reply([GOOD], id=f"{'0' * 32}-0003-000000000001"), "retry", "the answer to another request came"),
        (Reply(200, {}, reply([GOOD]).body[:-40]), "retry", "HTTP 200 but not JSON"),
        (Reply(200, {}, b"<html>"), "retry", "HTTP 200 but not JSON"),
        (Reply(200, {}, b'{"error": {"message": "x", "code": 429}}'), "throttle", "429"),
        (Reply(400, {}, b'{"error":{"message":"Input length (9 tokens) exceeds the maximum allowed length"}}'), "permanent", "exceeds"),
        (Reply(503, {}, b""), "throttle", "503"),
    ],
)  # fmt: skip
def test_replies_that_are_refused(answer, kind, reason):
    failure = read(answer)
    assert isinstance(failure, Failure)
    assert failure.kind == kind
    assert re.search(reason, failure.reason), failure.reason


INFO = {
    "version": "0.5.23",
    "disable_radix_cache": True,
    "chunked_prefill_size": -1,
    "aux_hidden_state_capture": "eagle3",
    "enable_return_aux_hidden_states": True,
    "enable_return_hidden_states": False,
    "return_aux_hidden_state_layer_ids": [1, 15, 28],
}
LAST = INFO | {
    "aux_hidden_state_capture": None,
    "enable_return_aux_hidden_states": False,
    "enable_return_hidden_states": True,
    "return_aux_hidden_state_layer_ids": None,
}


def test_servers_that_run_already_are_known_by_their_flags(configured):
    layers, last = make_plan(configured()).captures
    assert wire.server_problem(INFO, layers) is None
    assert wire.server_problem(LAST, last) is None
    wrong = [
        LAST,
        INFO | {"return_aux_hidden_state_layer_ids": [2, 16, 29]},
        INFO | {"return_aux_hidden_state_layer_ids": None},
        INFO | {"disable_radix_cache": False},
        INFO | {"chunked_prefill_size": 8192},
        INFO | {"aux_hidden_state_capture": "dflash"},
        INFO | {"aux_hidden_state_capture": None, "enable_return_aux_hidden_states": False},
    ]
    for info in wrong:
        assert "--return-aux-hidden-state-layer-ids 1 15 28" in wire.server_problem(info, layers)
    for info in (INFO, LAST | {"enable_return_hidden_states": False}, LAST | {"chunked_prefill_size": 8192}):
        problem = wire.server_problem(info, last)
        assert "--enable-return-hidden-states" in problem
        assert "None" not in problem
    assert "is it SGLang" in wire.server_problem(None, last)


# --- files ---


def states(seed, tokens, width):
    return np.random.default_rng(seed).integers(0, 0x7F00, (tokens, width), dtype=np.uint16)


def row(name="a" * 32, tokens=5):
    return CorpusRow(name, np.arange(tokens, dtype=np.int32), np.ones(tokens, np.int8))


def full(plan, one, seed=0):
    return {c.tensor: states(seed, len(one.input_ids), c.width) for c in plan.captures}


@pytest.fixture
def small(configured):
    return make_plan(configured(model={"hidden_size": 6, "num_hidden_layers": 12}))


@pytest.fixture
def store(small, tmp_path):
    return StateFiles(tmp_path / "states", small)


def test_files_are_what_safetensors_reads(store, small):
    one = row("b" * 32 + "/1", tokens=3)
    kept = full(small, one)
    stored = store.write(one, kept, "sglang 1")
    assert stored.file == f"data/bb/{'b' * 32}-1.safetensors"
    path = store.folder / stored.file
    assert (stored.bytes, stored.sha256) == (path.stat().st_size, durable.sha256_file(path))
    with safe_open(path, "np") as file:
        assert file.metadata()["id"] == one.id
        assert file.get_tensor("input_ids").tolist() == [0, 1, 2]
        assert file.get_tensor("loss_mask").dtype == np.int64
        for capture in small.captures:
            assert file.get_slice(capture.tensor).get_dtype() == "BF16"
            assert file.get_slice(capture.tensor).get_shape() == [3, capture.width]
    back, _ = tensor_file.read(path)
    assert all(np.array_equal(back.tensors[name], tensor) for name, tensor in kept.items())


@pytest.mark.parametrize("sample", ["plain", "a/b", "../../etc", "é" * 300, "A" * 32, "c" * 32 + "/x"])
def test_ids_of_other_corpora_get_safe_names(sample):
    name = file_name(sample)
    assert re.fullmatch(r"([0-9a-f]{2})/\1[0-9a-f]{30}\.safetensors", name)


def test_names_of_different_samples_differ():
    ids = ["a" * 32, "a" * 32 + "/0", "a" * 32 + "/1", "a" * 32 + "-0", "b" * 32]
    assert len({file_name(sample) for sample in ids}) == len(ids)


def test_what_is_there_and_whole_is_found_and_nothing_else(store, small, configured):
    one = row()
    assert store.find(one) is None
    stored = store.write(one, full(small, one), "sglang 1")
    assert store.find(one) == stored
    changed = CorpusRow(one.id, one.input_ids, one.loss_mask.copy())
    changed.loss_mask[0] = 0
    assert store.find(changed) is None
    assert store.find(CorpusRow(one.id, one.input_ids + 1, one.loss_mask)) is None
    other = make_plan(configured(model={"hidden_size": 6, "num_hidden_layers": 12}, layers=[2, 6, 8]))
    assert StateFiles(store.folder, other).find(one) is None


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "foreign", "header"])
def test_damaged_files_are_not_found(store, small, harm):
    one = row()
    path = store.folder / store.write(one, full(small, one), "sglang 1").file
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[-1] ^= 1
    path.write_bytes(
        {"cut": data[:-3], "flip": data, "empty": b"", "foreign": b"\xff" * 64, "header": b"\x08" + b"\0" * 7 + b"[1,2,3,4"}[harm]
    )  # fmt: skip
    assert store.find(one) is None
    with pytest.raises(Damaged):
        tensor_file.read(path)


def test_a_file_is_a_part_until_all_captures_are_there(store, small):
    one = row()
    layers, last = small.captures
    both = full(small, one)
    assert store.write(one, {layers.tensor: both[layers.tensor]}, "sglang 1") is None
    assert store.find(one) is None
    assert not store.data.exists()
    part = store.part(one)
    assert np.array_equal(part[layers.tensor], both[layers.tensor])
    assert store.part(CorpusRow(one.id, one.input_ids + 1, one.loss_mask)) == {}
    stored = store.write(one, {**part, last.tensor: both[last.tensor]}, "sglang 1")
    assert store.find(one) == stored
    assert store.part(one) == {}


def test_a_distrusted_capture_is_dropped_and_the_other_stays(store, small):
    one = row()
    layers, last = small.captures
    both = full(small, one)
    store.write(one, both, "sglang 1")
    store.forget(one.id, last.tensor)
    assert store.find(one) is None
    assert store.part(one).keys() == {layers.tensor}
    assert np.array_equal(store.part(one)[layers.tensor], both[layers.tensor])
    store.forget(one.id, layers.tensor)
    assert store.part(one) == {}
    store.forget("nobody", last.tensor)


def test_samples_that_are_not_chosen_are_set_aside_and_taken_back(store, small):
    kept, left = row("a" * 32), row("b" * 32)
    stored = {one.id: store.write(one, full(small, one), "sglang 1") for one in (kept, left)}
    (store.data / "aa/.x.safetensors.1.partial").write_bytes(b"half")
    assert store.tidy({file_name(kept.id)}) == 1
    assert [path.name for path in store.data.rglob("*.*")] == [f"{kept.id}.safetensors"]
    assert store.tidy({file_name(kept.id)}) == 0
    assert store.find(left) == stored[left.id]
    assert (store.folder / stored[left.id].file).exists()


WRITER = """
import sys
import numpy as np
from pathlib import Path
from scripts.lib.config.file import load_config
from scripts.lib.hidden_states.plan import make_plan
from scripts.lib.hidden_states.store import CorpusRow, StateFiles
plan = make_plan(load_config(sys.argv[1]))
store = StateFiles(Path(sys.argv[2]), plan)
for number in range(1000000):
    tokens = 1 + number % 400
    one = CorpusRow(f"{number:032x}", np.arange(tokens, dtype=np.int32), np.ones(tokens, np.int8))
    states = {c.tensor: np.full((tokens, c.width), number % 999, np.uint16) for c in plan.captures}
    store.write(one, states, "sglang 1")
    print(number, flush=True)
"""


@pytest.mark.parametrize("after", [1, 7, 40])
def test_killed_while_writing_leaves_only_whole_files(configured, tmp_path, after):
    config = configured(model={"hidden_size": 256, "num_hidden_layers": 12})
    durable.write_json(tmp_path / "config.json", config.model_dump(mode="json", by_alias=True))
    arguments = [sys.executable, "-c", WRITER, str(tmp_path / "config.json"), str(tmp_path / "states")]
    writer = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=PROJECT)
    assert writer.stdout is not None
    for _ in range(after):
        writer.stdout.readline()
    os.kill(writer.pid, signal.SIGKILL)
    said = [int(line) for line in writer.stdout.read().split()]
    writer.wait()
    writer.stdout.close()
    store = StateFiles(tmp_path / "states", make_plan(config))
    store.tidy({f"{number:032x}"[:2] + f"/{number:032x}.safetensors" for number in range(10_000)})
    assert not list(store.folder.rglob("*.partial"))
    files = sorted(store.data.rglob("*.safetensors"))
    assert len(files) >= max([after - 1, *said]) + 1
    for number in range(len(files)):
        tokens = 1 + number % 400
        one = CorpusRow(f"{number:032x}", np.arange(tokens, dtype=np.int32), np.ones(tokens, np.int8))
        assert store.find(one), number


def test_pack_pads_its_header_and_keeps_every_byte(tmp_path):
    for length in range(1, 9):
        path = tmp_path / f"{length}.safetensors"
        tensor = states(length, length, 3)
        path.write_bytes(b"".join(pack({"x": tensor, "ids": np.arange(length)}, {"id": "y" * length})))
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
        with safe_open(path, "np") as file:
            assert file.get_tensor("ids").tolist() == list(range(length))
        assert np.array_equal(tensor_file.read(path)[0].tensors["x"], tensor)
