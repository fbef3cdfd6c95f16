"""Values of a reply. Any of them may be anything: a server is another program, and there may be a gateway before it."""

from typing import Any

import orjson

from scripts.lib.engines.base import Answer, Failure, Reply, Request
from scripts.lib.engines.encodings import unknown_encoding
from scripts.lib.engines.request_ids import OURS

_LARGEST_COUNT = 1 << 31  # no context is as long
_DIGITS = b"0123456789,"


def as_object(value: Any) -> dict[str, Any]:
    """A JSON object; an empty one where there is something else."""
    return value if isinstance(value, dict) else {}


def as_objects(value: Any) -> list[dict[str, Any]]:
    """The JSON objects of a list."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def as_text(value: Any) -> str | None:
    """A string, or None where there is something else."""
    return value if isinstance(value, str) else None


def as_count(value: Any) -> int | None:
    """A number of tokens or a token's id, or None where a server leaves it out or sends nonsense."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value < _LARGEST_COUNT else None


def read_ids(value: Any, needed: str) -> list[int] | Failure:
    """Token ids: whole numbers from 0. A server that sends no list at all does not send ids; `needed` says what would."""
    if not isinstance(value, list):
        return Failure("fatal", f"the server returns no token ids: {needed}")
    # A third of the time that looking at each of them takes: a list of anything else has other characters.
    try:
        whole_numbers = orjson.dumps(value).translate(None, _DIGITS) == b"[]"
    except TypeError:  # lists in lists in lists
        whole_numbers = False
    return value if whole_numbers else Failure("retry", f"the token ids are no numbers: {shown(value)}", billed=True)


def of_another(request: Request, echoed: Any) -> Failure | None:
    """The failure of a reply whose id is that of another request of ours: replies were mixed up on the way.

    Gateways may give ids of their own.
    """
    found = OURS.search(echoed) if isinstance(echoed, str) and echoed != request.id else None
    if found is None or found.group() == request.id:
        return None
    return Failure("retry", f"the answer to another request came ({found.group()})", billed=True)


def read_object(reply: Reply) -> dict | Failure:
    """The JSON object of a 200 reply; a Failure when it is something else, or holds an error.

    Leading blanks (keep-alive padding of proxies) are legal JSON; HTML and half bodies are not.
    """
    try:
        value = orjson.loads(reply.body)
    except orjson.JSONDecodeError:
        if unknown := unknown_encoding(reply.headers):
            reason = f"the endpoint sends bodies encoded as `{excerpt(unknown)}`, though identity was asked for"
            return Failure("fatal", reason, billed=True)
        return Failure("retry", f"HTTP 200 but not JSON: {excerpt(reply.body)}", billed=True)
    if not isinstance(value, dict):
        return Failure("retry", f"HTTP 200 but no JSON object: {excerpt(reply.body)}", billed=True)
    return value


def excerpt(body: bytes | str, length: int = 200) -> str:
    """The first characters of a body on one line, for messages: nothing in it steers a terminal."""
    body = body[: 8 * length]  # which may be hundreds of megabytes
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    text = "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))
    return text if len(text) <= length else text[: length - 1] + "…"


def shown(value: Any) -> str:
    """A value for messages."""
    if isinstance(value, list | str):
        value = value[:200]
    try:
        return excerpt(value if isinstance(value, str) else orjson.dumps(value))
    except TypeError:  # nested deeper than anybody reads
        return f"a deeply nested {type(value).__name__}"


def check_ids(request: Request, answer: Answer, echoed: Any = None) -> Answer | Failure:
    """Compare what the engine says of the ids with what was sent and came.

    Other prompt ids than ours mean another template or a second BOS: the whole run is wrong, not the
    sample (sglang PR 26555, vllm PR 55288). Where the ids are at hand, a wrong count of them is only a flag.
    """
    sent = request.prompt_ids
    if isinstance(echoed, list) and echoed != sent:
        at = next((i for i, (a, b) in enumerate(zip(echoed, sent)) if a != b), min(len(echoed), len(sent)))
        return Failure(
            "fatal",
            f"the engine used other prompt ids: from position {at} {shown(echoed[at : at + 5])}, sent were "
            f"{sent[at : at + 5]} ({len(echoed)} and {len(sent)} ids): its template or tokenizer is not the target's",
        )
    ids = answer.output_ids or []
    if len(ids) > request.max_tokens:
        reason = f"{len(ids)} ids for max_tokens {request.max_tokens}: the engine does not heed it"
        return Failure("permanent", reason, billed=True)
    got = len(ids)
    counts = answer.prompt_tokens in (None, len(sent)), answer.output_tokens in (None, got)
    if not counts[0] and echoed is None:
        return Failure("fatal", f"the engine counted {answer.prompt_tokens} prompt tokens, {len(sent)} were sent")
    if not all(counts):
        answer.flags.append("usage_mismatch")
    _end_at_stop(request, answer, ids)
    if answer.finish_reason == "length" and got < request.max_tokens:
        answer.flags.append("short_of_max_tokens")  # the engine has less room than we think (sglang PR 2956)
    return answer


def _end_at_stop(request: Request, answer: Answer, ids: list[int]) -> None:
    """Cut off what an engine's speculation wrote after the stop token (sglang issue 31599): the model had ended there."""
    if frozenset(request.stop_ids).isdisjoint(ids[:-1]):
        return
    end = min(ids.index(stop) for stop in request.stop_ids if stop in ids) + 1
    answer.output_ids, answer.finish_reason, answer.matched_stop = ids[:end], "stop", ids[end - 1]
    answer.flags.append("ids_after_stop")


def odd_stop(matched: Any) -> Failure | None:
    """The failure of an answer that ended at something that is no id.

    SGLang replaces a token that is no number, or outside the vocabulary, by the stop token, and says "NaN happened"
    (schedule_batch.py of 0.5.23). No stop text of ours is ever sent.
    """
    if matched is None or as_count(matched) is not None:
        return None
    reason = f"the engine stopped at {shown(matched)!r}, which is no token: its numbers are broken"
    return Failure("retry", reason, billed=True, most_attempts=2, odd=True)
