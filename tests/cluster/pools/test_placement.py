"""Places for nodes: on which machines they start, how many one machine gets, and the message when there are too few."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.base.errors import ConfigurationError
from tandem.base.logs import LogsQuery
from tandem.cluster.config import PoolConfig, PoolsConfig, TandemConfig
from tandem.cluster.describe import parse_size
from tandem.cluster.launcher import Host, Offer, TakenPlace
from tandem.cluster.pools.placement import (
    LocalMachine,
    MachineFacts,
    node_config,
    of_one_machine,
    ordered_cores,
    place,
    place_nodes,
    router_config,
    share_cores,
    visible_gpus,
)
from tandem.cluster.pools.room import AROUND_BYTES, NODE_BYTES, check_memory, lacking, places, places_left
from tandem.cluster.pools.state import ClosedSlot, NodePlacement, NodeRecord
from tandem.engine.config import CacheConfig, ModelConfig
from tandem.kvtransfer.config import TierConfig
from tandem.router.config import RouterConfig
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import FakeHosts, Rig, settle, started
from tests.cluster.pools.pools_rig import DRAIN_S, PD, machine, machines, pool_of, pools


def config(
    prefill: PoolConfig | int = 0, decode: PoolConfig | int = 0, aggregated: PoolConfig | int = 0, kv: int | None = None
) -> TandemConfig:
    asked = {"prefill": prefill, "decode": decode, "aggregated": aggregated}
    made = {name: PoolConfig(nodes=pool) if isinstance(pool, int) else pool for name, pool in asked.items()}
    return TandemConfig(pools=PoolsConfig(**made), cache=CacheConfig(memory_bytes=kv))


def with_threads(*threads: int | None) -> list[PoolConfig]:
    return [PoolConfig(nodes=1, threads=count) for count in threads]


def placed_on(asked: TandemConfig, here: LocalMachine) -> dict[str, NodePlacement]:
    return {node.node_id: node.placement for node in place_nodes(asked, here)}


def placed(asked: TandemConfig, hosts: list[Host], nodes: list[NodeRecord], role: Role) -> NodePlacement:
    found = place(asked, hosts, nodes, role)
    assert found is not None
    return found


def cores_of(nodes: list[NodeRecord]) -> dict[str, tuple[int, ...]]:
    return {node.node_id: node.placement.cores for node in nodes}


def machine_with(cores: int, gpus: int = 0) -> LocalMachine:
    return LocalMachine(tuple(range(cores)), gpus)


@pytest.mark.parametrize(
    ("asked", "cores", "placed"),
    [
        (config(1, 1), 2, [(0,), (1,)]),
        (config(aggregated=1), 4, [(0, 1, 2, 3)]),
        (config(1, 1), 5, [(0, 1, 2), (3, 4)]),
        (config(PoolConfig(nodes=2, threads=1), 1), 8, [(0,), (1,), (2, 3, 4, 5, 6, 7)]),
        (config(2, 2), 2, [(0,), (1,), (0,), (1,)]),
    ],
    ids=["one each", "alone", "the odd core", "a count of its own", "in turns"],
)
def test_cores_are_divided_and_who_reads_prompts_comes_first(
    asked: TandemConfig, cores: int, placed: list[tuple[int, ...]]
) -> None:
    assert list(cores_of(place_nodes(asked, machine_with(cores))).values()) == placed


def test_more_cores_than_there_are_is_a_mistake_that_names_both_numbers() -> None:
    for threads in ((3, 3), (4, None)):
        with pytest.raises(ConfigurationError, match=r"asks for \d cores.* this machine has 4"):
            place_nodes(config(*with_threads(*threads)), machine_with(4))
    container = LocalMachine(tuple(range(64)), quota=3)
    assert cores_of(place_nodes(config(1, 1), container)) == {"prefill-0": (0, 1), "decode-0": (2,)}
    with pytest.raises(ConfigurationError, match="this machine has 3"):
        place_nodes(config(*with_threads(None, 3)), container)
    with pytest.raises(ConfigurationError, match="too many for 3 cores"):
        place_nodes(config(6, 7), container)


@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 40))
def test_with_enough_cores_every_core_has_exactly_one_node(prefill: int, decode: int, cores: int) -> None:
    asked = config(prefill, decode)
    asked = msgspec.structs.replace(asked, pools=msgspec.structs.replace(asked.pools, nodes_per_core=10))
    shares = cores_of(place_nodes(asked, machine_with(cores))).values()
    assert len(shares) == prefill + decode
    given_out = [core for share in shares for core in share]
    if 0 < prefill + decode <= cores:
        assert sorted(given_out) == list(range(cores))
    assert all(shares)
    sizes = [len(share) for share in shares]
    assert not sizes or max(sizes) - min(sizes) <= 1


SLOTS = st.fixed_dictionaries({Role.PREFILL: st.integers(0, 3), Role.DECODE: st.integers(0, 3)})


@given(SLOTS, st.integers(0, 5), st.lists(st.tuples(st.sampled_from(Role), st.integers(0, 5), st.booleans())))
def test_nodes_that_come_and_go_on_a_machine_never_share_its_cores(
    slots: dict[Role, int], spare: int, moves: list[tuple[Role, int, bool]]
) -> None:
    cores = tuple(range(max(1, sum(slots.values()) + spare)))
    host = Host("h", "10.0.0.1", cores, slots=slots)
    nodes: list[NodeRecord] = []
    closed: list[ClosedSlot] = []
    for number, (role, which, comes) in enumerate(moves):
        if comes:
            placement = place(config(1, 1), [host], nodes, role, closed)
            room = slots.get(role, 0) - sum(slot.role is role for slot in closed)
            assert (placement is not None) == (sum(node.role is role for node in nodes) < room)
            if placement is not None:
                nodes.append(NodeRecord(str(number), role, placement))
        elif which < len(nodes):
            gone = nodes.pop(which)
            if which % 2:
                closed.append(ClosedSlot("h", gone.role))
        elif closed:
            closed.clear()
        given_out = [core for node in nodes if node.placement for core in node.placement.cores]
        assert len(given_out) == len(set(given_out))
        assert all(node.placement and node.placement.cores for node in nodes)


def test_a_machine_with_places_of_every_kind_gives_its_cores_to_the_layout_that_is_used() -> None:
    slots = {Role.PREFILL: 1, Role.DECODE: 1, Role.AGGREGATED: 1}
    host = Host("h", "10.0.0.1", (0, 1, 2, 3), slots=slots)
    assert placed(config(aggregated=1), [host], [], Role.AGGREGATED).cores == (0, 1, 2, 3)
    assert len(placed(config(1, 1), [host], [], Role.DECODE).cores) == 2


@given(
    st.permutations([Role.PREFILL] * 3 + [Role.DECODE] * 3),
    st.lists(st.sampled_from(["east", "west"]), min_size=6, max_size=6),
)
def test_each_island_gets_as_many_of_both_roles_as_it_can(order: list[Role], islands: list[str]) -> None:
    slots = {Role.PREFILL: 1, Role.DECODE: 1}
    hosts = [Host(str(number), "", (0, 1), slots=slots, island=island) for number, island in enumerate(islands)]
    nodes: list[NodeRecord] = []
    for number, role in enumerate(order):
        nodes.append(NodeRecord(str(number), role, placed(config(3, 3), hosts, nodes, role)))
    there = Counter((islands[int(node.placement.host)], node.role) for node in nodes)
    for island in set(islands):
        assert abs(there[island, Role.PREFILL] - there[island, Role.DECODE]) <= 1


def test_a_node_on_several_machines_stays_in_one_island() -> None:
    hosts = [Host(name, name, (0,), slots={Role.PREFILL: 1}, island=name[0]) for name in ("a1", "b1", "a2", "b2")]
    asked = config(PoolConfig(nodes=2, machines=2))
    first = placed(asked, hosts, [], Role.PREFILL)
    second = placed(asked, hosts, [NodeRecord("0", Role.PREFILL, first)], Role.PREFILL)
    assert (first.hosts, second.hosts) == (["a1", "a2"], ["b1", "b2"])


def test_the_emptiest_machine_comes_first() -> None:
    hosts = [Host(name, name, (0, 1), slots={Role.DECODE: 2}) for name in ("a", "b")]
    nodes: list[NodeRecord] = []
    for number in range(4):
        nodes.append(NodeRecord(str(number), Role.DECODE, place(config(0, 4), hosts, nodes, Role.DECODE)))
    assert [node.placement.host for node in nodes] == ["a", "b", "a", "b"]
    assert place(config(0, 4), hosts, nodes, Role.DECODE) is None


def test_nodes_take_turns_on_gpus_and_share_the_memory_of_each() -> None:
    found = placed_on(config(2, 1), machine_with(8, gpus=2)).values()
    shares = [(placement.device, placement.memory_share) for placement in found]
    assert shares == [("cuda:0", 0.425), ("cuda:1", 0.85), ("cuda:0", 0.425)]


def gpus_of(asked: TandemConfig, placement: NodePlacement) -> set[int]:
    first = int(placement.device.removeprefix("cuda:"))
    return set(range(first, first + asked.pools.of(placement.slot).ranks))


@given(
    prefill=st.tuples(st.integers(0, 4), st.integers(1, 4)),
    decode=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    gpus=st.integers(4, 12),
)
def test_a_nodes_gpus_follow_one_another_and_are_shared_only_where_there_are_too_few(
    prefill: tuple[int, int], decode: tuple[int, int], gpus: int
) -> None:
    asked = config(*(PoolConfig(nodes=count, tensor_parallel=width) for count, width in (prefill, decode)))
    placements = placed_on(asked, machine_with(16, gpus=gpus)).values()
    used = [0] * gpus
    for placement in placements:
        for gpu in gpus_of(asked, placement):  # raises where there is none of that number
            used[gpu] += 1
    if sum(count * width for count, width in (prefill, decode)) <= gpus:
        assert max(used) == 1
    for placement in placements:
        sharing = max(used[gpu] for gpu in gpus_of(asked, placement))
        assert placement.memory_share * sharing <= 0.85 + 1e-9


def test_a_node_of_more_ranks_than_gpus_is_refused_before_it_starts() -> None:
    with pytest.raises(ConfigurationError, match=r"decode node has 4 ranks .* this machine has 2 GPUs"):
        placed_on(config(0, PoolConfig(nodes=1, tensor_parallel=4)), machine_with(8, gpus=2))


def test_a_device_that_was_named_is_kept_and_nodes_of_one_machine_divide_its_memory() -> None:
    asked = msgspec.structs.replace(config(1, 1), model=ModelConfig(path="m", device="cuda:3"))
    assert {placement.device for placement in placed_on(asked, machine_with(2, gpus=8)).values()} == {"cuda:3"}
    asked = msgspec.structs.replace(config(1, 3), cache=CacheConfig(memory_share=0.8))
    assert {placement.memory_share for placement in placed_on(asked, machine_with(4)).values()} == {0.2}


def test_a_node_is_told_its_cores_threads_and_share() -> None:
    asked = config(1, 1)
    place = msgspec.structs.replace(placed_on(asked, machine_with(4))["prefill-0"], address="10.0.0.1")
    told = node_config(asked, "prefill-0", Role.PREFILL, place)
    assert (told.node_id, told.role, told.host) == ("prefill-0", Role.PREFILL, "10.0.0.1")
    assert (told.cores, told.engine.model.threads) == ([0, 1], 2)
    assert told.engine.cache.memory_share == 0.25
    assert told.transfer == asked.transfer
    assert told.timeouts == asked.timeouts.nodes


def test_a_pools_own_options_come_before_those_of_all_nodes_and_an_aggregated_node_has_no_transfer() -> None:
    asked = config(1, 1)
    place = placed_on(asked, machine_with(4))["prefill-0"]
    replace = msgspec.structs.replace
    decode = replace(asked.pools.decode, transfer_options={"progress_ms": "5", "backend.num_workers": "2"})
    transfer = replace(asked.transfer, options={"progress_ms": "9", "backend": "UCX"})
    asked = replace(asked, pools=replace(asked.pools, decode=decode), transfer=transfer)
    told = node_config(asked, "decode-0", Role.DECODE, place).transfer
    assert told.options == {"progress_ms": "5", "backend.num_workers": "2", "backend": "UCX"}
    assert node_config(asked, "prefill-0", Role.PREFILL, place).transfer == asked.transfer
    (place,) = placed_on(config(aggregated=1), machine_with(1)).values()
    assert node_config(config(aggregated=1), "aggregated-0", Role.AGGREGATED, place).transfer is None


def test_hardware_threads_of_one_core_stay_together_where_the_kernel_tells(tmp_path: Path) -> None:
    assert ordered_cores({3, 1, 2}, tmp_path) == (1, 2, 3)
    for cpu, core in enumerate([0, 1, 2, 0, 1, 2]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0\n")
        (folder / "core_id").write_text(f"{core}\n")
    assert ordered_cores({0, 1, 2, 3, 4, 5}, tmp_path) == (0, 3, 1, 4, 2, 5)
    assert ordered_cores({5, 1, 2}, tmp_path) == (1, 2, 5)


@pytest.mark.parametrize(
    ("listed", "count"), [(None, 2), ("", 0), ("0", 1), ("0,1", 2), ("-1", 0), ("0,-1,1", 1), ("0,1,2,3", 2)]
)
def test_only_gpus_that_this_process_may_use_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str | None, count: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    for torch, usable in (("2.13.0+cu130", count), ("2.13.0+cpu", 0)):
        monkeypatch.setattr("importlib.metadata.version", lambda package, torch=torch: torch)
        assert visible_gpus(environ, tmp_path) == usable


def test_a_router_on_another_machine_has_that_machine_s_addresses() -> None:
    config = RouterConfig(tokenizer_path="m", model_name="m", host="10.0.0.1", inbox_host="10.0.0.1")
    there = router_config(config, "10.0.0.2")
    assert (there.host, there.inbox_host) == ("10.0.0.2", "10.0.0.2")
    everywhere = router_config(msgspec.structs.replace(config, host="0.0.0.0"), "10.0.0.2")
    assert (everywhere.host, everywhere.inbox_host) == ("0.0.0.0", "10.0.0.2")


def test_encoder_nodes_have_cores_of_their_own_beside_either_layout() -> None:
    asked = config(1, 1)
    asked = msgspec.structs.replace(asked, pools=msgspec.structs.replace(asked.pools, encode=PoolConfig(nodes=1)))
    found = placed_on(asked, machine_with(3))
    assert found.keys() == {"prefill-0", "decode-0", "encode-0"}
    assert len({core for each in found.values() for core in each.cores}) == 3
    assert node_config(asked, "encode-0", Role.ENCODE, found["encode-0"]).transfer is None
    slots = {Role.PREFILL: 1, Role.DECODE: 1, Role.ENCODE: 1}
    host = Host("h", "10.0.0.1", (0, 1, 2, 3), slots=slots)
    assert len(placed(config(1, 1), [host], [], Role.DECODE).cores) == 2, (
        "no core waits for an encoder node that is not asked for"
    )


def spread(nodes: int | None) -> PoolConfig:
    return PoolConfig(nodes=nodes, tensor_parallel=4, machines=2, resources={"GPU": 4})


def places_for(*counts: int, gpus: int = 0) -> list[Host]:
    return [
        Host(f"m{n}", f"10.0.0.{n}", tuple(range(8)), gpus, {Role.PREFILL: count}) for n, count in enumerate(counts)
    ]


def test_a_spread_node_has_a_place_on_each_of_its_machines() -> None:
    asked, hosts = config(spread(1)), places_for(1, 2, 1)
    first = placed(asked, hosts, [], Role.PREFILL)
    assert first.hosts == ["m0", "m1"]
    one = NodeRecord("prefill-0", Role.PREFILL, first)
    second = placed(asked, hosts, [one], Role.PREFILL)
    assert sorted(second.hosts) == ["m1", "m2"], "each has a place left, and none has two parts of one node"
    (shared,) = (part.cores for part in second.parts if part.host == "m1")
    (taken,) = (part.cores for part in first.parts if part.host == "m1")
    assert not set(shared) & set(taken)
    both = [one, NodeRecord("prefill-1", Role.PREFILL, second)]
    assert place(asked, hosts, both, Role.PREFILL) is None
    assert place(asked, places_for(2), [], Role.PREFILL) is None, "not twice on one machine"


def test_a_spread_node_is_told_of_its_other_machines() -> None:
    asked = config(spread(1))
    placement = placed(asked, places_for(1, 1, gpus=2), [], Role.PREFILL)
    told = node_config(asked, "prefill-0", Role.PREFILL, placement)
    assert (told.host, told.machines, told.ranks) == ("10.0.0.0", 2, 4)
    assert [(there.host, there.cores, there.device) for there in told.others] == [
        ("10.0.0.1", list(range(8)), "cuda:0")
    ]
    assert place(asked, places_for(1, 1, gpus=1), [], Role.PREFILL) is None, "two ranks on a machine want two GPUs"


def test_what_one_machine_carries_of_a_spread_node_is_a_part_of_it() -> None:
    here = of_one_machine(config(spread(1)))
    assert (here.pools.prefill.ranks, here.pools.prefill.resources) == (2, {"GPU": 2})
    assert place_nodes(here, machine_with(8, gpus=2))
    assert of_one_machine(config(1, 1)) == config(1, 1)
    with pytest.raises(ConfigurationError, match=r"pools\.prefill\.machines is 2, and this is one machine"):
        place_nodes(config(spread(1)), machine_with(8))


def test_a_machine_has_as_many_places_as_its_scarcest_resource_allows() -> None:
    offers = Offer({"prefill": 1.0, "decode": 3.0, "GPU": 4.0})
    assert places(offers, {}) == {Role.PREFILL: 1, Role.DECODE: 3}
    assert places(offers, {Role.DECODE: Offer({"GPU": 2})}) == {Role.PREFILL: 1, Role.DECODE: 2}
    assert places(Offer({"decode": 1.0}), {Role.DECODE: Offer({"GPU": 1})}) == {}


def test_a_machine_without_the_labels_that_a_pool_wants_has_no_place_for_it() -> None:
    needs = {Role.DECODE: Offer({}, {"zone": "in(a, b)"})}
    both = {"prefill": 1.0, "decode": 1.0}
    assert places(Offer(both, {"zone": "b"}), needs) == {Role.PREFILL: 1, Role.DECODE: 1}
    assert places(Offer(both, {"zone": "c"}), needs) == {Role.PREFILL: 1}
    assert places(Offer(both), needs) == {Role.PREFILL: 1}


def test_what_no_machine_offers_is_said_with_how_to_offer_it() -> None:
    one, following = PoolConfig(nodes=1), PoolConfig(nodes=None)
    assert lacking(config(one, one), [Offer({"prefill": 1.0}), Offer({"decode": 2.0})]) == []
    wanted = config(2, PoolConfig(nodes=1, resources={"GPU": 1}))
    prefill, decode = lacking(wanted, [Offer({"prefill": 1.0, "decode": 4.0})])
    assert "pools.prefill wants 2 nodes, but the cluster's machines have room for 1" in prefill
    assert "no room for any" in decode
    assert """ray start --resources '{"decode": 1, "GPU": 1}'""" in decode
    wanted = config(one, PoolConfig(nodes=1, label_selector={"zone": "!a"}))
    (said,) = lacking(wanted, [Offer({"prefill": 1.0, "decode": 1.0}, {"zone": "a"})])
    assert said.startswith("pools.decode wants 1 node, but the cluster's machines have no room for any")
    assert "with the labels {zone: !a} (ray start --resources '{\"decode\": 1}' --labels KEY=VALUE" in said
    for asked, pool in ((config(following, following), "decode"), (config(aggregated=following), "aggregated")):
        (said,) = lacking(asked, [])
        assert f"pools.{pool} wants 1 node" in said


def test_nodes_that_were_made_with_other_needs_stay_and_others_get_what_they_leave() -> None:
    machine = Offer({"decode": 4.0, "prefill": 1.0, "GPU": 4.0}, {"zone": "a"})
    two_gpus = {Role.DECODE: Offer({"GPU": 2}), Role.PREFILL: Offer({"GPU": 1})}
    old = [TakenPlace("m", Role.DECODE, Offer({"decode": 1.0, "GPU": 1}))] * 2
    assert places_left(machine, two_gpus, old) == {Role.DECODE: 3, Role.PREFILL: 1}, "two GPUs are left"
    assert places_left(machine, two_gpus, old[:1]) == {Role.DECODE: 2, Role.PREFILL: 1}
    assert places_left(machine, two_gpus, []) == {Role.DECODE: 2, Role.PREFILL: 1}
    elsewhere = {Role.DECODE: Offer({}, {"zone": "b"})}
    assert places_left(machine, elsewhere, old) == {Role.DECODE: 2, Role.PREFILL: 1}, "what is there, and no more"
    same = [TakenPlace("m", Role.DECODE, Offer({"decode": 1.0, "GPU": 2}))]
    assert places_left(machine, two_gpus, same) == places(machine, two_gpus)


def hosts_of(rig: Rig, name: str) -> set[str]:
    node = rig.node(name)
    return {host.name for host in (node.host, *node.beside)}


async def test_a_spread_node_takes_a_place_on_each_of_its_machines() -> None:
    hosts = machines("p", "p", "p", "d")
    async with started(pools=pools(spread(2), 1), hosts=hosts) as rig:
        await settle()
        assert rig.routed == {"prefill-0", "decode-0"}
        node = rig.node("prefill-0")
        assert (node.host.name, [there.name for there in node.beside]) == ("1", ["2"])
        assert node.needs == {"GPU": 2}, "of each machine"
        assert [there.host for there in node.config.others] == ["10.0.0.2"]
        assert hosts.wanted == {Role.PREFILL: 4, Role.DECODE: 1}, "with the two that are to come"
        assert (await pool_of(rig, Role.PREFILL)).waiting_for_machines == 1
        hosts.join(machine("5", prefill=1))
        await settle()
        assert rig.routed == {"prefill-0", "prefill-1", "decode-0"}
        assert hosts_of(rig, "prefill-1") == {"3", "5"}


async def test_the_logs_of_its_machines_are_found_by_their_own_names_and_by_the_nodes() -> None:
    async with started(pools=pools(spread(1), 1), hosts=machines("p", "p", "d")) as rig:
        both = {"prefill-0", "prefill-0-machine1"}
        for name in ("prefill", "prefill-0"):
            assert (await rig.controller.logs(LogsQuery([name]))).pages.keys() == both
        assert (await rig.controller.logs(LogsQuery(["prefill-0-machine1"]))).pages.keys() == both - {"prefill-0"}
        assert both < (await rig.controller.logs(LogsQuery())).pages.keys()


@pytest.mark.parametrize("lost", ["1", "2"])
async def test_the_loss_of_either_machine_is_the_nodes_and_the_next_controllers_too(lost: str) -> None:
    hosts = machines("p", "p", "d")
    async with started(pools=pools(spread(1), 1), hosts=hosts) as rig:
        await settle()
        node = rig.node("prefill-0")
        await rig.next_controller()
        assert rig.node("prefill-0") is node
        assert not node.died.done()
        assert rig.routed == {"prefill-0", "decode-0"}
        rig.lose_machine(lost)
        await settle()
        assert rig.routed == {"decode-0"}
        assert any(f"its machine 10.0.0.{lost} is gone" in text for text in await rig.decided())
        hosts.join(machine("4", prefill=1))
        await settle()
        assert rig.routed == {"prefill-1", "decode-0"}, "the machine that is left, and the one that came"


async def test_a_pool_that_follows_the_machines_has_a_node_for_every_two() -> None:
    hosts = machines(*"ppppp", "d")
    async with started(pools=pools(spread(None), None), hosts=hosts) as rig:
        await settle()
        assert rig.routed == {"prefill-0", "prefill-1", "decode-0"}
        hosts.join(machine("7", prefill=1))
        await settle()
        assert rig.routed == {"prefill-0", "prefill-1", "prefill-2", "decode-0"}
        assert await rig.controller.drain_node("prefill-1", DRAIN_S)
        await settle()
        assert rig.routed == {"prefill-0", "prefill-2", "decode-0"}, "its two places stay empty"


async def test_a_machine_that_is_evacuated_takes_the_node_along() -> None:
    async with started(pools=pools(spread(1), 1), hosts=machines("p", "p", "p", "d")) as rig:
        await settle()
        assert await rig.during(rig.controller.evacuate("10.0.0.2", DRAIN_S), 0.0) == {"prefill-0": True}
        await settle()
        assert rig.routed == {"prefill-1", "decode-0"}
        assert hosts_of(rig, "prefill-1") == {"1", "3"}


MIB = 1 << 20
GIB = 1 << 30


def said_of_cores(config: TandemConfig, count: int) -> str:
    with pytest.raises(ConfigurationError) as caught:
        place_nodes(config, machine_with(count))
    return str(caught.value)


def said_of_memory(config: TandemConfig, free: int, weights: int = 0, *, on_cpu: bool = True) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check_memory(config, free, weights, on_cpu=on_cpu)
    return str(caught.value)


# --- cores


def test_more_nodes_than_may_share_the_cores_are_refused_with_how_many_fit() -> None:
    assert said_of_cores(config(64, 1), 2) == (
        "64 prefill nodes and 1 decode node are too many for 2 cores: nodes that share a core slow each other "
        "down, and 4 per core are the most, 8 in all: ask for fewer (--prefill, --decode)"
    )
    said = said_of_cores(config(1, PoolConfig(nodes=1, max=30)), 2)
    assert "1 prefill node and 30 decode nodes" in said, "a pool counts as large as it may become"
    assert "(--prefill, pools.decode.max)" in said
    assert len(place_nodes(config(7, 1), machine_with(2))) == 8
    assert len(place_nodes(config(9, 1), LocalMachine(cores=()))) == 10, "where the cores are unknown"


async def test_a_pool_is_not_scaled_beyond_what_the_cores_of_the_only_machine_take() -> None:
    async with started(*PD) as rig:  # four cores
        await rig.controller.scale({Role.DECODE: 15})
        with pytest.raises(ConfigurationError, match=r"1 prefill node and 16 decode nodes are too many for 4 cores"):
            await rig.controller.scale({Role.DECODE: 16})
        await rig.controller.scale({Role.DECODE: 1})
    async with started(*PD, hosts=FakeHosts(machine("1", prefill=1, decode=9, cores=1))) as rig:
        await rig.controller.scale({Role.DECODE: 9})  # a machine that offers places says how many it takes


# --- memory


def test_caches_that_the_machine_cannot_hold_are_refused_with_what_it_can() -> None:
    said = said_of_memory(config(1, 1, kv=900 * GIB), 20 * GIB)
    assert said == (
        "2 nodes with 900.0 GiB of KV cache each need at least 1.8 TiB of memory, and 20.0 GiB is free on this machine: "
        "give each at most 9.3GiB (--kv-memory)"
    )
    said = said_of_memory(config(3, 1, kv=6 * GIB), 20 * GIB)
    assert "4 nodes with 6.0 GiB of KV cache each need at least 26.0 GiB" in said
    assert "or ask for at most 3 nodes in all (--prefill, --decode)" in said
    check_memory(config(1, 1, kv=900 * GIB), None, 0, on_cpu=True)  # what is unknown is left to the nodes


def test_nodes_that_need_more_than_there_is_without_any_cache_are_refused() -> None:
    said = said_of_memory(config(64, 2), 20 * GIB)
    assert "66 nodes need at least 25.2 GiB of memory, and 20.0 GiB is free on this machine" in said
    assert "at most 52 nodes in all" in said
    assert "--kv-memory" not in said
    together = "is free on this machine: serve with one node that does both (--aggregated 1)"
    assert said_of_memory(config(1, 1), 1100 * MIB).endswith(together)
    for said in (said_of_memory(config(1, 1), 600 * MIB), said_of_memory(config(1, 1), 8 * GIB, weights=40 * GIB)):
        assert "end other processes on this machine" in said


def test_weights_count_for_every_node_that_holds_them_and_on_a_gpu_not_in_the_machines_memory() -> None:
    check_memory(config(1, 1), 20 * GIB, 8 * GIB, on_cpu=True)
    assert "at least" in said_of_memory(config(3, 1), 20 * GIB, 8 * GIB)
    check_memory(config(1, 1, kv=70 * GIB), 20 * GIB, 16 * GIB, on_cpu=False)
    assert "64 prefill" not in said_of_memory(config(64, 1), 20 * GIB, on_cpu=False)


@example(2, 2, 2 * GIB, AROUND_BYTES + 4 * (NODE_BYTES + 15 * (GIB // 10)), 0)  # hardly less than 1.5 GiB each
@given(st.integers(1, 9), st.integers(1, 9), st.integers(MIB, 1 << 42), st.integers(1, 1 << 42), st.integers(0, GIB))
def test_what_is_proposed_would_be_accepted(prefill: int, decode: int, kv: int, free: int, weights: int) -> None:
    try:
        check_memory(config(prefill, decode, kv=kv), free, weights, on_cpu=True)
    except ConfigurationError as error:
        said = str(error)
    else:
        assert AROUND_BYTES + (prefill + decode) * (NODE_BYTES + kv) <= free
        return
    less = re.search(r"at most (\S+) \(--kv-memory\)", said)
    fewer = re.search(r"at most (\d+) nodes in all", said)
    if less:
        check_memory(config(prefill, decode, kv=parse_size(less[1], "")), free, weights, on_cpu=True)
    if fewer:
        check_memory(config(int(fewer[1]) - 1, 1, kv=kv), free, weights, on_cpu=True)
    assert less or fewer or "--aggregated 1" in said or "end other processes" in said


def test_the_memory_of_tiers_counts_on_every_machine() -> None:
    tiers = CacheConfig(tiers=[TierConfig(cpu=10 * GIB)])
    said = said_of_memory(msgspec.structs.replace(config(1, 1), cache=tiers), 8 * GIB, on_cpu=False)
    assert "10.0 GiB of cache.tiers each" in said


MACHINES = st.dictionaries(
    st.integers(0, 9).map("host-{}".format),
    st.sampled_from([MachineFacts("a", (0, 1, 2, 3)), MachineFacts("b", (0, 1)), MachineFacts("c", (5,))]),
)


@pytest.mark.parametrize(
    ("hosts", "cores", "shares"),
    [
        ("h", (0, 4, 1, 5), [(0, 4, 1, 5)]),
        ("pd", (0, 1, 2), [(0, 1), (2,)]),
        ("abcde", (0, 1), [(0,), (1,), (0,), (1,), (0,)]),
    ],
    ids=["alone", "the odd core", "in turns"],
)
def test_hosts_of_one_machine_divide_its_cores(
    hosts: str, cores: tuple[int, ...], shares: list[tuple[int, ...]]
) -> None:
    assert list(share_cores({name: MachineFacts("a", cores) for name in hosts}, {}).values()) == shares


def test_one_that_comes_later_takes_what_is_used_least_and_no_more_than_its_quota_has_time_for() -> None:
    found = {name: MachineFacts("a", (0, 1, 2, 3)) for name in "pd"}
    given_ = share_cores(found, {})
    later = share_cores(found | {"x": MachineFacts("a", (0, 1, 2, 3))}, given_ | {"gone": (0, 1)})
    assert later == given_ | {"x": (0,)}
    pods = {"p": MachineFacts("a", tuple(range(64)), quota=2), "d": MachineFacts("a", tuple(range(64)), quota=4)}
    assert share_cores(pods, {}) == {"p": (0, 1), "d": (2, 3, 4, 5)}
    tight = {name: MachineFacts("a", (0, 1, 2), quota=2) for name in "pd"}
    assert share_cores(tight, {}) == {"p": (0, 1), "d": (2,)}, "an equal share may be less than a quota"


@given(MACHINES, MACHINES)
def test_everybody_has_cores_nobody_loses_any_and_they_are_used_evenly(
    before: dict[str, MachineFacts], came: dict[str, MachineFacts]
) -> None:
    given_ = share_cores(before, {})
    found = came | before
    shares = share_cores(found, given_)
    assert shares.keys() == found.keys()
    assert all(shares[name] == given_[name] for name in before)
    for name, one in found.items():
        assert shares[name]
        assert set(shares[name]) <= set(one.cores)
    for at in {one.machine for one in before.values()}:
        used = Counter(core for name in before if before[name].machine == at for core in given_[name])
        assert max(used.values()) - min(used.values()) <= 1, "cores shared while others lie idle"
