"""The places of one HTTP request, and what each tenant has of the pools: the work that was done for it, and the KV that it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from tandem.base.errors import TandemError
from tandem.router.policy.views import Average


class TenantAccount:
    """One tenant's part. `time` is its virtual time: the tokens that were computed for it, by its weight."""

    def __init__(self, name: str, weight: float = 1.0) -> None:
        self.name = name
        self.weight = weight
        self.time = 0.0
        self.held = 0  # places
        self.in_background = 0  # of these
        self.in_line = 0  # sequences that wait for a place
        self.kv_tokens = 0  # that its sequences with a place are expected to hold
        self.unread_tokens = 0.0  # of their prompts, that no node has read yet
        # Its requests with a place, in the order in which they got their first.
        self.requests: dict[Slots, None] = {}
        self.uncached = Average()  # the part of its prompts that nodes compute

    @property
    def load(self) -> float:
        """The KV that it holds, by its weight."""
        return self.kv_tokens / self.weight

    def uncached_tokens(self, prompt_tokens: float) -> float:
        """How many tokens of a prompt nodes are expected to compute."""
        return prompt_tokens if self.uncached.value is None else prompt_tokens * self.uncached.value

    def charge(self, tokens: float) -> None:
        """Counts computed tokens. A negative number is given back."""
        self.time += tokens / self.weight

    def add(self, slots: Slots, count: int) -> None:
        """Counts places of a request, which come, or go if `count` is negative."""
        self.held += count
        self.kv_tokens += count * slots.kv_tokens
        self.in_background += count if slots.background else 0
        if count > 0:
            self.requests[slots] = None
        elif slots.held == 0:
            self.requests.pop(slots, None)


class SlotsOwner(Protocol):
    """What gives out the places, as they know it."""

    promised: int

    def leave(self, slots: Slots, count: int) -> None:
        """Takes `count` of its sequences out of the line."""

    def give_back(self, slots: Slots, count: int) -> None:
        """`count` of its places are free."""

    def take_back(self, slots: Slots) -> None:
        """One of its sequences has paused."""

    def on_sent(self) -> None:
        """A prompt is in a node's line, was read, or will not be."""


class AskedPlaces(msgspec.Struct, frozen=True):
    """What a request asks of the line."""

    count: int = 1  # sequences
    kv_tokens: int = 0  # the expected length of its longest sequence, which decides how many blocks it needs
    prompt_tokens: float = 0.0  # of one sequence
    priority: int = 0  # lower goes first
    background: bool = False  # a background answer, which has a line of its own within its tenant's
    first_by: float | None = None  # when its first token must come


class Slots:
    """Each of the request's sequences needs a place; they come one at a time, in the tenant's turns."""

    def __init__(
        self, owner: SlotsOwner, account: TenantAccount, asked: AskedPlaces, *, when_idle: bool = False
    ) -> None:
        self._owner = owner
        self._on_place: Callable[[], None] | None = None
        self._on_refused: Callable[[TandemError], None] | None = None
        self._on_give_way: Callable[[bool], bool] | None = None
        self._answered: Callable[[], int] | None = None
        self.account = account
        self.when_idle = when_idle  # it runs when nothing else does
        self.background = asked.background
        self.wanted = asked.count  # places that it still waits for
        self.paused = 0  # how many of these are for sequences that gave their place to another tenant
        self.kv_tokens = max(1, asked.kv_tokens)
        self._prompt_tokens = asked.prompt_tokens
        self.uncached_tokens = account.uncached_tokens(asked.prompt_tokens)  # of each prompt, estimated
        self.priority = asked.priority
        self.first_by = asked.first_by
        self.came = 0.0  # when it joined the line
        self.due = 0.0  # its order in its tenant's line, among those of its priority
        self.held = 0
        self.passed = 0  # how often others were admitted before it because their blocks were free
        self.unbegun = 0  # held places on which no sequence has begun
        self.unread = 0  # held places on which no prompt was read
        self.was_free = False  # the last place came while nothing was held back
        self._charged = 0  # tokens of its answers
        self.first: asyncio.Future[None] | None = None  # set with the first place; `acquire` waits for it

    @property
    def line(self) -> tuple[str, bool]:
        return self.account.name, self.background

    def listen(
        self,
        on_place: Callable[[], None],
        on_refused: Callable[[TandemError], None],
        on_give_way: Callable[[bool], bool] | None = None,
        answered: Callable[[], int] | None = None,
    ) -> None:
        """Sets the callbacks: `on_place` for each further place; `on_refused` when no more will come;
        `on_give_way` when another tenant needs a place, or, with True, the time that a node takes for its
        prompt: it pauses a sequence, calls `pause_one`, and returns True, or returns False; `answered` for the
        tokens of all its answers so far."""
        self._on_place, self._on_refused, self._on_give_way = on_place, on_refused, on_give_way
        self._answered = answered

    def unlisten(self) -> None:
        self._on_place = self._on_refused = self._on_give_way = self._answered = None

    def may_have_one_of(self, free: int) -> bool:
        """Whether it may have one of `free` places, which a background answer of a tenant that has others may
        only if enough are left."""
        own = self.account.in_background
        return not (self.background and self.account.name and own) or own + 1 <= free - 1

    # --- from the line

    def grant(self) -> None:
        """Its next place comes. The prompt is charged as estimated, until it was read."""
        if not self.unread:  # what is known by now
            self.uncached_tokens = self.account.uncached_tokens(self._prompt_tokens)
        self.wanted -= 1
        self.held += 1
        self.unbegun += 1
        self.unread += 1
        self._owner.promised += self.kv_tokens
        self.account.charge(self.uncached_tokens)
        self.account.unread_tokens += self.uncached_tokens
        if self.first is not None and not self.first.done():
            self.first.set_result(None)
        if self._on_place is not None:
            self._on_place()

    def refuse(self, error: TandemError) -> None:
        if self.first is not None and not self.first.done():
            self.first.set_exception(error)
        elif self._on_refused is not None:
            self._on_refused(error)

    def give_way(self, *, unread: bool = False) -> bool:
        """Pauses one of its sequences, or one whose prompt is `unread`. Returns whether it did."""
        return self._on_give_way is not None and self._on_give_way(unread)

    def settle(self) -> None:
        """Charges the tokens of its answers that came since the last call."""
        if self._answered is not None:
            tokens = self._answered()
            self.account.charge(tokens - self._charged)
            self._charged = tokens

    # --- from its sequences

    def begin_one(self) -> None:
        """A sequence begins on a held place. From here on its nodes' statuses count its blocks."""
        if self.unbegun > 0:
            self.unbegun -= 1
            self._owner.promised -= self.kv_tokens
            self._owner.on_sent()

    def read_one(self, computed: int | None) -> None:
        """A prompt was read: `computed` tokens of it were in no cache. None: its sequence has ended before
        that, and is charged as estimated, because a node may have read most of it."""
        if not self.unread:
            return
        self._forget_unread(1)
        if computed is not None:
            self.account.charge(computed - self.uncached_tokens)
            if self._prompt_tokens > 0:
                self.account.uncached.observe(min(1.0, computed / self._prompt_tokens))
        self._owner.on_sent()

    def _forget_unread(self, count: int) -> None:
        self.unread -= count
        self.account.unread_tokens -= count * self.uncached_tokens

    def pause_one(self, *, unread: bool = False) -> None:
        """A sequence that had begun gives its place up, and stands first in its tenant's line for another.
        `unread`: its prompt is read later, and charged then."""
        if unread and self.unread:
            self._forget_unread(1)
            self.account.charge(-self.uncached_tokens)
        self.held -= 1
        self.wanted += 1
        self.paused += 1
        self._owner.take_back(self)

    def release_one(self) -> None:
        """A sequence that had begun has ended."""
        if self.held > 0:
            self.held -= 1
            self._owner.give_back(self, 1)

    def drop_one(self) -> None:
        """A sequence has ended without having begun."""
        if self.wanted > 0:
            self._owner.leave(self, 1)
        else:
            self._drop_unbegun(1)
            self.release_one()

    def release_all(self) -> None:
        self._owner.leave(self, self.wanted)
        self._drop_unbegun(self.unbegun)
        self._forget_unread(self.unread)
        count, self.held = self.held, 0
        if count:
            self._owner.give_back(self, count)

    def _drop_unbegun(self, count: int) -> None:
        for _ in range(min(count, self.unbegun)):
            self.begin_one()
            if self.unread:
                self._forget_unread(1)
            self.account.charge(-self.uncached_tokens)
