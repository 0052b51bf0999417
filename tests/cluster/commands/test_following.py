"""A command that follows a controller: only a recorded end is an end, however the controller is silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tandem.base.errors import DeadlineExceeded, InternalError, NodeLost, TandemError, Unavailable
from tandem.cluster.commands.following import ASK_AGAIN_S, SILENT_START_S, Follower
from tandem.cluster.control import ClusterEnd
from tandem.cluster.pools.controller_host import ClusterAccount, ClusterStage
from tandem.cluster.pools.event_log import EventKind, LoggedEvent
from tandem.cluster.tasks import cancel
from tests.cluster.pools.helpers import FakeClock, RecordedEvents, settle

SERVING = ClusterAccount(ClusterStage.SERVING, [], latest=7, url="http://router", model="fake")
END = ClusterEnd(1.0, "`tandem down`")


class Controller:
    """Answers with `news`, then with `silence` for as long as there is one, then not before there is news."""

    def __init__(self, *news: ClusterAccount | TandemError) -> None:
        self.news = list(news)
        self.silence: TandemError | None = None
        self.recorded: ClusterEnd | None = None
        self.store_error: TandemError | None = None
        self.asked: list[tuple[int, ClusterStage]] = []
        self.revived = 0
        self._changed = asyncio.Event()

    def change(self, change: Callable[[], None]) -> None:
        change()
        self._changed.set()
        self._changed = asyncio.Event()

    async def account_after(self, seen: int, stage: ClusterStage) -> ClusterAccount:
        self.asked.append((seen, stage))
        while not self.news:
            if self.silence is not None:
                raise self.silence
            await self._changed.wait()
        answer = self.news.pop(0)
        if isinstance(answer, TandemError):
            raise answer
        return answer

    async def ending(self) -> ClusterEnd | None:
        if self.store_error is not None:
            raise self.store_error
        return self.recorded

    async def revive(self) -> None:
        self.revived += 1


class Rig:
    def __init__(self, *news: ClusterAccount | TandemError) -> None:
        self.controller = Controller(*news)
        self.events = RecordedEvents()
        self.clock = FakeClock()
        self.follower = Follower(self.controller, self.events, self.clock)


async def test_a_controller_that_is_lost_while_it_starts_is_followed_into_its_next_life() -> None:
    rig = Rig(NodeLost("killed"), NodeLost("killed"), SERVING)
    following = asyncio.create_task(rig.follower.until_serving())
    await rig.clock.advance(2 * ASK_AGAIN_S)
    assert await following == SERVING
    assert "killed" in rig.events.of("trouble", "controller")[0]
    assert rig.events.of("ready", "controller") == ["answers again after 1.0 s", "running"]


@pytest.mark.parametrize(
    "silence",
    [NodeLost("killed"), DeadlineExceeded("stopped"), Unavailable("no control store"), InternalError("a bug")],
    ids=lambda error: type(error).__name__,
)
async def test_no_silence_is_an_end_however_long_it_lasts(silence: TandemError) -> None:
    rig = Rig(SERVING)
    await rig.follower.until_serving()
    over = asyncio.create_task(rig.follower.until_over())
    await settle()
    rig.controller.change(lambda: setattr(rig.controller, "silence", silence))
    await rig.clock.advance(3600)
    assert not over.done()
    assert len(rig.events.of("trouble", "controller")) == 1, "said once"
    assert rig.controller.revived > 1000
    rig.controller.news.append(SERVING)
    await rig.clock.advance(ASK_AGAIN_S)
    assert rig.events.of("ready", "controller")[-1].startswith("answers again")
    assert not over.done()
    await cancel(over)


async def test_what_was_recorded_is_an_end_although_the_controller_says_nothing() -> None:
    rig = Rig(SERVING, NodeLost("ended"))
    await rig.follower.until_serving()
    rig.controller.silence = NodeLost("ended")
    rig.controller.store_error = Unavailable("the head is away")
    over = asyncio.create_task(rig.follower.until_over())
    await rig.clock.advance(600)
    assert not over.done(), "a record that cannot be read is no end"
    rig.controller.store_error, rig.controller.recorded = None, END
    await rig.clock.advance(ASK_AGAIN_S)
    assert await over == END
    assert rig.controller.revived == 0, "nothing is made again that was ended"


async def test_a_cluster_that_never_served_is_not_waited_for_without_end() -> None:
    rig = Rig()
    rig.controller.silence = NodeLost("it cannot start")
    following = asyncio.create_task(rig.follower.until_serving())
    await rig.clock.advance(SILENT_START_S + 2 * ASK_AGAIN_S)
    with pytest.raises(Unavailable, match="it cannot start"):
        await following


async def test_the_next_controller_counts_from_the_beginning_and_one_that_was_stopped_goes_on() -> None:
    happened = LoggedEvent(1, EventKind.READY, "decode-0", "decode")
    rig = Rig(
        SERVING,
        DeadlineExceeded("stopped"),
        SERVING,
        NodeLost("killed"),
        ClusterAccount(ClusterStage.STARTING, [happened], latest=1),
        ClusterAccount(ClusterStage.STOPPED, [], latest=1, ending=END),
    )
    await rig.follower.until_serving()
    over = asyncio.create_task(rig.follower.until_over())
    await rig.clock.advance(10)
    assert await over == END
    # At once, whatever it is doing: the stage is told that it cannot be in.
    assert rig.controller.asked[2] == (7, ClusterStage.STOPPED)
    assert rig.controller.asked[4] == (0, ClusterStage.STOPPED)
    assert rig.events.of("ready", "decode-0") == ["decode"]
