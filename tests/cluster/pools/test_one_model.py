"""A deployment serves one content: its model's name is resolved to one commit, and no node has other weights."""

from __future__ import annotations

import msgspec

from tandem.cluster.pools.supervisor import ProcessPhase
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import FakeProcess, Rig, settle, started
from tests.cluster.pools.pools_rig import PD, PDD, phases


def with_content(content: str, from_start: int = 0):  # type: ignore[no-untyped-def]
    def prepare(process: FakeProcess, earlier: int) -> None:
        if earlier >= from_start:
            process.info = msgspec.structs.replace(process.info, content=content)  # type: ignore[attr-defined]

    return prepare


async def test_a_node_with_other_weights_is_left_out_and_the_rest_serves() -> None:
    async with Rig(*PDD) as rig:
        rig.launcher.prepare["decode-1"] = with_content("others")
        await rig.start(100)
        (node,) = [n for n in (await rig.controller.view()).nodes if n.phase == ProcessPhase.LEFT_OUT]
        assert node.node_id == "decode-1"
        assert "its model is not the one that this cluster serves" in node.detail
        assert "`tandem apply`" in node.detail
        assert rig.routed == {"prefill-0", "decode-0"}
        assert all("decode-1" not in {m.node_id for m in told} for told in rig.launcher.router.memberships)


async def test_where_the_same_bits_are_required_a_node_that_computes_otherwise_is_left_out() -> None:
    async with Rig(*PD) as rig:
        rig.launcher.prepare["prefill-0"] = with_content("files+avx512")
        rig.launcher.prepare["decode-0"] = with_content("files+avx512")
        await rig.start()
        rig.launcher.prepare["decode-0"] = with_content("files+avx2")
        rig.node("decode-0").die()
        await rig.clock.advance(100)
        (node,) = [n for n in (await rig.controller.view()).nodes if n.phase == ProcessPhase.LEFT_OUT]
        assert "model.exact is require: it computes by avx2, and they by avx512" in node.detail
        assert rig.routed == {"prefill-0"}


async def test_a_node_that_comes_back_with_other_weights_stays_away() -> None:
    """The model's folder has changed. The controller tries the node again, because it has worked before. So does the next one."""
    async with started(*PD) as rig:
        rig.launcher.prepare["decode-0"] = with_content("others", from_start=1)
        rig.node("decode-0").die()
        await rig.clock.advance(100)
        assert rig.routed == {"prefill-0"}
        assert (await phases(rig))["decode-0"] == ProcessPhase.LEFT_OUT
    async with started(*PD) as rig:
        await rig.kill_controller()
        rig.launcher.prepare["decode-0"] = with_content("others", from_start=1)
        await rig.start()
        rig.node("decode-0").die()
        rig.node("prefill-0").die()
        await rig.clock.advance(100)
        assert rig.routed == {"prefill-0"}


async def test_every_node_loads_the_commit_that_the_name_stood_for_at_the_start() -> None:
    async with Rig(*PD) as rig:
        rig.commit = "a" * 40
        await rig.start()
        rig.commit = "b" * 40  # upstream pushes
        await rig.controller.scale({Role.DECODE: 2})
        await settle()
        await rig.next_controller()
        rig.node("prefill-0").die()
        await rig.clock.advance(10)
        await rig.controller.scale({Role.DECODE: 3})
        await settle()
        nodes = [node for nodes in rig.launcher.nodes.values() for node in nodes]
        assert len(nodes) == 5
        assert {node.config.engine.model.path for node in nodes} == {f"org/model@{'a' * 40}"}
        decisions = (await rig.controller.view()).decisions
        assert any("a" * 40 in decision.text for decision in decisions)
