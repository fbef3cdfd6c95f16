"""SGLang's `/generate` with `return_hidden_states`: what is asked, and a reply's numbers checked one by one.

Tried with 0.5.23 on the CPU: `max_new_tokens: 0` returns no states; with 1, `meta_info.hidden_states` is
a list of one list of rows, one row of JSON numbers per prompt token, the layers joined. The generated
token has no row and is thrown away.
"""

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from scripts.lib.config.model import Sampling
from scripts.lib.engines.base import Call, Failure, Reply, Request, post
from scripts.lib.engines.errors import error_in_200, read_error
from scripts.lib.engines.sglang import SGLang
from scripts.lib.engines.values import read_object
from scripts.lib.hidden_states.plan import DTYPE, Capture
from scripts.lib.hidden_states.tensor_file import NotBfloat16, to_bfloat16

INFO = Call("GET", "/server_info")
_STATES = re.compile(rb'"hidden_states":\s*\[\[\[')
_COMMA_TO_LINE = bytes.maketrans(b",", b"\n")
_ONE_COLUMN = pyarrow.csv.ReadOptions(column_names=["value"], use_threads=False, block_size=4 << 20)
_AS_NUMBERS = pyarrow.csv.ConvertOptions(column_types={"value": pa.float64()}, null_values=[])
_GREEDY = Sampling(temperature=0.0, top_p=1.0)


def states_request(name: str, input_ids: np.ndarray) -> Request:
    """One forward pass over a sample's ids."""
    return Request(id=name, prompt_ids=input_ids.tolist(), max_tokens=1, seed=0, sampling=_GREEDY)


def states_call(request: Request) -> Call:
    """The call that asks for the states of a request's prompt."""
    sampling = {"max_new_tokens": 1, "temperature": 0.0}
    body = {"input_ids": request.prompt_ids, "rid": request.id, "return_hidden_states": True}
    return post("/generate", body | {"sampling_params": sampling})


def read_states(
    adapter: SGLang, request: Request, width: int, sample: str, reply: Reply, now: float
) -> np.ndarray | Failure:
    """uint16 [tokens, width], the bits of bfloat16; or a Failure, which names the sample.

    Fatal is what would befall every sample: no states, another count of rows or numbers than asked for, numbers
    that bfloat16 doesn't hold.
    """
    if reply.status != 200:
        return read_error(reply.status, reply.headers, reply.body, now)
    found = _STATES.search(reply.body)
    if found is None:
        return _without_states(adapter, request, sample, reply, now)
    end = reply.body.find(b"]]]", found.end())
    # The rest is small, and the adapter knows how to read it.
    rest = reply.body[: found.start()] + b'"hidden_states":null' + reply.body[end + 3 :] if end >= 0 else b""
    answer = adapter.read(request, Reply(200, reply.headers, rest), now)
    if isinstance(answer, Failure):
        return answer
    rows = reply.body[found.end() : end].split(b"],[")
    return read_rows(rows, len(request.prompt_ids), width, sample)


def _without_states(adapter: SGLang, request: Request, sample: str, reply: Reply, now: float) -> Failure:
    body = read_object(reply)
    if isinstance(body, Failure):
        return body
    failure = error_in_200(body, reply, now) or adapter.read(request, reply, now)
    if isinstance(failure, Failure):
        return failure
    return Failure("fatal", f"sample {sample}: the answer holds no hidden states: is the server one that returns them?")


def read_rows(rows: list[bytes], tokens: int, width: int, sample: str) -> np.ndarray | Failure:
    """JSON arrays without their brackets, `1.0,2.0`, to uint16 [tokens, width]. Empties `rows` to save memory."""
    if len(rows) != tokens:
        return Failure(
            "fatal",
            f"sample {sample}: {len(rows)} rows of hidden states for {tokens} ids: rows of cached tokens or earlier "
            "chunks are missing: start the server with --disable-radix-cache --chunked-prefill-size -1",
        )
    for number, row in enumerate(rows):
        if (found := row.count(b",") + 1) != width:
            return Failure(
                "fatal",
                f"sample {sample}: row {number} of its hidden states has {found} numbers, {width} were to come: other "
                "layers or another model than asked for",
            )
        if b"n" in row or b"N" in row:  # null or NaN: JSON has no word for what is not finite
            reason = f"sample {sample}: row {number} of its hidden states is not finite"
            return Failure("retry", reason, most_attempts=2, billed=True)
    # One column of numbers: parsed without a Python object each, and mostly without the interpreter's lock.
    column = b",".join(rows)
    rows.clear()
    column = column.translate(_COMMA_TO_LINE)
    bits, done = np.empty(tokens * width, np.uint16), 0
    try:
        with pyarrow.csv.open_csv(pa.BufferReader(column), _ONE_COLUMN, convert_options=_AS_NUMBERS) as batches:
            for batch in batches:
                values = batch.column(0).to_numpy()
                bits[done : done + len(values)] = to_bfloat16(values)
                done += len(values)
        if done != len(bits):
            raise pa.ArrowInvalid(f"{done} numbers")
    except pa.ArrowInvalid:
        return Failure("retry", f"sample {sample}: its hidden states are not all numbers", billed=True)
    except NotBfloat16 as error:
        place = (done + error.index) // width
        return Failure(
            "fatal",
            f"sample {sample}: {error.value!r} in row {place} of its hidden states is no {DTYPE}: "
            "the server computes in another type: set engine.launch.dtype to bfloat16",
        )
    return bits.reshape(tokens, width)


def server_problem(info: Any, capture: Capture) -> str | None:
    """Why a server that runs already can't serve a capture, by its /server_info; None when it can."""
    if not isinstance(info, dict) or "version" not in info:
        return "its /server_info does not tell what it returns: is it SGLang, and not a router?"
    wanted = " ".join(
        f"--{name}" if value is True else f"--{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in capture.flags.items()
        if value is not None
    )
    layers = info.get("return_aux_hidden_state_layer_ids")
    captures = info.get("aux_hidden_state_capture") or info.get("enable_return_aux_hidden_states")
    if capture.name == "last":
        returns = info.get("enable_return_hidden_states") and not captures
    else:
        returns = captures and str(info.get("aux_hidden_state_capture", "eagle3")).lower() == "eagle3"
        returns = returns and list(layers or ()) == list(capture.sglang_layers)
    whole = info.get("disable_radix_cache") and info.get("chunked_prefill_size") == -1
    if returns and whole:
        return None
    return f"SGLang {info['version']} there was not started for this: it needs {wanted}"
