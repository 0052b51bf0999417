"""A rollout while the record cannot be written, and while a pool is scaled. The deaths of a controller at any of its steps, and other
orders and an end meanwhile, are schedules of `tests/world/control.py`."""

from __future__ import annotations

import msgspec
import pytest

from tandem.base.errors import Unavailable
from tandem.cluster.config import TandemConfig
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import FakeHosts, FakeNode, Rig, one_machine, started
from tests.cluster.pools.pools_rig import pools

replace = msgspec.structs.replace
LONG_S = 400.0
SEQS = 77


def wish(rig: Rig) -> TandemConfig:
    """Of nodes and of routers."""
    router = replace(rig.config.router, max_failovers=7)
    return replace(rig.config, router=router, scheduler=replace(rig.config.scheduler, max_num_seqs=SEQS))


async def test_a_store_that_takes_nothing_for_a_while_only_delays_a_rollout() -> None:
    async with started(pools=pools(1, 2), hosts=FakeHosts(one_machine(16))) as rig:
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
async def test_a_pool_that_is_scaled_during_a_rollout_has_its_size_and_one_configuration(decode: int) -> None:
    async with started(pools=pools(1, 2), hosts=FakeHosts(one_machine(16))) as rig:
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
