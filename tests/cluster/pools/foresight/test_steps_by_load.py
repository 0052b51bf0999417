"""The autoscaler's steps are foretold beside them, and graded apart from what operators order."""

from __future__ import annotations

from concurrent.futures import Future

import msgspec
import pytest

from tandem.cluster.config import PoolConfig
from tandem.cluster.pools.foresight import foretelling
from tandem.wire.forecasts import Forecast
from tandem.wire.nodes import Role
from tests.cluster.pools.foresight.test_grading import forecast
from tests.cluster.pools.helpers import started
from tests.cluster.pools.pools_rig import pool_of, pools


async def test_each_step_is_foretold_beside_it_and_waits_for_no_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation here never ends."""

    never: Future[object] = Future()
    monkeypatch.setattr(foretelling, "foresight", object)
    monkeypatch.setattr(foretelling, "in_own_thread", lambda name, work: never)
    async with started(pools=pools(1, PoolConfig(nodes=1, min=1, max=3))) as rig:
        rig.launcher.router.recalls = b"what came"
        rig.launcher.node("decode-0").free_blocks = 2
        await rig.clock.advance(40)
        assert (await pool_of(rig, Role.DECODE)).wanted == 2
        rig.launcher.node("decode-1").free_blocks = 2
        await rig.clock.advance(60)
        assert (await pool_of(rig, Role.DECODE)).wanted == 3, "nor does the next step"
        found = (await rig.controller.view()).foresight
        assert (
            found.score.said[0]
            == "1 prefill, 2 decode → 1 prefill, 3 decode: not foretold: foretelling took longer than 12 s"
        )


async def test_a_step_and_an_order_have_scores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = forecast(sizes={Role.PREFILL: 1, Role.DECODE: 2})
    done: Future[Forecast] = Future()
    done.set_result(expected)
    monkeypatch.setattr(foretelling, "foresight", object)
    monkeypatch.setattr(foretelling, "in_own_thread", lambda name, work: done)
    async with started(pools=pools(1, PoolConfig(nodes=1, min=1, max=2))) as rig:
        rig.launcher.router.recalls = b"what came"
        rig.launcher.node("decode-0").free_blocks = 2
        await rig.clock.advance(60)
        view = await rig.controller.view()
        assert view.foresight.pending == msgspec.structs.replace(expected, by_load=True)
        assert view.decisions[-1].text.startswith(
            "1 prefill, 1 decode → 1 prefill, 2 decode: expected, by the last 60 req"
        )
