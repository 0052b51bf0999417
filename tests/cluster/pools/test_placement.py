"""Placement divides cores, devices and memory so that no two nodes share any."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import PoolConfig, PoolsConfig, TandemConfig
from tandem.cluster.launcher import Host
from tandem.cluster.pools.placement import (
    LocalMachine,
    node_config,
    of_one_machine,
    ordered_cores,
    place,
    place_nodes,
    router_config,
    visible_gpus,
)
from tandem.cluster.pools.state import ClosedSlot, NodePlacement, NodeRecord
from tandem.engine.config import CacheConfig, ModelConfig
from tandem.router.config import RouterConfig
from tandem.wire.nodes import Role


def config(
    prefill: int = 0, decode: int = 0, aggregated: int = 0, threads: dict[str, int] | None = None
) -> TandemConfig:
    counts = {"prefill": prefill, "decode": decode, "aggregated": aggregated}
    made = {name: PoolConfig(nodes=count, threads=(threads or {}).get(name)) for name, count in counts.items()}
    return TandemConfig(pools=PoolsConfig(**made))


def placed_on(asked: TandemConfig, machine: LocalMachine) -> dict[str, NodePlacement]:
    placed = {node.node_id: node.placement for node in place_nodes(asked, machine)}
    return {node_id: placement for node_id, placement in placed.items() if placement is not None}


def cores_of(nodes: list[NodeRecord]) -> dict[str, tuple[int, ...]]:
    return {node.node_id: node.placement.cores for node in nodes if node.placement is not None}


def machine(cores: int, gpus: int = 0) -> LocalMachine:
    return LocalMachine(tuple(range(cores)), gpus)


@pytest.mark.parametrize(
    ("asked", "cores", "placed"),
    [
        (config(1, 1), 2, [(0,), (1,)]),
        (config(aggregated=1), 4, [(0, 1, 2, 3)]),
        (config(1, 1), 5, [(0, 1, 2), (3, 4)]),
        (config(2, 1, threads={"prefill": 1}), 8, [(0,), (1,), (2, 3, 4, 5, 6, 7)]),
        (config(2, 2), 2, [(0,), (1,), (0,), (1,)]),
    ],
    ids=["one each", "alone", "the odd core", "a count of its own", "in turns"],
)
def test_cores_are_divided_and_who_reads_prompts_comes_first(
    asked: TandemConfig, cores: int, placed: list[tuple[int, ...]]
) -> None:
    assert list(cores_of(place_nodes(asked, machine(cores))).values()) == placed


def test_more_cores_than_there_are_is_a_mistake_that_names_both_numbers() -> None:
    for threads in ({"prefill": 3, "decode": 3}, {"prefill": 4}):
        with pytest.raises(ConfigurationError, match=r"asks for \d cores.* this machine has 4"):
            place_nodes(config(1, 1, threads=threads), machine(4))
    container = LocalMachine(tuple(range(64)), quota=3)
    assert cores_of(place_nodes(config(1, 1), container)) == {"prefill-0": (0, 1), "decode-0": (2,)}
    with pytest.raises(ConfigurationError, match="this machine has 3"):
        place_nodes(config(1, 1, threads={"decode": 3}), container)
    with pytest.raises(ConfigurationError, match="too many for 3 cores"):
        place_nodes(config(6, 7), container)


@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 40))
def test_with_enough_cores_every_core_has_exactly_one_node(prefill: int, decode: int, cores: int) -> None:
    asked = config(prefill, decode)
    asked = msgspec.structs.replace(asked, pools=msgspec.structs.replace(asked.pools, nodes_per_core=10))
    placed = place_nodes(asked, machine(cores))
    shares = cores_of(placed).values()
    assert len(shares) == len(placed)
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
    together = place(config(aggregated=1), [host], [], Role.AGGREGATED)
    apart = place(config(1, 1), [host], [], Role.DECODE)
    assert together is not None
    assert apart is not None
    assert (together.cores, len(apart.cores)) == ((0, 1, 2, 3), 2)


@given(
    st.permutations([Role.PREFILL] * 3 + [Role.DECODE] * 3),
    st.lists(st.sampled_from(["east", "west"]), min_size=6, max_size=6),
)
def test_each_island_gets_as_many_of_both_roles_as_it_can(order: list[Role], islands: list[str]) -> None:
    slots = {Role.PREFILL: 1, Role.DECODE: 1}
    hosts = [Host(str(number), "", (0, 1), slots=slots, island=island) for number, island in enumerate(islands)]
    nodes: list[NodeRecord] = []
    for number, role in enumerate(order):
        placement = place(config(3, 3), hosts, nodes, role)
        assert placement is not None
        nodes.append(NodeRecord(str(number), role, placement))
    there = Counter((islands[int(node.placement.host)], node.role) for node in nodes if node.placement)
    for island in set(islands):
        assert abs(there[island, Role.PREFILL] - there[island, Role.DECODE]) <= 1


def test_a_node_on_several_machines_stays_in_one_island() -> None:
    hosts = [Host(name, name, (0,), slots={Role.PREFILL: 1}, island=name[0]) for name in ("a1", "b1", "a2", "b2")]
    asked = msgspec.structs.replace(config(), pools=PoolsConfig(prefill=PoolConfig(nodes=2, machines=2)))
    first = place(asked, hosts, [], Role.PREFILL)
    assert first is not None
    second = place(asked, hosts, [NodeRecord("0", Role.PREFILL, first)], Role.PREFILL)
    assert second is not None
    assert (first.hosts, second.hosts) == (["a1", "a2"], ["b1", "b2"])


def test_the_emptiest_machine_comes_first() -> None:
    hosts = [Host(name, name, (0, 1), slots={Role.DECODE: 2}) for name in ("a", "b")]
    nodes: list[NodeRecord] = []
    for number in range(4):
        nodes.append(NodeRecord(str(number), Role.DECODE, place(config(0, 4), hosts, nodes, Role.DECODE)))
    assert [node.placement.host for node in nodes if node.placement] == ["a", "b", "a", "b"]
    assert place(config(0, 4), hosts, nodes, Role.DECODE) is None


def test_nodes_take_turns_on_gpus_and_share_the_memory_of_each() -> None:
    placed = list(placed_on(config(2, 1), machine(8, gpus=2)).values())
    assert [placement.device for placement in placed] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [placement.memory_share for placement in placed] == [0.425, 0.85, 0.425]


def wide(**pools: tuple[int, int]) -> TandemConfig:
    """A configuration with (nodes, ranks of a node) for each pool."""
    asked = {"prefill": (0, 1), "decode": (0, 1), **pools}
    made = {name: PoolConfig(nodes=count, tensor_parallel=width) for name, (count, width) in asked.items()}
    return TandemConfig(pools=PoolsConfig(**made))


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
    asked = wide(prefill=prefill, decode=decode)
    placed = placed_on(asked, machine(16, gpus=gpus))
    used = [0] * gpus
    for placement in placed.values():
        for gpu in gpus_of(asked, placement):  # raises where there is none of that number
            used[gpu] += 1
    if sum(count * width for count, width in (prefill, decode)) <= gpus:
        assert max(used) == 1
    for placement in placed.values():
        sharing = max(used[gpu] for gpu in gpus_of(asked, placement))
        assert placement.memory_share * sharing <= 0.85 + 1e-9


def test_a_node_of_more_ranks_than_gpus_is_refused_before_it_starts() -> None:
    with pytest.raises(ConfigurationError, match=r"decode node has 4 ranks .* this machine has 2 GPUs"):
        placed_on(wide(decode=(1, 4)), machine(8, gpus=2))


def test_a_device_that_was_named_is_kept_and_nodes_of_one_machine_divide_its_memory() -> None:
    asked = msgspec.structs.replace(config(1, 1), model=ModelConfig(path="m", device="cuda:3"))
    assert {placement.device for placement in placed_on(asked, machine(2, gpus=8)).values()} == {"cuda:3"}
    asked = msgspec.structs.replace(config(1, 3), cache=CacheConfig(memory_share=0.8))
    assert {placement.memory_share for placement in placed_on(asked, machine(4)).values()} == {0.2}


def test_a_node_is_told_its_cores_threads_and_share() -> None:
    asked = config(1, 1)
    place = msgspec.structs.replace(placed_on(asked, machine(4))["prefill-0"], address="10.0.0.1")
    told = node_config(asked, "prefill-0", Role.PREFILL, place)
    assert (told.node_id, told.role, told.host) == ("prefill-0", Role.PREFILL, "10.0.0.1")
    assert (told.cores, told.engine.model.threads) == ([0, 1], 2)
    assert told.engine.cache.memory_share == 0.25
    assert told.transfer == asked.transfer
    assert told.timeouts == asked.timeouts.nodes


def test_a_pools_own_options_come_before_those_of_all_nodes_and_an_aggregated_node_has_no_transfer() -> None:
    asked = config(1, 1)
    place = placed_on(asked, machine(4))["prefill-0"]
    replace = msgspec.structs.replace
    decode = replace(asked.pools.decode, transfer_options={"progress_ms": "5", "backend.num_workers": "2"})
    transfer = replace(asked.transfer, options={"progress_ms": "9", "backend": "UCX"})
    asked = replace(asked, pools=replace(asked.pools, decode=decode), transfer=transfer)
    told = node_config(asked, "decode-0", Role.DECODE, place).transfer
    assert told is not None
    assert told.options == {"progress_ms": "5", "backend.num_workers": "2", "backend": "UCX"}
    assert node_config(asked, "prefill-0", Role.PREFILL, place).transfer == asked.transfer
    (place,) = placed_on(config(aggregated=1), machine(1)).values()
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
    placed = placed_on(asked, machine(3))
    assert [node_id for node_id in placed if node_id.startswith("encode")] == ["encode-0"]
    assert len({core for place in placed.values() for core in place.cores}) == 3
    assert node_config(asked, "encode-0", Role.ENCODE, placed["encode-0"]).transfer is None
    slots = {Role.PREFILL: 1, Role.DECODE: 1, Role.ENCODE: 1}
    without = place(config(1, 1), [Host("h", "10.0.0.1", (0, 1, 2, 3), slots=slots)], [], Role.DECODE)
    assert without is not None
    assert len(without.cores) == 2, "no core waits for an encoder node that is not asked for"


def spread_over(machines: int, **pool: object) -> TandemConfig:
    pools = PoolsConfig(prefill=PoolConfig(nodes=1, tensor_parallel=4, machines=machines, **pool), decode=PoolConfig())  # type: ignore[arg-type]
    return TandemConfig(pools=pools)


def places_for(*counts: int, gpus: int = 0) -> list[Host]:
    return [
        Host(f"m{n}", f"10.0.0.{n}", tuple(range(8)), gpus, {Role.PREFILL: count}) for n, count in enumerate(counts)
    ]


def test_a_spread_node_has_a_place_on_each_of_its_machines() -> None:
    asked, hosts = spread_over(2), places_for(1, 2, 1)
    first = place(asked, hosts, [], Role.PREFILL)
    assert first is not None
    assert first.hosts == ["m0", "m1"]
    one = NodeRecord("prefill-0", Role.PREFILL, first)
    second = place(asked, hosts, [one], Role.PREFILL)
    assert second is not None
    assert sorted(second.hosts) == ["m1", "m2"], "each has a place left, and none has two parts of one node"
    (shared,) = (part.cores for part in second.parts if part.host == "m1")
    (taken,) = (part.cores for part in first.parts if part.host == "m1")
    assert not set(shared) & set(taken)
    both = [one, NodeRecord("prefill-1", Role.PREFILL, second)]
    assert place(asked, hosts, both, Role.PREFILL) is None
    assert place(asked, places_for(2), [], Role.PREFILL) is None, "not twice on one machine"


def test_a_spread_node_is_told_of_its_other_machines() -> None:
    asked = spread_over(2)
    placement = place(asked, places_for(1, 1, gpus=2), [], Role.PREFILL)
    assert placement is not None
    told = node_config(asked, "prefill-0", Role.PREFILL, placement)
    assert (told.host, told.machines, told.ranks) == ("10.0.0.0", 2, 4)
    assert [(there.host, there.cores, there.device) for there in told.others] == [
        ("10.0.0.1", list(range(8)), "cuda:0")
    ]
    assert place(asked, places_for(1, 1, gpus=1), [], Role.PREFILL) is None, "two ranks on a machine want two GPUs"


def test_what_one_machine_carries_of_a_spread_node_is_a_part_of_it() -> None:
    here = of_one_machine(spread_over(2, resources={"GPU": 4}))
    assert (here.pools.prefill.ranks, here.pools.prefill.resources) == (2, {"GPU": 2})
    assert place_nodes(here, machine(8, gpus=2))
    assert of_one_machine(config(1, 1)) == config(1, 1)
    with pytest.raises(ConfigurationError, match=r"pools\.prefill\.machines is 2, and this is one machine"):
        place_nodes(spread_over(2), machine(8))
