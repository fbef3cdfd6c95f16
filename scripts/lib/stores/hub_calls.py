"""Calls of the Hugging Face Hub: made again when it is busy, and what its refusals mean.

Downloads of files are made again by huggingface_hub itself; listings and commits are not (huggingface_hub issue 2425).
"""

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from scripts.lib.core.errors import UserError
from scripts.lib.core.waiting import TRANSIENT, Transient, again_when_transient, asked_to_wait

Result = TypeVar("Result")
TOKENS = "https://huggingface.co/settings/tokens"


def token() -> str | bool:
    """The token of the environment; False keeps huggingface_hub from using one that is stored on disk."""
    return os.environ.get("HF_TOKEN") or False


def call(act: Callable[[], Result], what: str) -> Result:
    """What a call returns, made again while the Hub is busy or can't be reached. Raises what the last one raised."""

    def attempt() -> Result:
        from huggingface_hub import errors

        try:
            return act()
        except (errors.HTTPError, ConnectionError, TimeoutError, errors.LocalEntryNotFoundError) as error:
            raise _transient(error) or error from None

    return again_when_transient(attempt, what)


def _transient(error: Exception) -> Transient | None:
    """The error as one of the moment, when it or what it was made of is one."""
    from huggingface_hub import errors

    response = _response(error)
    if response is not None:
        busy = response.status_code in TRANSIENT
        return Transient(error, asked_to_wait(response.headers, time.time())) if busy else None
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else error
    unreached = isinstance(cause, errors.HTTPError | ConnectionError | TimeoutError)
    return Transient(error) if unreached and not isinstance(cause, errors.OfflineModeIsEnabled) else None


def _response(error: BaseException | None) -> Any:
    """The Hub's reply that an error was made of; None when there was none."""
    while error is not None:
        if (response := getattr(error, "response", None)) is not None:
            return response
        error = error.__cause__
    return None


def refusal(error: Exception, what: str, revision: str | None) -> UserError:
    """What an error of the Hub means for the user, and what to do. `what`: the place and name of what was asked for."""
    response = _response(error)
    status = response.status_code if response is not None else None
    meaning = _meaning_of_kind(error, revision, bool(token()), status) or _meaning_of_status(status, bool(token()))
    text = " ".join(str(error).split())[:200] or type(error).__name__
    unreached = (
        f"can't be reached ({text}): run again to go on where it stopped, or set HF_HUB_OFFLINE=1 to use what is cached"
    )
    return UserError(f"{what}: {meaning or unreached}")


def _meaning_of_kind(error: Exception, revision: str | None, has_token: bool, status: int | None) -> str | None:
    from huggingface_hub import errors

    if status == 401 and has_token:
        # Without a token the Hub says 401 of what is missing, private or gated; with a good one it never does.
        return f"HF_TOKEN is refused (HTTP 401): make a new one at {TOKENS}, or unset it"
    if isinstance(error, errors.GatedRepoError):
        if has_token:
            return (
                "gated, and HF_TOKEN is refused: accept its terms on the Hub with the token's account; a fine-grained "
                f"token needs the right to read gated repositories ({TOKENS})"
            )
        return "gated: accept its terms on the Hub and set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"no revision {revision}"
    if isinstance(error, errors.RepositoryNotFoundError):
        if has_token:
            return "no such dataset, or one that HF_TOKEN may not read: check the name, and the token's rights"
        return "no such dataset, or a private one: check the name, or set HF_TOKEN"
    return "not a dataset's name" if isinstance(error, errors.HFValidationError) else None


def _meaning_of_status(status: int | None, has_token: bool) -> str | None:
    if status == 404:
        return "missing in the repository, though it lists it: name another `revision`, or tell its owner"
    if status in (401, 403):
        return f"HTTP {status}: {'HF_TOKEN may not read it' if has_token else 'set HF_TOKEN'}"
    return None
