"""The money and tokens of one request, from their reservation to what it cost."""

from types import TracebackType

from scripts.lib.completions.budget import Account, Amount
from scripts.lib.completions.progress import Meter
from scripts.lib.engines.base import Answer, Failure, Request


def billed_tokens(request: Request, answer: Answer) -> tuple[int, int]:
    """(prompt, output) tokens of an answer as its endpoint counts them; our own count where it doesn't say."""
    output = len(answer.output_ids) if answer.output_ids is not None else answer.output_tokens or 0
    return answer.prompt_tokens if answer.prompt_tokens is not None else len(request.prompt_ids), output


class Payment:
    """Leaving it settles the reservation with what the request has used by then, however it ends."""

    def __init__(self, account: Account, meter: Meter, reserved: Amount) -> None:
        self.account, self.meter, self.reserved = account, meter, reserved
        self._used = Amount()

    def __enter__(self) -> "Payment":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.account.settle(self.reserved, self._used)
        self.meter.cost_usd += self._used.cost

    def sent(self) -> None:
        """From now on it may be billed, also when the job is stopped before the reply."""
        self._used = Amount(0, self.reserved.cost)

    def answered(self, request: Request, answer: Answer) -> None:
        """It cost what the answer says; `answer.cost_usd` is set by the configured prices where the API tells none."""
        prompt, output = billed_tokens(request, answer)
        if answer.cost_usd is None or answer.billed_elsewhere:
            answer.cost_usd = max(answer.cost_usd or 0.0, self.account.price(prompt, output))
        self._used = Amount(prompt + output, answer.cost_usd)

    def failed(self, failure: Failure) -> None:
        """It cost nothing, or all that was reserved where it may have been billed."""
        self._used = Amount(0, self.reserved.cost if failure.billed else 0.0)
