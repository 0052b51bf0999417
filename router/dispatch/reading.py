"""How several tenants share the reading of prompts: no more of it is sent to nodes in advance than a tenant that comes may
wait for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from tandem.router.dispatch.giving_way import take_back_prompts
from tandem.router.dispatch.slots import Slots
from tandem.router.dispatch.tenants import TenantAccounts

AHEAD_S = 0.5
BETWEEN_LOOKS_S = 0.25  # at what was computed, and at how fast nodes read


class Readers(Protocol):
    """How fast nodes read prompts. All are 0 while that is not measured."""

    def line_wait_s(self) -> float:
        """How long a prompt that arrives now waits on a node before it is begun."""
        return 0.0

    def read_tokens_per_s(self) -> float:
        """How many tokens all nodes together read."""
        return 0.0

    def reading_s(self, tokens: float) -> float:
        """How long one node reads so many tokens."""
        return 0.0


class NoReaders(Readers):
    """Nothing is known of any node."""


class ReadingShares:
    def __init__(self, accounts: TenantAccounts, readers: Readers, clock: Callable[[], float]) -> None:
        self._accounts = accounts
        self._readers = readers
        self._clock = clock
        self._most_unread = 0.0  # the tokens that nodes read in AHEAD_S; 0: not measured
        self._looked_at = -math.inf

    @property
    def holds_back(self) -> bool:
        """Whether prompts may have to wait here. Not those of a tenant alone, and not before it is known how fast nodes
        read."""
        return self._most_unread > 0.0 and self._accounts.are_several

    def are_full(self, promised: int) -> bool:
        """Whether several tenants want to be read, and each node has enough for AHEAD_S. A node with less gets a prompt,
        however much the others have. One at a time, so that they come to nodes in the order of their turns: what is `promised`
        is in no node's line yet."""
        if not self._accounts.are_several:
            return False
        self.look()
        if not self.holds_back:
            return False
        unread = self._accounts.unread_tokens
        return promised > 0 or (unread > self._most_unread and self._readers.line_wait_s() > AHEAD_S)

    def may_go(self, slots: Slots) -> bool:
        """Whether the prompt of the tenant that has had least may be sent although nodes have enough: that tenant has less than its part
        of what is sent in advance. So little delays no one, and who asks for little stands in no line behind another's long prompts."""
        account = slots.account
        weights = sum([each.weight for each in self._accounts.here.values()])
        return account.unread_tokens + slots.uncached_tokens <= self._most_unread * account.weight / weights

    def look(self) -> None:
        """While several tenants are here: charges what was computed for them, looks how fast nodes read, and takes back
        what is too much. Not with every token."""
        if not self._accounts.are_several or (now := self._clock()) < self._looked_at + BETWEEN_LOOKS_S:
            return
        self._looked_at = now
        self._accounts.settle()
        self._most_unread = self._readers.read_tokens_per_s() * AHEAD_S
        # Without a line, too: all that came before a rate was known is in nodes' lines, one tenant's behind another's.
        least = min(self._accounts.here.values(), key=lambda account: account.time, default=None)
        first = next((slots for slots in least.requests if slots.unread), None) if least is not None else None
        if first is not None and self._most_unread > 0:
            self.take_back(first)

    def take_back(self, waiting: Slots) -> bool:
        """What was sent while nothing was held back may be far too much. Returns whether some of it came back, for the
        first request in line."""
        return take_back_prompts(waiting, self._accounts, self._most_unread)
