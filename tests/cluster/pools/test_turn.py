"""Two controllers of one deployment: the older one stood still, was replaced, and wakes up."""

from __future__ import annotations

import asyncio

import pytest

from tandem.base.errors import Unavailable
from tandem.cluster.pools.state import decode
from tandem.cluster.pools.turn import LaterController
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import FakeHosts, one_machine, settle, started
from tests.cluster.pools.pools_rig import pools


async def test_an_older_controller_records_nothing_and_ends() -> None:
    async with started(pools=pools(1, 2), hosts=FakeHosts(one_machine(16))) as rig:
        older = rig.controller
        rig.controller = rig.new_controller()
        await rig.start()
        await rig.controller.scale({Role.DECODE: 3})
        await rig.clock.advance(1.0)
        with pytest.raises(LaterController, match="another controller has taken over"):
            await older.scale({Role.DECODE: 1})
        await settle()
        assert "another controller has taken over" in await older.failed()
        assert decode(rig.store.state).sizes[Role.DECODE] == 3
        assert len(rig.launcher.running) == 4
        await older._tasks.stop()


async def test_a_controller_that_slept_through_the_end_of_its_deployment_starts_nothing() -> None:
    async with started(pools=pools(1, 1), hosts=FakeHosts(one_machine(16))) as rig:
        await rig.clock.advance(1.0)
        rig.store.state = None  # as `tandem down` leaves it
        told = len(rig.launcher.router.memberships)
        rig.clock.stand_still(30.0)
        await rig.clock.advance(20.0)
        assert len(rig.launcher.router.memberships) <= told + 1
        with pytest.raises(LaterController, match="has been ended"):
            await rig.controller.scale({Role.DECODE: 3})
        assert rig.store.state is None


async def test_an_older_controller_that_wakes_up_does_nothing_before_it_knows_that() -> None:
    async with started(pools=pools(1, 1), hosts=FakeHosts(one_machine(16))) as rig:
        await rig.clock.advance(1.0)
        kept = decode(rig.store.state)
        rig.store.error = Unavailable("the control store is away")
        rig.clock.stand_still(30.0)
        told = len(rig.launcher.router.memberships)
        await rig.clock.advance(20.0)
        assert len(rig.launcher.router.memberships) <= told + 1, "it does not know whether it was replaced"
        rig.store.error = None
        await rig.clock.advance(20.0)
        assert len(rig.launcher.router.memberships) > told + 1, "it was not"
        assert decode(rig.store.state).writer == kept.writer
        assert rig.controller.members


async def test_a_record_that_changed_since_it_was_read_is_not_overwritten() -> None:
    """The older one, about to be replaced, confirms an order while the later one takes over."""
    async with started(pools=pools(1, 1), hosts=FakeHosts(one_machine(16))) as rig:
        older, store = rig.controller, rig.store
        load = store.load

        async def load_early() -> bytes | None:
            kept = await load()
            store.load = load  # type: ignore[method-assign]
            await older.scale({Role.DECODE: 2})
            return kept

        store.load = load_early  # type: ignore[method-assign]
        rig.controller = rig.new_controller()
        start = asyncio.create_task(rig.controller.start())
        await settle()
        assert "another controller" in await rig.controller.failed(), "the next one reads it again"
        await asyncio.gather(start, return_exceptions=True)
        await rig.controller._tasks.stop()
        rig.controller = older
        assert decode(store.state).sizes[Role.DECODE] == 2
