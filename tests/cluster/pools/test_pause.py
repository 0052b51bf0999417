"""Pausing pools and nodes, so that they get no new requests, and emptying prefix caches."""

from __future__ import annotations

import asyncio

import pytest

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import TIMEOUTS, settle, started
from tests.cluster.pools.pools_rig import PD


async def test_routers_are_told_what_is_paused_and_the_next_controller_knows_it() -> None:
    async with started(*PD) as rig:
        assert await rig.controller.pause(["decode-0"]) == ["decode-0"]
        await settle()
        assert rig.launcher.router.paused == ["decode-0"]
        assert (await rig.controller.view()).paused == ["decode-0"]
        await rig.next_controller()
        assert rig.launcher.router.paused == ["decode-0"]
        assert await rig.controller.pause([]) == ["aggregated", "decode", "decode-0", "encode", "prefill"]
        assert await rig.controller.resume([]) == []
        await settle()
        assert rig.launcher.router.paused == []
        assert rig.routed == {"prefill-0", "decode-0"}, "a paused node stays a member"


async def test_a_node_that_goes_takes_its_pause_along() -> None:
    async with started(("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE), ("decode-1", Role.DECODE)) as rig:
        await rig.controller.pause(["decode-1"])
        await rig.controller.drain_node("decode-1", 1.0)
        await settle()
        assert (await rig.controller.view()).paused == rig.launcher.router.paused == []


async def test_a_node_is_resumed_as_it_was_paused() -> None:
    async with started(*PD) as rig:
        await rig.controller.pause(["decode"])
        with pytest.raises(ConfigurationError, match="paused with its pool: resume decode"):
            await rig.controller.resume(["decode-0"])
        with pytest.raises(ConfigurationError, match="no node decode-7"):
            await rig.controller.pause(["decode-7"])
        assert await rig.controller.resume(["decode"]) == []


async def test_caches_are_emptied_and_routers_forget_what_was_there() -> None:
    async with started(*PD) as rig:
        assert await rig.controller.reset_cache([]) == ["decode-0", "prefill-0"]
        assert await rig.controller.reset_cache(["prefill"]) == ["prefill-0"]
        assert [rig.launcher.node(name).resets for name in ("prefill-0", "decode-0")] == [2, 1]
        assert rig.launcher.router.forgot == [["decode-0", "prefill-0"], ["prefill-0"]]


async def test_a_node_that_does_not_say_that_it_is_empty_is_named() -> None:
    async with started(*PD) as rig:
        rig.launcher.node("decode-0").mute.set()
        waiting = asyncio.create_task(rig.controller.reset_cache([]))
        await rig.clock.advance(TIMEOUTS.unresponsive_s + TIMEOUTS.silence_s)
        with pytest.raises(Unavailable, match="decode-0 did not confirm"):
            await waiting
        assert rig.launcher.router.forgot == [["prefill-0"]]
