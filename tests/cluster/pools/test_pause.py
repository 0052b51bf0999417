"""Pausing pools and nodes, so that they get no new requests, emptying prefix caches, and collecting log lines."""

from __future__ import annotations

import logging

import pytest

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.base.logs import LogsQuery
from tests.cluster.pools.helpers import TIMEOUTS, settle, started
from tests.cluster.pools.pools_rig import PD, PDD


async def test_routers_are_told_what_is_paused_and_the_next_controller_knows_it() -> None:
    async with started(*PDD) as rig:
        assert await rig.controller.pause(["decode-1"]) == ["decode-1"]
        await settle()
        assert rig.launcher.router.paused == ["decode-1"]
        assert (await rig.controller.view()).paused == ["decode-1"]
        await rig.next_controller()
        assert rig.launcher.router.paused == ["decode-1"]
        assert "decode-1" in rig.routed, "a paused node stays a member"
        await rig.controller.drain_node("decode-1", 1.0)
        await settle()
        assert (await rig.controller.view()).paused == rig.launcher.router.paused == [], "it took its pause along"
        assert await rig.controller.pause(["decode-0"]) == ["decode-0"]
        assert await rig.controller.pause([]) == ["aggregated", "decode", "decode-0", "encode", "prefill"]
        assert await rig.controller.resume([]) == []
        await settle()
        assert rig.launcher.router.paused == []


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
        assert [rig.node(name).resets for name in ("prefill-0", "decode-0")] == [2, 1]
        rig.node("decode-0").mute.set()
        with pytest.raises(Unavailable, match="decode-0 did not confirm"):
            await rig.during(rig.controller.reset_cache([]), TIMEOUTS.unresponsive_s + TIMEOUTS.silence_s)
        assert rig.launcher.router.forgot == [["decode-0", "prefill-0"], ["prefill-0"], ["prefill-0"]]


async def test_the_log_lines_of_those_that_are_named_and_of_all_are_collected() -> None:
    async with started(*PD) as rig:
        for name in ("prefill-0", "decode-0"):
            rig.node(name).log.handle(logging.LogRecord("x", logging.INFO, "", 0, f"of {name}", (), None))
        found = await rig.controller.logs(LogsQuery())
        assert {"controller", "prefill-0", "decode-0"} < found.pages.keys()
        assert found.pages["decode-0"].lines[0].message == "of decode-0"
        assert found.silent == {}
        assert (await rig.controller.logs(LogsQuery(["prefill"]))).pages.keys() == {"prefill-0"}
        assert (await rig.controller.logs(LogsQuery(["controller"]))).pages.keys() == {"controller"}
        with pytest.raises(ConfigurationError, match="no node decode-7"):
            await rig.controller.logs(LogsQuery(["decode-7"]))
        rig.node("decode-0").mute.set()
        found = await rig.during(rig.controller.logs(LogsQuery()), TIMEOUTS.silence_s)
        assert "decode-0" not in found.pages
        assert "reading decode-0's log" in found.silent["decode-0"]
        assert "prefill-0" in found.pages, "one that does not answer keeps no other from it"
