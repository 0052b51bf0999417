"""The controller collects the log lines of all processes, and names those that gave none."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tandem.base.errors import ConfigurationError
from tandem.base.logs import LogsQuery, RecentLines
from tests.cluster.pools.helpers import TIMEOUTS, started
from tests.cluster.pools.pools_rig import PD


def write(ring: RecentLines, message: str) -> None:
    ring.handle(logging.LogRecord("x", logging.INFO, "", 0, message, (), None))


async def test_lines_of_those_that_are_named_and_of_all() -> None:
    async with started(*PD) as rig:
        for name in ("prefill-0", "decode-0"):
            write(rig.launcher.node(name).log, f"of {name}")
        found = await rig.controller.logs(LogsQuery())
        assert {"controller", "prefill-0", "decode-0"} < found.pages.keys()
        assert found.pages["decode-0"].lines[0].message == "of decode-0"
        assert found.silent == {}
        assert (await rig.controller.logs(LogsQuery(["prefill"]))).pages.keys() == {"prefill-0"}
        assert (await rig.controller.logs(LogsQuery(["controller"]))).pages.keys() == {"controller"}
        with pytest.raises(ConfigurationError, match="no node decode-7"):
            await rig.controller.logs(LogsQuery(["decode-7"]))


async def test_one_that_does_not_answer_keeps_no_other_from_it() -> None:
    async with started(*PD) as rig:
        rig.launcher.node("decode-0").mute.set()
        asking = asyncio.create_task(rig.controller.logs(LogsQuery()))
        await rig.clock.advance(TIMEOUTS.silence_s)
        found = await asking
        assert "decode-0" not in found.pages
        assert "reading decode-0's log" in found.silent["decode-0"]
        assert "prefill-0" in found.pages
