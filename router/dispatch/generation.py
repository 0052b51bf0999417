"""The lives of one HTTP request, as its handler reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tandem.router.dispatch.admission import Slots
from tandem.router.dispatch.life import RequestLife
from tandem.router.dispatch.spec import SequenceSpec

_LifeFactory = Callable[
    [SequenceSpec, Callable[[RequestLife], None], Callable[[RequestLife], None]], RequestLife
]


class Generation:
    """One reader. Tokens that arrive while it is busy wait in the lives' ledgers and are read together."""

    def __init__(
        self, make_life: _LifeFactory, specs: list[SequenceSpec], slots: Slots, *, eager: bool
    ) -> None:
        self._slots = slots
        self._eager = eager
        self._wake: asyncio.Future[None] | None = None
        self._news: dict[RequestLife, None] = {}
        self._show: Callable[[RequestLife], bool] | None = None
        self._broken: Exception | None = None
        self.lives = [make_life(spec, self._on_news, self._on_end) for spec in specs]

    def start(self) -> None:
        """All of them or none: raises what the first that cannot start raises."""
        started = False
        try:
            for life in self.lives:
                life.start()
            started = True
        finally:
            if not started:
                self._slots.release_all()
                self.cancel()

    def _on_news(self, life: RequestLife) -> None:
        if not self._eager and not life.ended:
            return
        # Only while the reader waits, and has everything: what comes meanwhile must not overtake what it holds.
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
        except (
            Exception
        ) as error:  # it is the reader's, who must hear of it; the inbox has nothing to do with it
            self._broken = error
            return False

    def _on_end(self, life: RequestLife) -> None:
        self._slots.release_one()

    def show_with(self, show: Callable[[RequestLife], bool]) -> None:
        """While the reader waits for news, `show` gets them first, where they arrive: waking up a task costs a lone
        token as much as all else that is done with it. True: the reader need not hear of it."""
        self._show = show

    async def news(self) -> list[RequestLife]:
        """The lives that have something new, waiting until there is one. Each life's deadlines bound the wait."""
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

    def cancel(self) -> None:
        """Idempotent; lives that have ended keep their end."""
        for life in self.lives:
            life.cancel()
