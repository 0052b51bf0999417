"""A new configuration while the cluster serves: nodes are replaced one by one, or the whole change is rolled back. The deaths of a
controller at any of its steps, and other orders and an end meanwhile, are schedules of `tests/world/control.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.cluster.config import AutoscalingConfig, PoolConfig, RolloutConfig, TandemConfig
from tandem.cluster.control import ClusterView
from tandem.cluster.launcher import CheckKept, Offer
from tandem.cluster.pools import state, wings
from tandem.router.config import RouterConfig
from tandem.wire.nodes import PoolReport, Role, RouterQueue
from tests.cluster.pools.helpers import TIMEOUTS, FakeHosts, FakeNode, Rig, one_machine, settle, started
from tests.cluster.pools.pools_rig import machine, machines, pools, replace, seqs_of, with_seqs

LONG_S = 100.0


def wish(rig: Rig, *, model: str | None = None, **changes: object) -> TandemConfig:
    """The rig's configuration with a change that needs new nodes."""
    config = rig.config
    config = with_seqs(config) if model is None else replace(config, model=replace(config.model, path=model))
    return replace(config, **changes)


async def applied(rig: Rig, wanted: TandemConfig | None = None, seconds: float = LONG_S) -> ClusterView:
    """What the controller shows when it has had this much time for the change."""
    change = await rig.controller.apply(wanted or wish(rig), dry_run=False)
    assert not change.refused
    await rig.clock.advance(seconds)
    return await rig.controller.view()


def names(rig: Rig) -> set[str]:
    return {node.info.node_id for node in rig.launcher.running}


async def test_new_nodes_start_before_old_ones_go() -> None:
    async with started(pools=pools(1, 2)) as rig:
        rig.hold("prefill-1", "decode-2", "decode-3")
        change = await rig.controller.apply(wish(rig), dry_run=False)
        assert change.nodes == ["scheduler.max_num_seqs"]
        assert set(change.replaced) == {"prefill-0", "decode-0", "decode-1"}
        await rig.clock.advance(20.0)
        assert rig.routed == {"prefill-0", "decode-0", "decode-1"}, "nothing goes before something new is ready"
        assert names(rig) == {*rig.routed, "prefill-1", "decode-2"}
        rollout = (await rig.controller.view()).rollout
        assert (rollout.replaced, len(rollout.left)) == (0, 3)
        assert rig.launcher.router.pools[Role.DECODE] == PoolReport(Role.DECODE, 2, starting=1)
        rig.node("decode-2").may_start.set()
        await rig.clock.advance(1.5)
        rig.node("decode-2").mute.set()
        await rig.clock.advance(8.0)
        assert "decode-0" in rig.routed, "it became silent, and has not served long enough"
        rig.node("decode-2").mute.clear()
        await rig.clock.advance(20.0)
        assert rig.routed == {"prefill-0", "decode-1", "decode-2"}
        with pytest.raises(Unavailable, match="decode-1 is the last node with its configuration that can decode"):
            await rig.controller.drain_node("decode-1", 1.0)  # the new one may fail yet
        rig.node("prefill-1").may_start.set()
        rig.node("decode-3").may_start.set()
        await rig.clock.advance(60.0)
        assert rig.routed == names(rig) == {"prefill-1", "decode-2", "decode-3"}
        assert seqs_of(rig) == {77: 3}
        assert len(rig.launcher.routers) == 1, "the router goes on"
        view = await rig.controller.view()
        assert (view.rollout, view.revision) == (None, change.revision)
        assert view.decisions[-1].text == "the rollout is done"


async def test_a_new_content_is_the_revisions_own_and_the_old_one_stays_the_olds() -> None:
    async with started(pools=pools(1, 2)) as rig:
        await applied(rig, wish(rig, model="other"), 8.0)
        routed = {member.node_id: member.content for member in rig.launcher.router.memberships[-1]}
        assert len(set(routed.values())) == 2, routed
        old = next(iter({"decode-0", "decode-1"} & set(routed)))
        before = rig.node(old)
        before.die()
        await rig.clock.advance(3.0)
        assert rig.node(old).info.content == before.info.content, "it comes back as what it was"
        await rig.clock.advance(LONG_S)
        assert {node.info.content for node in rig.launcher.running} == {"the weights of other"}
        assert (await rig.controller.view()).rollout is None


def with_tokenizer(node: Any, tokenizer: str) -> None:
    node.info = replace(node.info, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda node: setattr(node, "start_error", ConfigurationError("there are no weights")), "there are no weights"),
        (lambda node: setattr(node, "finished", {"stop": 10, "error": 5}), "5 of its 15 requests ended with an error"),
        (lambda node: with_tokenizer(node, "another"), "tokenizer.json"),
    ],
    ids=["it does not start", "it answers with errors", "its model has another tokenizer"],
)
async def test_what_is_wrong_with_new_nodes_takes_all_back(spoil: Callable[[Any], None], why: str) -> None:
    def prepare(node: FakeNode, _: int) -> None:
        is_new = node.config.engine.model.path == "other"
        spoil(node) if is_new else with_tokenizer(node, "old")

    async with Rig(pools=pools(1, 2)) as rig:
        rig.launcher.prepare |= {f"{role.value}-{number}": prepare for role in Role for number in range(9)}
        await rig.start()
        view = await applied(rig, wish(rig, model="other"))
        assert rig.routed == names(rig) == {"prefill-0", "decode-0", "decode-1"}, "none of them was touched"
        assert (view.rollout, view.revision) == (None, 0)
        assert any("taken back: " in one.text and why in one.text for one in view.decisions)
        assert (await rig.controller.configuration()).model == rig.config.model


async def test_a_controller_that_finds_no_node_which_decodes_takes_the_rollout_back() -> None:
    """Without a rollout its start would fail: nothing could answer."""

    def prepare(node: FakeNode, _: int) -> None:
        if node.config.engine.model.path == "other":
            node.start_error = Unavailable("not this one")

    config = TandemConfig(router=RouterConfig("model", "fake"), rollout=RolloutConfig(max_unavailable=1))
    async with Rig(pools=pools(1, 1), config=config) as rig:
        rig.launcher.prepare |= {f"{role.value}-{number}": prepare for role in Role for number in range(9)}
        await rig.start()
        await rig.controller.apply(wish(rig, model="other"), dry_run=False)
        await rig.next_controller(TIMEOUTS.unresponsive_s)
        await rig.clock.advance(LONG_S)
        assert (await rig.controller.view()).rollout is None
        assert {node.config.engine.model.path for node in rig.launcher.running} == {rig.config.model.path}
        assert rig.routed == names(rig)
        assert len(rig.routed) == 2


@pytest.mark.parametrize(("sender", "blocks"), [("prefill-1", 3), ("prefill-1", 2), ("prefill-0", 9)])
async def test_what_sends_kv_that_others_find_wrong_is_taken_back(sender: str, blocks: int) -> None:
    """Fewer blocks may have been a link's fault, and those of an old node are no reason to keep it."""
    is_taken_back = (sender, blocks) == ("prefill-1", 3)
    async with started(pools=pools(1, 1)) as rig:
        rig.launcher.prepare["decode-1"] = lambda node, _: setattr(node, "wrong_kv", {sender: blocks})
        view = await applied(rig)
        assert seqs_of(rig) == {rig.config.scheduler.max_num_seqs if is_taken_back else 77: 2}
        why = "taken back: prefill-1: the KV that it sent to decode-1 is wrong"
        assert any(why in one.text for one in view.decisions) == is_taken_back


async def test_while_requests_wait_too_long_nothing_goes() -> None:
    async with started(pools=pools(1, 2)) as rig:
        rig.launcher.router.load = RouterQueue(5, 60.0)
        await rig.clock.advance(2 * TIMEOUTS.heartbeat_s)
        rollout = (await applied(rig, seconds=30.0)).rollout
        assert {"prefill-0", "decode-0", "decode-1"} <= rig.routed
        assert "slo.ttft_s" in rollout.waits
        rig.launcher.router.load = RouterQueue()
        await rig.clock.advance(60.0)
        assert (await rig.controller.view()).rollout is None
        assert seqs_of(rig) == {77: 3}


async def test_where_no_machine_has_room_for_more_one_goes_first_and_never_the_last_that_writes_answers() -> None:
    async with started(pools=pools(1, 2), hosts=machines("pdd")) as rig:
        assert (await applied(rig)).rollout is None
        assert seqs_of(rig) == {77: 3}
    none_more = TandemConfig(router=RouterConfig("model", "fake"), rollout=RolloutConfig(surge=0, max_unavailable=1))
    async with started(pools=pools(1, 2), config=none_more) as rig:
        await applied(rig, seconds=0.0)
        for _ in range(int(LONG_S)):
            await rig.clock.advance(1.0)
            assert len(names(rig)) <= 3
            assert rig.routed & {f"decode-{number}" for number in range(4)}
        assert seqs_of(rig) == {77: 3}
    async with started(pools=pools(1, 1), hosts=machines("pd")) as rig:
        rollout = (await applied(rig, seconds=60.0)).rollout
        assert "decode-0" in rig.routed
        assert "decode-1: no machine has room" in rollout.waits
        assert "rollout.max_unavailable" in rollout.waits
        rig.hosts.join(machine("2", decode=1))
        await rig.clock.advance(60.0)
        assert (await rig.controller.view()).rollout is None
        assert seqs_of(rig) == {77: 2}


async def test_what_lacks_a_machine_or_is_left_out_anyway_keeps_no_rollout_from_its_end() -> None:
    async with Rig(pools=pools(1, 3), hosts=machines("ppdd")) as rig:
        rig.refuse("decode-1", ConfigurationError("never"))
        rig.refuse("prefill-1", Unavailable("not now"))
        rig.refuse("decode-3", Unavailable("not now"))
        await rig.start(10.0)
        assert rig.routed == {"prefill-0", "decode-0"}
        view = await applied(rig)
        assert (view.rollout, view.revision) == (None, 0), "it was taken back"
        assert {"prefill-0", "decode-0"} <= rig.routed


async def test_a_node_that_was_left_out_on_the_way_back_is_tried_again_with_its_pool() -> None:
    """It has the place that the rollout has beyond the pool's size, so without it no old node can go."""
    async with started(pools=pools(1, 1), hosts=FakeHosts(one_machine(16))) as rig:
        old = rig.node("decode-0")
        old.may_finish.clear()
        rig.refuse("decode-2", Unavailable("out of reach"), times=3)
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
        controller = rig.controller
        renamed = replace(rig.config, router=replace(rig.config.router, model_name="other"))
        with pytest.raises(ConfigurationError, match=r"model\.served_name: fake"):
            await controller.apply(renamed, dry_run=True)
        with pytest.raises(ConfigurationError, match="would be left to decode"):
            await controller.apply(replace(rig.config, pools=pools(1, 0)), dry_run=False)
        with pytest.raises(ConfigurationError, match="no rollout"):
            await controller.go_back()
        await controller.apply(wish(rig), dry_run=False)
        with pytest.raises(Unavailable, match="a rollout is running"):
            await controller.apply(with_seqs(rig.config, 5), dry_run=False)
        with pytest.raises(Unavailable, match="a rollout is replacing nodes"):
            await controller.change_role("prefill-0", Role.DECODE)
        await rig.clock.advance(4.0)
        await controller.go_back()
        await rig.clock.advance(LONG_S)
        assert seqs_of(rig) == {rig.config.scheduler.max_num_seqs: 2}


async def test_sizes_and_the_configuration_are_recorded_together() -> None:
    """A controller that dies between two records would leave half of the change."""
    async with started(pools=pools(1, 2)) as rig:
        saved, keep = [], rig.store.save

        async def counting(kept: bytes, check: CheckKept | None = None) -> None:
            saved.append(state.decode(kept))
            await keep(kept, check)

        rig.store.save = counting
        await applied(rig, wish(rig, pools=pools(2, 1)))
        first = saved[0]
        assert (first.sizes[Role.PREFILL], first.sizes[Role.DECODE]) == (2, 1)
        assert first.revision.config.scheduler.max_num_seqs == 77
        assert seqs_of(rig) == {77: 3}


async def test_a_store_that_takes_nothing_for_a_while_only_delays_a_rollout() -> None:
    full = Unavailable("no space left on device")
    async with started(pools=pools(1, 2), hosts=FakeHosts(one_machine(16))) as rig:
        before = await rig.controller.configuration()
        router = replace(rig.config.router, max_failovers=7)
        rig.store.error = full
        with pytest.raises(Unavailable, match="no space left"):
            await rig.controller.apply(wish(rig, router=router), dry_run=False)
        assert await rig.controller.configuration() == before
        rig.store.error = None
        await rig.controller.apply(wish(rig, router=router), dry_run=False)
        for _ in range(12):
            rig.store.error = full
            await rig.clock.advance(9.0)
            assert any(node.config.role is Role.DECODE for node in rig.launcher.running)
            rig.store.error = None
            await rig.clock.advance(4.0)
        await rig.clock.advance(LONG_S)
        assert (await rig.controller.view()).rollout is None
        assert not any("taken back" in text for text in await rig.decided())
        assert seqs_of(rig) == {77: 3}


@pytest.mark.parametrize("decode", [1, 4])
async def test_a_pool_that_is_scaled_during_a_rollout_has_its_size_and_one_configuration(decode: int) -> None:
    async with started(pools=pools(1, 2), hosts=FakeHosts(one_machine(16))) as rig:
        await applied(rig, wish(rig, router=replace(rig.config.router, max_failovers=7)), 9.0)
        await rig.controller.scale({Role.DECODE: decode})
        await rig.clock.advance(LONG_S)
        assert (await rig.controller.view()).rollout is None
        assert not any("taken back" in text for text in await rig.decided())
        assert seqs_of(rig) == {77: 1 + decode}


async def test_without_this_wing_what_needs_new_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wings, "ROWS", ())
    async with started(pools=pools(1, 1)) as rig:
        with pytest.raises(ConfigurationError, match=r"not replaced while it serves: `tandem down`"):
            await rig.controller.apply(wish(rig), dry_run=False)
        assert (await rig.controller.configuration()) == rig.config
        await rig.controller.apply(replace(rig.config, pools=pools(1, 2)), dry_run=False)
        await settle()
        assert rig.routed == {"prefill-0", "decode-0", "decode-1"}


ENOUGH_S = 100.0


def changed(config: TandemConfig, **decode: object) -> TandemConfig:
    return replace(config, pools=replace(config.pools, decode=replace(config.pools.decode, **decode)))


def three_machines() -> FakeHosts:
    """One machine in zone b and two in zone a; the first decode nodes are on these two."""
    head = replace(one_machine(8), slots={}, fits=frozenset())
    hosts = FakeHosts(head, *(machine(name, prefill=1, decode=2) for name in "123"))
    resources = {"prefill": 1.0, "decode": 2.0}
    names = [host.name for host in hosts.hosts[1:]]
    hosts.offers = {
        name: Offer(resources | ({"GPU": 2.0} if zone == "b" else {}), {"zone": zone})
        for name, zone in zip(names, "baa", strict=True)
    }
    return hosts


def places_of(rig: Rig, role: Role) -> list[str]:
    return sorted(node.host.name for node in rig.launcher.running if node.config.role is role)


async def labelled(rig: Rig, zone: str, seconds: float) -> None:
    """Decode nodes are wanted in this zone, for so long."""
    await rig.controller.apply(changed(rig.config, label_selector={"zone": zone}), dry_run=False)
    await rig.clock.advance(seconds)


@pytest.mark.parametrize("wanted", [{"label_selector": {"zone": "b"}}, {"resources": {"GPU": 1}}])
async def test_a_pool_moves_to_machines_that_fit_and_none_of_its_places_is_empty_meanwhile(
    wanted: dict[str, dict[str, object]],
) -> None:
    hosts = three_machines()
    only = hosts.hosts[1].name
    async with started(pools=pools(1, 2), hosts=hosts) as rig:
        assert only not in places_of(rig, Role.DECODE)
        change = await rig.controller.apply(changed(rig.config, **wanted), dry_run=False)
        assert change.refused == []
        fewest = 2
        for _ in range(int(ENOUGH_S)):
            await rig.clock.advance(1.0)
            view = await rig.controller.view()
            fewest = min(fewest, sum(node.role == "decode" and node.phase == "ready" for node in view.nodes))
        assert (view.rollout, view.revision) == (None, change.revision)
        assert places_of(rig, Role.DECODE) == [only, only]
        assert fewest >= 1
        new = [node for node in rig.launcher.running if node.config.role is Role.DECODE]
        assert all(node.needs == wanted.get("resources", {}) for node in new)


async def test_where_no_machine_fits_no_node_goes_and_in_the_end_all_is_taken_back() -> None:
    patient = replace(TIMEOUTS, machines_s=90.0)
    async with started(pools=pools(1, 2), hosts=three_machines(), timeouts=patient) as rig:
        before = {node.info.node_id for node in rig.launcher.running}
        await labelled(rig, "c", 60.0)
        view = await rig.controller.view()
        assert "no machine has what a node needs with the new configuration" in view.rollout.waits
        serving = {node.info.node_id for node in rig.launcher.running if node.config.role is Role.DECODE}
        assert serving <= before, "the old ones serve"
        assert len(serving) == 2
        await rig.clock.advance(90.0)
        view = await rig.controller.view()
        assert view.rollout is None
        assert any("taken back: decode: no machine has" in one.text for one in view.decisions)
        assert (await rig.controller.configuration()).pools == rig.config.pools
        assert len(places_of(rig, Role.DECODE)) == 2


async def test_a_machine_that_comes_in_time_is_used() -> None:
    hosts = three_machines()
    async with started(pools=pools(1, 1), hosts=hosts) as rig:
        await labelled(rig, "c", 60.0)
        late = machine("4", prefill=1, decode=2)
        hosts.offers[late.name] = Offer({"prefill": 1.0, "decode": 2.0}, {"zone": "c"})
        hosts.join(late)
        await rig.clock.advance(ENOUGH_S)
        assert (await rig.controller.view()).rollout is None
        assert places_of(rig, Role.DECODE) == [late.name]


async def test_a_pool_that_follows_the_machines_does_not_shrink_before_its_new_places_serve() -> None:
    hosts = three_machines()
    kept = [host.name for host in hosts.hosts[2:4]]
    async with started(pools=replace(pools(1, 1), decode=PoolConfig(nodes=None)), hosts=hosts) as rig:
        assert len(places_of(rig, Role.DECODE)) == 6
        await labelled(rig, "a", 0.0)
        fewest = 6
        for _ in range(int(ENOUGH_S)):
            await rig.clock.advance(1.0)
            fewest = min(fewest, len(places_of(rig, Role.DECODE)))
        assert (await rig.controller.view()).rollout is None
        assert places_of(rig, Role.DECODE) == sorted(kept * 2)
        assert fewest >= 3


async def test_a_controller_that_comes_back_in_the_middle_finds_old_and_new_nodes_where_they_are() -> None:
    hosts = three_machines()
    async with started(pools=pools(1, 2), hosts=hosts) as rig:
        await labelled(rig, "b", 4.0)
        running = {id(node) for node in rig.launcher.running}
        await rig.next_controller()
        assert running <= {id(node) for node in rig.launcher.running}, "none was lost"
        await rig.clock.advance(ENOUGH_S)
        assert (await rig.controller.view()).rollout is None
        assert places_of(rig, Role.DECODE) == [hosts.hosts[1].name] * 2
