"""Which rows of a base corpus may enter: the checks of validation that need nothing but ids and masks.

Rows of a base are ready tokens, whoever made them, so they are refused for what makes tokens unusable, under the
names that validation has for it (`validated.gates`), and counted. They are checked by the column: a base is often
larger than all that the run made.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scripts.lib.completions.outcomes import repeating_tail
from scripts.lib.config.model import Validation
from scripts.lib.core.errors import UserError

# What no shard of ours can hold, so validation has no name for it.
NULL = "null"  # ids, a mask, an id, a message or a flag are null
NO_JSON = "no_json"  # tools or template variables aren't what they say
_INT32 = np.iinfo(np.int32)
_STOPS = 16  # stop tokens that may stand at the end of an answer


@dataclass(frozen=True, slots=True)
class Limits:
    """What the checks compare with. What is None is not known, and not checked."""

    vocab_size: int | None = None
    max_length: int | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    min_supervised_tokens: int = 1
    adjacent_supervised_tokens: bool = True
    max_period: int = 64
    max_repeats: int = 16

    def as_settings(self) -> dict[str, Any]:
        """For the manifest: the corpus depends on them."""
        return asdict(self) | {"eos_ids": list(self.eos_ids)}


def limits_of(settings: Validation, target: dict[str, Any], facts: dict[str, Any] | None) -> Limits:
    """`target`: provenance of the shards; `facts`: those of its folder, None when it isn't there."""
    facts = facts or {}
    return Limits(
        vocab_size=target.get("vocab_size"),
        max_length=settings.max_length or facts.get("context_length"),
        bos_id=facts.get("bos_id"),
        eos_ids=tuple(sorted(facts.get("eos_ids", ()))),
        min_supervised_tokens=settings.min_supervised_tokens,
        adjacent_supervised_tokens=settings.adjacent_supervised_tokens,
        max_period=settings.max_period,
        max_repeats=settings.max_repeats,
    )


class Tokens:
    """The ids and masks of a batch, one row after the other, and what the checks need to know of each row.

    `lengths` and `mask_lengths` are 0 for null rows. `spans` are the supervised stretches: their row, and where they
    begin and end in `mask`.
    """

    def __init__(self, input_ids: pa.ListArray, loss_mask: pa.ListArray) -> None:
        """The lists hold integers."""
        self.null = pc.or_(pc.is_null(input_ids), pc.is_null(loss_mask)).to_numpy(zero_copy_only=False)
        self.ids, self.lengths, null_ids = _flat(input_ids)
        self.mask, self.mask_lengths, null_mask = _flat(loss_mask)
        self.null |= (rows_with(null_ids, self.lengths) > 0) | (rows_with(null_mask, self.mask_lengths) > 0)
        self.supervised = _sums(self.mask, self.mask_lengths)
        self.spans = self._spans()
        self._shift = _starts(self.lengths) - _starts(self.mask_lengths)

    def _spans(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        on = self.mask == 1
        ends = np.cumsum(self.mask_lengths)
        bounds = np.unique(np.concatenate(([0], ends)))  # of rows that aren't empty
        opens, closes = on.copy(), on.copy()
        opens[1:] &= ~on[:-1]
        closes[:-1] &= ~on[1:]
        opens[bounds[:-1]] = on[bounds[:-1]]
        closes[bounds[1:] - 1] = on[bounds[1:] - 1]
        start, stop = np.flatnonzero(opens), np.flatnonzero(closes) + 1
        return np.searchsorted(ends, start, side="right"), start, stop

    def span_ids(self, row: int, start: int, stop: int, most: int) -> list[int]:
        """The last ids of a supervised stretch of a row whose mask is as long as its ids."""
        return self.ids[max(start, stop - most) + self._shift[row] : stop + self._shift[row]].tolist()


def _flat(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values with nulls as -1, values per row, places of nulls."""
    values = pc.list_flatten(column)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    if not values.null_count:
        return values.to_numpy(), lengths, np.zeros(0, np.int64)
    null = np.flatnonzero(pc.is_null(values).to_numpy(zero_copy_only=False))
    return pc.fill_null(values, -1).to_numpy(), lengths, null


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths) - lengths


def _sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The sum of each row's values."""
    found = np.zeros(len(lengths), np.int64)
    filled = lengths > 0  # reduceat gives a neighbour's value for an empty stretch
    if filled.any():
        found[filled] = np.add.reduceat(values, _starts(lengths)[filled], dtype=np.int64)
    return found


def rows_with(places: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """How many of these places in the flattened values lie in each row."""
    return np.bincount(np.searchsorted(np.cumsum(lengths), places, side="right"), minlength=len(lengths))


def _outside(values: np.ndarray, limit: int, lengths: np.ndarray) -> np.ndarray:
    """Rows that hold a value outside of [0, limit)."""
    if not len(values) or (values.min() >= 0 and values.max() < limit):
        return np.zeros(len(lengths), bool)
    return rows_with(np.flatnonzero((values < 0) | (values >= limit)), lengths) > 0


class BaseGates:
    """Refuses rows batch by batch and counts them.

    `refused[dataset, check]` are rows, `examples[check]` the first of them: where, and what the check saw.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.rows = 0
        self.refused: Counter[tuple[str, str]] = Counter()
        self.examples: dict[str, str] = {}

    def keep(
        self, tokens: Tokens, names: list[str], where: Callable[[int], str], unfit: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Which rows of a batch may enter. `names`: their datasets; `unfit`: which rows are NULL or NO_JSON."""
        self.rows += len(names)
        keep = np.ones(len(names), bool)
        for check, fails, detail in self._checks(tokens, unfit):
            for row in np.flatnonzero(fails() & keep).tolist():
                keep[row] = False
                self.refused[names[row], check] += 1
                self.examples.setdefault(check, f"{where(row)}: {detail(row)}")
        for row, loop in self._loops(tokens, keep):
            keep[row] = False
            self.refused[names[row], "repetition"] += 1
            self.examples.setdefault("repetition", f"{where(row)}: {loop}")
        return keep

    def _checks(
        self, tokens: Tokens, unfit: dict[str, np.ndarray]
    ) -> Iterator[tuple[str, Callable[[], np.ndarray], Callable[[int], str]]]:
        """(name, rows that fail, what is wrong with a row), in validation's order: a row counts for the first."""
        limits, lengths, sums = self.limits, tokens.lengths, tokens.supervised
        odd_mask = _outside(tokens.mask, 2, tokens.mask_lengths)
        vocab_size = limits.vocab_size or _INT32.max
        no_row = np.zeros(len(lengths), bool)
        yield NULL, lambda: tokens.null | unfit.get(NULL, no_row), lambda row: "holds a null where a sample has none"
        yield NO_JSON, lambda: unfit.get(NO_JSON, no_row), lambda row: "its tools or template_kwargs are no JSON"
        yield (
            "lengths",
            lambda: (lengths == 0) | (lengths != tokens.mask_lengths) | odd_mask,
            lambda row: (
                "the mask holds other values than 0 and 1"
                if odd_mask[row]
                else f"{lengths[row]} ids, {tokens.mask_lengths[row]} mask values"
            ),
        )
        yield (
            "id_range",
            lambda: _outside(tokens.ids, vocab_size, lengths),
            lambda row: f"holds an id outside of 0 to {vocab_size - 1}",
        )
        yield (
            "max_length",
            lambda: lengths > (limits.max_length or np.inf),
            lambda row: f"{lengths[row]} tokens of at most {limits.max_length}",
        )
        yield "no_supervised_tokens", lambda: sums == 0, lambda row: "the mask is all zeros"
        yield "all_supervised", lambda: sums == lengths, lambda row: "the mask is all ones"
        yield (
            "min_supervised_tokens",
            lambda: sums < limits.min_supervised_tokens,
            lambda row: f"{sums[row]} supervised tokens of at least {limits.min_supervised_tokens}",
        )
        if limits.adjacent_supervised_tokens:
            of_row, start, stop = tokens.spans
            pairs = of_row[stop - start > 1]
            yield (
                "adjacent_supervised_tokens",
                lambda: ~np.isin(np.arange(len(lengths)), pairs),
                lambda row: "no two supervised tokens stand side by side",
            )
        if limits.bos_id is not None:
            count = rows_with(np.flatnonzero(tokens.ids == limits.bos_id), lengths)
            yield "bos", lambda: count > 1, lambda row: f"{count[row]} BOS tokens"

    def _loops(self, tokens: Tokens, keep: np.ndarray) -> Iterator[tuple[int, str]]:
        """(row, what it ends with) of rows with an answer that ends in a loop, once each."""
        last = -1
        for row, start, stop in zip(*(numbers.tolist() for numbers in tokens.spans)):
            if keep[row] and row != last and (found := self._loop(tokens, row, start, stop)):
                last = row
                yield row, f"an answer ends with at least {found[1]} repeats of {found[0]} ids"

    def _loop(self, tokens: Tokens, row: int, start: int, stop: int) -> tuple[int, int] | None:
        period, repeats = self.limits.max_period, self.limits.max_repeats
        # What repeats often also repeats once: a look at the very end spares most answers the longer one.
        for most, needed in ((2 * period, 2), (period * repeats, repeats)):
            tail = tokens.span_ids(row, start, stop, most + _STOPS)
            while tail and tail[-1] in self.limits.eos_ids:
                tail.pop()
            found = repeating_tail(tail, period, needed)
            if not found:
                return None
        return found

    def counts(self) -> list[tuple[str, int]]:
        """Rows refused by each check, the most first."""
        found: Counter[str] = Counter()
        for (_, check), number in self.refused.items():
            found[check] += number
        return found.most_common()

    def lines(self) -> Iterator[str]:
        """The same for people, with an example each."""
        for check, number in self.counts():
            yield f"{check} {number} ({self.examples[check]})"

    def require_few(self, most: float) -> None:
        """Raise UserError when more than the share `most` of all rows was refused."""
        refused = self.refused.total()
        if refused > most * self.rows:
            raise UserError(
                f"merge.base: {refused} of {self.rows} rows ({refused / self.rows:.1%}) are refused: "
                f"{'; '.join(self.lines())}: more than validation.max_reject_rate {most:.0%}: mend them, raise it, "
                "or leave the base out"
            )
