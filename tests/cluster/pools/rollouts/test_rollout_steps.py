"""What else may happen during a rollout: a store that takes nothing, pools that are scaled. Random schedules of kills, orders and faults
at its steps are in tests/world/control.py. Nothing is wrong with the new configuration here, so no rollout may be taken back."""

from __future__ import annotations

import msgspec
import pytest

from tandem.base.errors import Unavailable
from tandem.cluster.config import TandemConfig
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import FakeHosts, FakeNode, Rig, in_loop, one_machine
from tests.cluster.pools.pools_rig import pools

replace = msgspec.structs.replace
LONG_S = 400.0
FAILOVERS, SEQS = 7, 77


def wish(rig: Rig) -> TandemConfig:
    router = replace(rig.config.router, max_failovers=FAILOVERS)
    return replace(rig.config, router=router, scheduler=replace(rig.config.scheduler, max_num_seqs=SEQS))


@in_loop
async def test_a_store_that_takes_nothing_for_a_while_only_delays_a_rollout() -> None:
    async with Rig(pools=pools(1, 2), hosts=FakeHosts(one_machine(16))) as rig:
        await rig.controller.start()
        before = await rig.controller.configuration()
        rig.store.error = Unavailable("no space left on device")  # type: ignore[attr-defined]
        with pytest.raises(Unavailable, match="no space left"):
            await rig.controller.apply(wish(rig), dry_run=False)
        assert await rig.controller.configuration() == before
        rig.store.error = None  # type: ignore[attr-defined]
        await rig.controller.apply(wish(rig), dry_run=False)
        for _ in range(12):
            rig.store.error = Unavailable("no space left on device")  # type: ignore[attr-defined]
            await rig.clock.advance(9.0)
            assert any(node.config.role is Role.DECODE for node in rig.launcher.running)
            rig.store.error = None  # type: ignore[attr-defined]
            await rig.clock.advance(4.0)
        await rig.clock.advance(LONG_S)
        view = await rig.controller.view()
        assert (view.rollout, [one.text for one in view.decisions if "taken back" in one.text]) == (None, [])
        assert {node.config.engine.scheduler.max_num_seqs for node in rig.launcher.running} == {SEQS}


@pytest.mark.parametrize("decode", [1, 4])
@in_loop
async def test_a_pool_that_is_scaled_during_a_rollout_has_its_size_and_one_configuration(decode: int) -> None:
    async with Rig(pools=pools(1, 2), hosts=FakeHosts(one_machine(16))) as rig:
        await rig.controller.start()
        await rig.controller.apply(wish(rig), dry_run=False)
        await rig.clock.advance(9.0)
        await rig.controller.scale({Role.DECODE: decode})
        with pytest.raises(Unavailable, match="a rollout is running"):
            await rig.controller.apply(rig.config, dry_run=False)
        await rig.clock.advance(LONG_S)
        view = await rig.controller.view()
        assert (view.rollout, [one.text for one in view.decisions if "taken back" in one.text]) == (None, [])
        nodes = [node for node in rig.launcher.running if isinstance(node, FakeNode)]
        assert len(nodes) == 1 + decode
        assert {node.config.engine.scheduler.max_num_seqs for node in nodes} == {SEQS}
