"""A new configuration while the cluster serves: nodes are replaced one by one, or the whole change is rolled back."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import example, given, settings

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.cluster.config import AutoscalingConfig, PoolConfig, RolloutConfig, TandemConfig
from tandem.cluster.launcher import CheckKept
from tandem.cluster.pools import state, wings
from tandem.wire.nodes import PoolReport, Role, RouterQueue
from tests.cluster.pools.helpers import TIMEOUTS, FakeHosts, FakeNode, Rig, in_loop, one_machine, settle, started
from tests.cluster.pools.pools_rig import machine, pools

replace = msgspec.structs.replace
LONG_S = 160.0


def wish(rig: Rig, *, model: str | None = None, seqs: int = 77, **changes: object) -> TandemConfig:
    """The rig's configuration with a change that needs new nodes."""
    config = rig.config
    if model is not None:
        config = replace(config, model=replace(config.model, path=model))
    else:
        config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=seqs))
    return replace(config, **changes)


def made_with(rig: Rig) -> Counter[int]:
    return Counter(node.config.engine.scheduler.max_num_seqs for node in rig.launcher.running)


def names(rig: Rig) -> set[str]:
    return {node.info.node_id for node in rig.launcher.running}


async def test_new_nodes_start_before_old_ones_go() -> None:
    async with started(pools=pools(1, 2)) as rig:
        rig.launcher.prepare |= dict.fromkeys(
            ["prefill-1", "decode-2", "decode-3"], lambda node, _: setattr(node, "starts_at_once", False)
        )
        change = await rig.controller.apply(wish(rig), dry_run=False)
        assert change.nodes == ["scheduler.max_num_seqs"]
        assert set(change.replaced) == {"prefill-0", "decode-0", "decode-1"}
        await rig.clock.advance(20.0)
        assert rig.routed == {"prefill-0", "decode-0", "decode-1"}, "nothing goes before something new is ready"
        assert names(rig) == {*rig.routed, "prefill-1", "decode-2"}
        view = (await rig.controller.view()).rollout
        assert view is not None
        assert (view.replaced, len(view.left)) == (0, 3)
        assert rig.launcher.router.pools[Role.DECODE] == PoolReport(Role.DECODE, 2, starting=1)
        rig.launcher.node("decode-2").may_start.set()
        await rig.clock.advance(2.0)
        assert "decode-0" in rig.routed, "it has not served long enough"
        await rig.clock.advance(20.0)
        assert rig.routed == {"prefill-0", "decode-1", "decode-2"}
        rig.launcher.node("prefill-1").may_start.set()
        rig.launcher.node("decode-3").may_start.set()
        await rig.clock.advance(60.0)
        assert rig.routed == names(rig) == {"prefill-1", "decode-2", "decode-3"}
        assert made_with(rig) == {77: 3}
        assert len(rig.launcher.routers) == 1, "the router goes on"
        view = await rig.controller.view()
        assert (view.rollout, view.revision) == (None, change.revision)  # type: ignore[attr-defined]
        assert view.decisions[-1].text == "the rollout is done"  # type: ignore[attr-defined]


async def test_a_new_node_that_has_become_silent_has_not_served_long_enough() -> None:
    """The end of a process on a machine that is not seen is told late."""
    async with started(pools=pools(1, 2)) as rig:
        rig.launcher.prepare["decode-2"] = lambda node, _: setattr(node, "starts_at_once", False)
        await rig.controller.apply(wish(rig), dry_run=False)
        await rig.clock.advance(20.0)
        rig.launcher.node("decode-2").may_start.set()
        await rig.clock.advance(1.5)
        rig.launcher.node("decode-2").mute.set()
        await rig.clock.advance(8.0)
        assert {"decode-0", "decode-1"} <= rig.routed
        rig.launcher.node("decode-2").mute.clear()
        await rig.clock.advance(LONG_S)
        assert made_with(rig) == {77: 3}


async def test_a_new_content_is_the_revisions_own_and_the_old_one_stays_the_olds() -> None:
    async with started(pools=pools(1, 2)) as rig:
        await rig.controller.apply(wish(rig, model="other"), dry_run=False)
        await rig.clock.advance(8.0)
        routed = {member.node_id: member.content for member in rig.launcher.router.memberships[-1]}
        assert len(set(routed.values())) == 2, routed
        old = next(iter({"decode-0", "decode-1"} & set(routed)))
        before = rig.launcher.node(old)
        before.die()
        await rig.clock.advance(3.0)
        assert rig.launcher.node(old).info.content == before.info.content, "it comes back as what it was"
        await rig.clock.advance(LONG_S)
        assert {node.info.content for node in rig.launcher.running} == {"the weights of other"}
        assert (await rig.controller.view()).rollout is None


async def test_what_does_not_start_is_taken_back() -> None:
    async with started(pools=pools(1, 2)) as rig:

        def broken(process: FakeNode, _: int) -> None:
            if process.config.engine.model.path == "broken":
                process.start_error = ConfigurationError("there are no weights")

        rig.launcher.prepare |= {f"{role.value}-{i}": broken for role in Role for i in range(9)}
        await rig.controller.apply(wish(rig, model="broken"), dry_run=False)
        await rig.clock.advance(LONG_S)
        assert rig.routed == names(rig) == {"prefill-0", "decode-0", "decode-1"}, "none of them was touched"
        view = await rig.controller.view()
        assert (view.rollout, view.revision) == (None, 0)
        assert any("taken back: " in one.text and "no weights" in one.text for one in view.decisions)
        assert (await rig.controller.configuration()).model == rig.config.model


async def test_what_answers_with_errors_is_taken_back() -> None:
    async with started(pools=pools(1, 2)) as rig:

        def fails(process: FakeNode, _: int) -> None:
            process.finished = {"stop": 10, "error": 5}

        rig.launcher.prepare["decode-2"] = fails
        await rig.controller.apply(wish(rig), dry_run=False)
        await rig.clock.advance(LONG_S)
        assert made_with(rig) == {rig.config.scheduler.max_num_seqs: 3}
        assert {"decode-0", "decode-1"} <= rig.routed


@pytest.mark.parametrize(("sender", "blocks"), [("prefill-1", 3), ("prefill-1", 2), ("prefill-0", 9)])
async def test_what_sends_kv_that_others_find_wrong_is_taken_back(sender: str, blocks: int) -> None:
    """Fewer blocks may have been a link's fault, and those of an old node are no reason to keep it."""
    is_taken_back = (sender, blocks) == ("prefill-1", 3)
    async with started(pools=pools(1, 1)) as rig:
        rig.launcher.prepare["decode-1"] = lambda node, _: setattr(node, "wrong_kv", {sender: blocks})
        await rig.controller.apply(wish(rig), dry_run=False)
        await rig.clock.advance(LONG_S)
        assert made_with(rig) == {rig.config.scheduler.max_num_seqs if is_taken_back else 77: 2}
        decisions = (await rig.controller.view()).decisions
        why = "prefill-1: the KV that it sent to decode-1 is wrong"
        assert any(f"taken back: {why}" in one.text for one in decisions) == is_taken_back


async def test_a_model_with_another_tokenizer_is_taken_back() -> None:
    async with Rig(pools=pools(1, 1)) as rig:
        for number in range(3):
            for role in ("prefill", "decode"):
                digest = "old" if number == 0 else "new"
                rig.launcher.prepare[f"{role}-{number}"] = lambda node, _, digest=digest: setattr(
                    node, "info", replace(node.info, tokenizer=digest)
                )
        await rig.controller.start()
        await rig.controller.apply(wish(rig, model="other"), dry_run=False)
        await rig.clock.advance(LONG_S)
        assert rig.routed == {"prefill-0", "decode-0"}
        assert any("tokenizer.json" in one.text for one in (await rig.controller.view()).decisions)


async def test_while_requests_wait_too_long_nothing_goes() -> None:
    async with started(pools=pools(1, 2)) as rig:
        rig.launcher.router.load = RouterQueue(5, 60.0)
        await rig.clock.advance(2 * TIMEOUTS.heartbeat_s)
        await rig.controller.apply(wish(rig), dry_run=False)
        await rig.clock.advance(60.0)
        assert {"prefill-0", "decode-0", "decode-1"} <= rig.routed
        view = (await rig.controller.view()).rollout
        assert view is not None
        assert "slo.ttft_s" in view.waits
        rig.launcher.router.load = RouterQueue()
        await rig.clock.advance(LONG_S)
        assert (await rig.controller.view()).rollout is None
        assert made_with(rig) == {77: 3}


async def test_where_no_machine_has_room_for_more_one_goes_first() -> None:
    hosts = FakeHosts(machine("1", prefill=1, decode=2))
    async with started(pools=pools(1, 2), hosts=hosts) as rig:
        await rig.controller.apply(wish(rig), dry_run=False)
        await rig.clock.advance(LONG_S)
        assert made_with(rig) == {77: 3}
        assert (await rig.controller.view()).rollout is None


async def test_the_only_node_that_writes_answers_waits_for_room() -> None:
    hosts = FakeHosts(machine("1", prefill=1, decode=1))
    async with started(pools=pools(1, 1), hosts=hosts) as rig:
        await rig.controller.apply(wish(rig), dry_run=False)
        await rig.clock.advance(LONG_S)
        assert "decode-0" in rig.routed
        view = (await rig.controller.view()).rollout
        assert view is not None
        assert "rollout.max_unavailable" in view.waits
        hosts.join(machine("2", decode=1))
        await rig.clock.advance(LONG_S)
        assert (await rig.controller.view()).rollout is None
        assert made_with(rig) == {77: 2}


async def test_what_lacks_a_machine_or_is_left_out_anyway_keeps_no_rollout_from_its_end() -> None:
    hosts = FakeHosts(machine("1", prefill=2, decode=2))
    async with Rig(pools=pools(1, 3), hosts=hosts) as rig:
        rig.launcher.prepare["decode-1"] = lambda node, _: setattr(node, "start_error", ConfigurationError("never"))
        rig.launcher.prepare |= {
            f"{role}-{number}": lambda node, _: setattr(node, "start_error", Unavailable("not now"))
            for role, number in (("prefill", 1), ("decode", 3))
        }
        starting = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(10.0)
        await starting
        assert rig.routed == {"prefill-0", "decode-0"}
        await rig.controller.apply(wish(rig), dry_run=False)
        await rig.clock.advance(LONG_S)
        view = await rig.controller.view()
        assert (view.rollout, view.revision) == (None, 0), "it was taken back"
        assert "prefill-0" in rig.routed
        assert "decode-0" in rig.routed


async def test_a_node_that_was_left_out_on_the_way_back_is_tried_again_with_its_pool() -> None:
    """It has the place that the rollout has beyond the pool's size, so without it no old node can go."""
    async with started(pools=pools(1, 1), hosts=FakeHosts(one_machine(16))) as rig:
        old = rig.launcher.node("decode-0")
        old.may_finish.clear()
        rig.launcher.prepare["decode-2"] = lambda node, earlier: (
            setattr(node, "start_error", Unavailable("out of reach")) if earlier < 3 else None
        )
        await rig.controller.apply(wish(rig), dry_run=False)
        while old.drained_with is None:
            await rig.clock.advance(1.0)
        await rig.controller.go_back()
        old.may_finish.set()
        await rig.clock.advance(LONG_S)
        assert (await rig.controller.view()).rollout is not None
        lines = await rig.controller.scale({Role.DECODE: 1})
        assert lines[1:] == ["decode-2 was left out and is tried again"]
        await rig.clock.advance(LONG_S)
        assert (await rig.controller.view()).rollout is None
        assert rig.routed == {"prefill-0", "decode-2"}


async def test_what_nodes_do_not_read_is_applied_at_once() -> None:
    async with started(pools=pools(1, 1)) as rig:
        config = replace(
            rig.config,
            pools=pools(1, PoolConfig(nodes=2, min=1, max=3)),
            autoscaling=AutoscalingConfig(grow_after_s=3.0, settle_s=1.0),
            timeouts=replace(TIMEOUTS, heartbeat_s=0.25),
            name="another",
        )
        asked = await rig.controller.apply(config, dry_run=True)
        assert (await rig.controller.configuration()) == rig.config
        change = await rig.controller.apply(config, dry_run=False)
        assert change == asked
        assert (change.nodes, change.replaced, change.refused) == ([], [], ["name"])
        assert "decode: from 1 to 2, 1 node more" in change.at_once
        await settle()
        assert rig.routed == {"prefill-0", "decode-0", "decode-1"}
        kept = await rig.controller.configuration()
        assert kept == replace(config, name=rig.config.name)
        await rig.next_controller()
        assert await rig.controller.configuration() == kept, "the next controller knows it"
        assert not (await rig.controller.apply(config, dry_run=True)).at_once


async def test_what_cannot_be_wished_for_is_refused() -> None:
    async with started(pools=pools(1, 1)) as rig:
        renamed = replace(rig.config, router=replace(rig.config.router, model_name="other"))
        with pytest.raises(ConfigurationError, match=r"model\.served_name: fake"):
            await rig.controller.apply(renamed, dry_run=True)
        with pytest.raises(ConfigurationError, match="would be left to decode"):
            await rig.controller.apply(replace(rig.config, pools=pools(1, 0)), dry_run=False)
        with pytest.raises(ConfigurationError, match="no rollout"):
            await rig.controller.go_back()
        await rig.controller.apply(wish(rig), dry_run=False)
        with pytest.raises(Unavailable, match="a rollout is running"):
            await rig.controller.apply(wish(rig, seqs=5), dry_run=False)
        with pytest.raises(Unavailable, match="a rollout is replacing nodes"):
            await rig.controller.change_role("prefill-0", Role.DECODE)
        await rig.clock.advance(4.0)
        await rig.controller.go_back()
        await rig.clock.advance(LONG_S)
        assert made_with(rig) == {rig.config.scheduler.max_num_seqs: 2}


async def test_sizes_and_the_configuration_are_recorded_together() -> None:
    """A controller that dies between two records would leave half of the change."""
    async with started(pools=pools(1, 2)) as rig:
        saved = []
        keep = rig.store.save

        async def counting(kept: bytes, check: CheckKept | None = None) -> None:
            saved.append(state.decode(kept))
            await keep(kept, check)

        rig.store.save = counting
        await rig.controller.apply(wish(rig, pools=pools(2, 1)), dry_run=False)
        first = saved[0]
        assert (first.sizes[Role.PREFILL], first.sizes[Role.DECODE]) == (2, 1)
        assert first.revision.config is not None
        assert first.revision.config.scheduler.max_num_seqs == 77
        await rig.clock.advance(LONG_S)
        assert made_with(rig) == {77: 3}


class Watched:
    """The smallest number of ready nodes that routers ever saw, not counting nodes that the test killed."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.hurt = 0.0  # until this time the effects of the test's own kills are ignored

    def look(self, least: dict[Role, int]) -> None:
        if self.rig.clock.now() < self.hurt:
            return
        serving = Counter(
            member.role
            for member in self.rig.launcher.router.memberships[-1]
            if self.rig.launcher.node(member.node_id).drained_with is None
        )
        for role, count in least.items():
            assert serving[role] >= count, (role, serving)


BLOWS = st.lists(
    st.tuples(
        st.sampled_from(["nothing", "kill a node", "kill the controller", "back"]),
        st.integers(0, 5),
        st.sampled_from([1.0, 4.0, 11.0, 40.0]),
    ),
    max_size=8,
)


@settings(max_examples=4, deadline=None)
@example(sizes=(1, 1), surge=1, unavailable=1, broken="all", blows=[("kill the controller", 0, 1.0)])
@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    surge=st.integers(0, 2),
    unavailable=st.sampled_from([None, 0, 1]),
    broken=st.sampled_from(["none", "none", "all", "late"]),
    blows=BLOWS,
)
def test_whatever_happens_meanwhile_all_nodes_have_one_configuration_in_the_end(
    sizes: tuple[int, int], surge: int, unavailable: int | None, broken: str, blows: list[tuple[str, int, float]]
) -> None:
    if surge == 0 and unavailable == 0:
        surge = 1  # nothing could ever go

    @in_loop
    async def run() -> None:
        base = TandemConfig(
            router=TandemConfig().router, rollout=RolloutConfig(surge=surge, max_unavailable=unavailable)
        )
        base = replace(base, router=replace(base.router, model_name="fake"))
        async with Rig(pools=pools(*sizes), config=base, hosts=FakeHosts(one_machine(16))) as rig:
            watched = Watched(rig)

            def prepare(process: FakeNode, _: int) -> None:
                is_new = process.config.engine.model.path == "other"
                late = broken == "late" and process.config.role is Role.PREFILL
                if is_new and (broken == "all" or late):
                    process.start_error = Unavailable("not this one")

            rig.launcher.prepare |= {f"{role.value}-{i}": prepare for role in Role for i in range(60)}
            await rig.controller.start()
            await rig.controller.apply(wish(rig, model="other"), dry_run=False)
            less = 1 if unavailable is None else unavailable
            least = {Role.PREFILL: sizes[0] - less, Role.DECODE: sizes[1] - less}
            if unavailable is None and surge:
                least[Role.DECODE] = sizes[1]  # there is room for one more
            if surge == 0 and unavailable is None and sizes[1] == 1:
                least[Role.DECODE] = 1
            for blow, which, seconds in blows:
                await hit(rig, watched, blow, which)
                for _ in range(int(seconds)):
                    await rig.clock.advance(1.0)
                    watched.look(least)
            stuck = surge == 0 and unavailable is None and sizes[1] == 1
            for _ in range(8):
                await rig.clock.advance(LONG_S / 4)
                watched.look(least)
            kept = state.decode(await rig.store.load() or b"")
            view = await rig.controller.view()
            assert not view.failure
            if not stuck:
                assert view.rollout is None, view.rollout
                assert len({node.info.content for node in rig.launcher.running}) == 1
            assert rig.routed == names(rig)
            assert len(rig.routed) == sum(sizes) == len(kept.nodes)

    run()


async def hit(rig: Rig, watched: Watched, blow: str, which: int) -> None:
    running = rig.launcher.running
    if blow == "kill a node" and running:
        running[which % len(running)].die()
        watched.hurt = rig.clock.now() + LONG_S
    elif blow == "kill the controller":
        rig.hosts.forget_waiters()
        await rig.kill_controller()
        starting = asyncio.create_task(rig.controller.start())
        await settle()
        await rig.clock.advance(TIMEOUTS.unresponsive_s)
        await starting
    elif blow == "back":
        with contextlib.suppress(ConfigurationError):  # it is over
            await rig.controller.go_back()


async def test_without_this_wing_what_needs_new_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wings, "ROWS", ())
    async with started(pools=pools(1, 1)) as rig:
        with pytest.raises(ConfigurationError, match=r"not replaced while it serves: `tandem down`"):
            await rig.controller.apply(wish(rig), dry_run=False)
        assert (await rig.controller.configuration()) == rig.config
        await rig.controller.apply(replace(rig.config, pools=pools(1, 2)), dry_run=False)
        await settle()
        assert rig.routed == {"prefill-0", "decode-0", "decode-1"}
