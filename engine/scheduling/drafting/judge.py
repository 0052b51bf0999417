"""How many draft tokens each request may get, so that speculative decoding pays.

A draft costs the time to find it, and what its tokens add to the step that verifies them. It saves one decode row for each
accepted token. `DraftJudge` measures both: a step's time as a line over its tokens, a draft model's time per token, and how
often drafts are accepted, for each request and for all. A request's draft grows while the probability that its next token is
accepted exceeds that token's cost, as a share of a row. A request for which no draft pays gets trials of one token, ever more
rarely, because its text may begin to repeat itself.

All drafts are paid from one account in seconds. It earns what accepted tokens saved, and an allowance: a share of the time
that decoding takes. While it is empty there are no drafts, so drafts never cost more than the allowance, whatever the texts.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from tandem.engine.request import DraftRecord, Request
from tandem.engine.scheduling.output import SchedulerOutput

ALWAYS = 1.0  # with this allowance drafts are never limited: every request gets the longest ones
# The factor by which older observations lose weight with each new one: for one request, and for all.
_FADES, _FADES_FOR_ALL = 0.9, 0.99
# In a request's estimate, the acceptance rate of all requests counts as much as this many of its own draft tokens.
_PRIOR = 2.0
_FIRST_SKIP, _LONGEST_SKIP = 4, 256  # steps between two trials
_LONGEST_PAUSE = 16  # steps between two searches that find nothing
_AT_FIRST, _MOST_SAVED = 8.0, 32.0  # the account's first balance and its limit, in decode steps
_ASSUMED_COST = 0.5  # a draft token's cost as a share of a row, until steps of different sizes were seen
_LEAST_SPREAD = 0.05  # the variance of the steps' sizes below which their times do not tell a token's cost


class _StepTimes:
    """Fits the seconds of a decode step as a line over the tokens that it computes, by weighted least squares."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        for name, value in (
            ("_weight", 1.0),
            ("_x", num_tokens),
            ("_y", seconds),
            ("_xx", num_tokens * num_tokens),
            ("_xy", num_tokens * seconds),
        ):
            setattr(self, name, getattr(self, name) * _FADES_FOR_ALL + value)

    def per_token(self) -> float:
        """The seconds that one more token adds, between 0 and the average per token."""
        if not self._weight:
            return 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        average = mean_y / mean_x
        spread = self._xx / self._weight - mean_x * mean_x
        if spread < _LEAST_SPREAD:
            return _ASSUMED_COST * average
        slope = (self._xy / self._weight - mean_x * mean_y) / spread
        return min(max(slope, 0.0), average)

    def step(self, num_tokens: int) -> float:
        if not self._weight:
            return 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        return max(mean_y + self.per_token() * (num_tokens - mean_x), 0.0)


class DraftJudge:
    """Limits drafts to those that pay. Only the step thread uses it."""

    def __init__(self, most: int, loss: float, *, computed_twice: bool = False) -> None:
        """`most` is the longest draft. `loss` is the allowance: the share of decode time that drafts may cost beyond what they
        save. `computed_twice` says that accepted tokens are computed again in the next step, as recurrent states need it."""
        self._most = most
        self._loss = loss
        self._computed_twice = computed_twice
        self._times = _StepTimes()
        self._all = DraftRecord()
        self._began = False
        self._saved = 0.0  # the account's balance, in seconds
        self._row = 0.0  # seconds of a decode step without drafts, per row
        self._cost = _ASSUMED_COST  # of verifying a draft token, as a share of a row
        self._guess_s = 0.0  # seconds that a draft model takes for a token

    def limits(self, step: SchedulerOutput, requests: Iterable[Request]) -> dict[str, int]:
        """Returns how long a draft each of `requests` may get after this step. Requests without an entry get none; that includes
        all that sample no token in this step."""
        if self._loss < ALWAYS and self._began and self._saved <= 0:
            return {}
        limits = {}
        for request in requests:
            room = request.length_limit - request.num_tokens - 1
            if request.num_computed_tokens >= request.num_tokens:
                limit = min(self._limit(request), room)
                if limit > 0:
                    limits[request.request_id] = limit
        return limits

    def _limit(self, request: Request) -> int:
        if self._loss >= ALWAYS:
            return self._most
        record = request.drafting
        if record is None:
            record = request.drafting = DraftRecord()
        if record.wait > 0:
            record.wait -= 1
            return 0
        return max(self._paying_length(self._chance(record)), 1)

    def _chance(self, record: DraftRecord) -> float:
        """The probability that a draft token is accepted if those before it were."""
        everyone = self._all
        prior = (everyone.right + 1) / (everyone.right + everyone.wrong + 2)
        return (record.right + _PRIOR * prior) / (record.right + record.wrong + _PRIOR)

    def _paying_length(self, chance: float) -> int:
        length, likely = 0, chance
        cost = self._cost + (self._guess_s / self._row if self._row else 0.0)
        while length < self._most and likely * self._saves > cost:
            length, likely = length + 1, likely * chance
        return length

    def settled(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        record = request.drafting
        if record is None:
            record = request.drafting = DraftRecord()
        for seen, fades in ((record, _FADES), (self._all, _FADES_FOR_ALL)):
            seen.right = seen.right * fades + num_accepted
            seen.wrong = seen.wrong * fades + (num_accepted < num_drafts)
        if num_accepted or self._paying_length(self._chance(record)):
            record.skip = 0
        else:
            record.wait = record.skip = min(max(2 * record.skip, _FIRST_SKIP), _LONGEST_SKIP)
        self._save(num_accepted * self._saves * self._row)

    @property
    def _saves(self) -> float:
        """What an accepted token saves, as a share of a row."""
        return 1.0 - self._cost if self._computed_twice else 1.0

    def took(self, step: SchedulerOutput, seconds: float) -> None:
        """Notes a step's time. Call it before the step's drafts are settled."""
        if seconds <= 0 or not step.num_scheduled_tokens:
            return
        num_drafts = sum(map(len, step.spec_token_ids.values()))
        forced = sum(len(step.spec_token_ids[request_id]) for request_id in step.forced_req_ids)
        if not step.num_prompt_tokens and not step.encoder_inputs:
            num_tokens = step.total_num_scheduled_tokens
            num_rows = num_tokens - num_drafts
            self._times.add(num_tokens, seconds)
            self._row = self._times.step(num_rows) / num_rows
            self._cost = min(self._times.per_token() / self._row, 1.0) if self._row else _ASSUMED_COST
            if not self._began:
                self._began, self._saved = True, _AT_FIRST * seconds
            self._save(self._loss * seconds)
        self._saved -= (num_drafts - forced) * self._cost * self._row

    def searched(
        self,
        limits: Mapping[str, int],
        found: Container[str],
        requests: Mapping[str, Request],
        seconds: float,
        guess_s: float = 0.0,
    ) -> None:
        """Notes a search for drafts: it took `seconds`, and each token takes a draft model `guess_s`. A request for which searches
        keep finding nothing is searched more rarely."""
        self._saved -= seconds
        if guess_s:
            self._guess_s = self._guess_s * _FADES + guess_s * (1 - _FADES) if self._guess_s else guess_s
        for request_id in limits:
            request = requests.get(request_id)
            if request is None or (record := request.drafting) is None:
                continue
            if request_id in found:
                record.in_vain = 0
            else:
                record.in_vain += 1
                record.wait = max(record.wait, min(record.in_vain // 4, _LONGEST_PAUSE))

    def _save(self, seconds: float) -> None:
        most = _MOST_SAVED * self._times.step(1)
        self._saved = min(self._saved + seconds, max(most, self._saved))
