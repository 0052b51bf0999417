"""How long a request would wait, and which requests are refused for it at once, with the time to come back."""

from __future__ import annotations

import math

from tandem.base.errors import Overloaded
from tandem.router.dispatch.line import WaitingLine
from tandem.router.dispatch.reading import Readers
from tandem.router.dispatch.slots import Slots
from tandem.router.metrics import RouterMetrics
from tandem.router.policy.views import Average

MIN_RETRY_AFTER_S = 1
MAX_RETRY_AFTER_S = 60


class QueueFull(Overloaded):
    """A refusal with the time after which the client should try again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineOutOfReach(QueueFull):
    """The request's first token cannot come by when its client wants it."""

    code = "deadline_out_of_reach"


class ExpectedWait:
    def __init__(
        self,
        line: WaitingLine,
        readers: Readers,
        metrics: RouterMetrics,
        timeout_s: float,
        admit_within_s: float | None,
    ) -> None:
        self._line = line
        self._readers = readers
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._admit_within_s = admit_within_s
        self.between_ends = Average()
        self._last_end: float | None = None

    def on_end(self, count: int, now: float) -> None:
        """Places came back. The time between two ends says how fast the line moves, but only while there is a line."""
        if self._last_end is not None and self._line:
            self.between_ends.observe((now - self._last_end) / count)
        self._last_end = now if self._line else None

    def check(self, slots: Slots, now: float) -> None:
        """Raises QueueFull when the request would begin too late: its work would delay others and then be thrown
        away."""
        most = self._admit_within_s
        if most is None and slots.first_by is None:
            return
        tenant = slots.account.name
        at_nodes = self._readers.line_wait_s()
        if most is not None and (wait := at_nodes + self._in_line_s(tenant)) > most:
            self._metrics.refusals.inc("long_wait")
            raise QueueFull(
                f"a request would wait for about {wait:.1f} s before its prompt is read; router.admit_within is {most:g} s",
                _in_bounds(wait - most),
            )
        if slots.first_by is None:
            return
        # Only what is due before it stands before it.
        wait = at_nodes + self._in_line_s(tenant, self._line.before(slots))
        reading, left = self.reading_s(slots), slots.first_by - now
        if wait + reading > left:
            self._metrics.refusals.inc("deadline")
            raise DeadlineOutOfReach(
                f"its first token is expected in {wait + reading:.1f} s, of which {reading:.1f} s are for reading its prompt, "
                f"and its X-Tandem-Deadline leaves {max(0.0, left):.1f} s",
                _in_bounds(wait + reading - left),
            )

    def why_refused(self, tenant: str, count: int, at_once: int) -> str | None:
        """Why the line does not take `count` more sequences of the tenant, after `at_once` that got places."""
        shares = self._line.shares
        if not shares.fits(tenant, count):
            if shares.held + count > shares.limit:
                return f"{shares.held} sequences wait already, and no more than {shares.limit} may"
            return (
                f"{shares.of(tenant)} sequences of this key wait already, and more would leave other keys too little "
                f"of the line, where {shares.limit} may wait (router.limits.queued)"
            )
        wait = self._next_s(tenant)
        if at_once == 0 and wait > self._timeout_s:
            return f"{self._line.queued} sequences wait already, and this one would for about {wait:.0f} s"
        return None

    def reading_s(self, slots: Slots) -> float:
        return self._readers.reading_s(slots.uncached_tokens)

    def retry_after_s(self, tenant: str) -> int:
        """About how long the tenant's line takes, in whole seconds from MIN_RETRY_AFTER_S to
        MAX_RETRY_AFTER_S."""
        return _in_bounds(self._next_s(tenant))

    def _in_line_s(self, tenant: str, before: int | None = None) -> float:
        return self._next_s(tenant, before) if self._line else 0.0

    def _next_s(self, tenant: str, before: int | None = None) -> float:
        """How long the tenant's next sequence stands in line, behind `before` others of it, or, with None, all."""
        own = self._line.shares.of(tenant) if before is None else before
        tenants = len(self._line.tenants | {tenant})
        return min(self._line.queued + 1, (own + 1) * tenants) * (self.between_ends.value or 0.0)


def _in_bounds(retry_after_s: float) -> int:
    return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, math.ceil(retry_after_s)))
