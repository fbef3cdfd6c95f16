"""What `vouching` keeps of a shard: its answers lie in the journal, in the order of their arrival."""

from pathlib import Path

from scripts.lib.client.vouching import Voided
from scripts.lib.completions.answers import ShardAnswers
from scripts.lib.completions.journal_records import Done
from scripts.lib.completions.progress import Meter
from scripts.lib.prompts.shard import prompt_ids


class ShardArrivals:
    """The journal's part in vouching; what is void is not counted any more either."""

    def __init__(self, answers: ShardAnswers, meter: Meter, prompts: Path) -> None:
        self._answers, self._meter, self._prompts = answers, meter, prompts

    @property
    def position(self) -> int:
        return self._answers.journal.position

    def prove(self, url: str, before: int) -> None:
        self._answers.prove(url, before)

    def void(self, url: str, since: int) -> Voided:
        return self._uncounted(*self._answers.void(url, since))

    def void_refusals(self, url: str, since: int) -> Voided:
        return self._uncounted(*self._answers.void_refusals(url, since))

    def _uncounted(self, ended: dict[str, Done], under_way: set[str]) -> Voided:
        for prompt_id in prompt_ids(self._prompts):  # others have left the shard, and are not counted
            if done := ended.get(prompt_id):
                self._meter.remove(done.outcome, done.input_tokens, done.output_tokens)
        return Voided(set(ended), under_way)
