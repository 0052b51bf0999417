"""The lives of one HTTP request, as its handler reads them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tandem.api.sequence import SequenceSpec
from tandem.base.errors import DeadlineExceeded, InternalError, TandemError
from tandem.router.dispatch.life import RequestLife
from tandem.router.dispatch.slots import Slots

logger = logging.getLogger(__name__)

_LifeFactory = Callable[[SequenceSpec, Callable[[RequestLife], None], Callable[[RequestLife], None]], RequestLife]

# Starting a sequence may send a long prompt. After this time the rest of the event loop gets its turn.
START_TURN_S = 0.002


class Generation:
    """The lives of one HTTP request, for one reader. Tokens that arrive while the reader is busy wait in the
    lives' ledgers, and it reads them together."""

    def __init__(
        self,
        make_life: _LifeFactory,
        specs: list[SequenceSpec],
        slots: Slots,
        on_all_ended: Callable[[list[RequestLife]], None] = lambda lives: None,
        *,
        eager: bool,
        clock: Callable[[], float],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._slots = slots
        self._eager = eager
        self._wake: asyncio.Future[None] | None = None
        self._news: dict[RequestLife, None] = {}
        self._show: Callable[[RequestLife], bool] | None = None
        self._broken: Exception | None = None
        self.lives = [make_life(spec, self._on_news, self._on_end) for spec in specs]
        self._on_all_ended = on_all_ended
        self._running = len(self.lives)
        self._unplaced = dict.fromkeys(self.lives)  # lives without a place, which have not begun
        self._unread: set[RequestLife] = set()  # those whose prompt is to be read in their place
        for life in self.lives:
            life.on_read = self._on_read
        self._places = 0  # places on which no life has begun
        self._starting: asyncio.Handle | None = None
        self._late: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts the first life, and the others as their places come. Raises the first life's error; then
        none has begun and all places are given back."""
        self._places = self._slots.held
        self._slots.listen(self._on_place, self._on_refused, self._on_give_way, self._answered)
        started = False
        try:
            self._next().start()
            started = True
        finally:
            if not started:
                self.cancel()
                self._slots.release_all()
        if self._unplaced:
            if self._places:
                self._start_soon()
            self._wait_for_places()

    def _next(self) -> RequestLife:
        """Takes the next life to begin, and one of the free places for it."""
        life = next(iter(self._unplaced))
        del self._unplaced[life]
        self._places -= 1
        self._unread.add(life)
        self._slots.begin_one()
        return life

    def _on_read(self, life: RequestLife, computed: int) -> None:
        if life in self._unread:
            self._unread.remove(life)
            self._slots.read_one(computed)

    def _answered(self) -> int:
        return sum([len(life.ledger.tokens) for life in self.lives])

    def _on_place(self) -> None:
        self._places += 1
        self._start_soon()

    def _on_give_way(self, unread: bool) -> bool:
        """Pauses the latest of its sequences that can pause, or of those whose prompt is `unread`, for another tenant."""
        for life in reversed(self.lives):
            is_unread = life in self._unread
            if life not in self._unplaced and is_unread >= unread and life.can_pause:
                life.pause()
                self._unplaced[life] = None
                self._unread.discard(life)
                self._slots.pause_one(unread=is_unread)
                return True
        return False

    def _start_soon(self) -> None:
        if self._starting is None:
            self._starting = self._loop.call_soon(self._start_some)

    def _start_some(self) -> None:
        self._starting = None
        until = self._clock() + START_TURN_S
        while self._places > 0 and self._unplaced:
            if self._clock() > until:
                self._starting = self._loop.call_soon(self._start_some)
                return
            life = self._next()
            try:
                life.try_again()
            except Exception as error:
                logger.exception("%s: starting it failed", life.spec.label)
                life.fail(InternalError(f"the router failed to start it: {type(error).__name__}"))

    def _wait_for_places(self) -> None:
        """Not at a time of the loop's own clock, which deadlines are not on."""
        left = min(life.spec.deadline for life in self._unplaced) - self._clock()
        self._late = self._loop.call_later(left, self._on_late)

    def _on_late(self) -> None:
        if any(life.spec.deadline > self._clock() for life in self._unplaced):
            self._wait_for_places()  # the loop's clock is ahead
            return
        self._on_refused(DeadlineExceeded("no node had room for all of the request before its deadline"))

    def _on_refused(self, error: TandemError) -> None:
        for life in list(self._unplaced):
            life.fail(error)

    def _on_news(self, life: RequestLife) -> None:
        if not self._eager and not life.ended:
            return
        # Only while the reader waits and has read everything, so that these tokens cannot overtake earlier
        # ones.
        if self._wake is not None and not self._news and self._shown(life):
            return
        self._news[life] = None
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _shown(self, life: RequestLife) -> bool:
        if self._show is None or self._broken is not None:
            return False
        try:
            return self._show(life)
        except Exception as error:  # the error is the reader's own: `news` raises it there, and the inbox goes on
            self._broken = error
            return False

    def _on_end(self, life: RequestLife) -> None:
        if self._running == 1:
            self._slots.settle()
        if life in self._unplaced:
            del self._unplaced[life]
            self._slots.drop_one()
        else:
            if life in self._unread:
                self._unread.remove(life)
                self._slots.read_one(None)
            self._slots.release_one()
        if not self._unplaced and self._late is not None:
            self._late.cancel()
            self._late = None
        self._running -= 1
        if self._running == 0:
            self._slots.unlisten()
            self._on_all_ended(self.lives)

    def show_with(self, show: Callable[[RequestLife], bool] | None) -> None:
        """Sets a function that gets a life's news at once, in the inbox's handler, while the reader waits.
        Waking a task costs as much as everything else that is done with a lone token. `show` returns True
        when the reader need not wake up. None removes it."""
        self._show = show

    async def news(self) -> list[RequestLife]:
        """Waits for news, and returns the lives that have some. Each life's own deadlines bound the wait.
        Raises the error of `show`, if it failed."""
        if not self._news:
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        if self._broken is not None:
            raise self._broken
        lives = list(self._news)
        self._news.clear()
        return lives

    def turn_ended(self, called: list[str] | None) -> None:
        """Called after the end. `called`: the tools that the answer calls, or None when it was not parsed for
        calls."""
        for life in self.lives:
            life.turn_ended(called)

    def cancel(self) -> None:
        """Cancels all lives. Idempotent; lives that have ended keep their end."""
        for life in self.lives:
            life.cancel()
