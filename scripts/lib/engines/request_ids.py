"""Ids of requests, as engines echo them, log them and abort by them."""

import itertools
import re
import secrets

_PLACES = 12
OURS = re.compile(rf"[0-9a-f]{{32}}-\d{{4}}-\d{{{_PLACES}}}")


class RequestIds:
    """The ids of one job's requests: none comes twice, none is the beginning of another.

    A job that is started again within seconds asks an engine that still knows the ids of the one before, and SGLang
    refuses a duplicate (tokenizer_manager.py of 0.5.23); so each job counts from another number. SGLang aborts all
    requests whose ids begin with the one that is named (scheduler.py), so all are of one width.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(secrets.randbelow(9 * 10 ** (_PLACES - 1)))

    def make(self, work: str, part: int) -> str:
        """The id of the next request: for `part` of a piece of work, which is named by 32 hex digits."""
        return f"{work}-{part % 10_000:04d}-{next(self._numbers):0{_PLACES}d}"
