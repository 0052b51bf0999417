"""Ray's nodes as machines with places, without Ray."""

from __future__ import annotations

import asyncio
from typing import Any

from tandem.base.errors import Unavailable
from tandem.cluster.launcher import Offer, TakenPlace
from tandem.cluster.on_ray.hosts import RayHosts
from tandem.cluster.pools.placement import MachineFacts
from tandem.cluster.pools.state import NodePlacement
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import settle
from tests.cluster.pools.memory_store import MemoryStore


def ray_node(
    name: str, address: str, *, alive: bool = True, labels: dict[str, str] | None = None, **resources: float
) -> dict[str, Any]:
    described = {"NodeID": name, "NodeManagerAddress": address, "Alive": alive, "Resources": resources}
    return described | {"Labels": labels or {}}


class OneNeighbour:
    """As `Neighbours`, with nodes in a test's hands."""

    def __init__(self, *nodes: NodePlacement) -> None:
        self.nodes = list(nodes)

    async def placements(self) -> list[NodePlacement]:
        return self.nodes

    async def with_wanted(self, own: list[Offer]) -> list[Offer]:
        return own + [Offer({node.slot.value: 1.0}) for node in self.nodes]


class World:
    """A Ray cluster in a test's hands."""

    def __init__(self, *nodes: dict[str, Any]) -> None:
        self.nodes = list(nodes)
        self.machines: dict[str, MachineFacts] = {}
        self.silent: set[str] = set()
        self.sick: set[str] = set()  # no answer, and no error
        self.healed = asyncio.Event()
        self.said: list[str] = []
        self.refuses = False
        self.asked: list[str] = []
        self.requested: list[list[dict[str, float]]] = []
        self.labels: list[list[dict[str, str]]] = []  # of each that is requested
        self.store = MemoryStore()

    async def find_out(self, name: str) -> MachineFacts:
        self.asked.append(name)
        if name in self.sick:
            await self.healed.wait()
        if name in self.silent:
            raise Unavailable(f"{name} says nothing")
        return self.machines.get(name, MachineFacts(name, (0, 1)))

    def hosts(self, neighbours: OneNeighbour | None = None, **needs: dict[str, float] | Offer) -> RayHosts:
        wanted = {Role(role): need if isinstance(need, Offer) else Offer(need) for role, need in needs.items()}
        return RayHosts(
            self.store,
            wanted,
            lambda: list(self.nodes),
            self.find_out,
            self.request,
            look_again_s=0.001,
            ask_again_s=0.001,
            wait_for_new_s=0.01,
            say=self.said.append,
            neighbours=neighbours,  # type: ignore[arg-type]  # its like
        )

    def request(self, bundles: list[Offer]) -> None:
        if self.refuses:
            raise RuntimeError("it is being started")
        self.requested.append([bundle.resources for bundle in bundles])
        self.labels.append([bundle.labels for bundle in bundles])


HEAD = ray_node("head", "10.0.0.1", **{"node:__internal_head__": 1.0})
PREFILL = ray_node("p", "10.0.0.2", prefill=1.0)
DECODE = ray_node("d", "10.0.0.3", decode=2.0, GPU=4.0)


async def test_ray_nodes_that_offer_a_role_are_hosts_with_places() -> None:
    world = World(DECODE, PREFILL, HEAD, ray_node("dead", "10.0.0.9", alive=False, decode=1.0))
    world.machines["d"] = MachineFacts("d", (0, 1), gpus=4)
    hosts = {host.name: host for host in await world.hosts().present()}
    assert hosts["p"].slots == {Role.PREFILL: 1}
    assert hosts["d"].slots == {Role.DECODE: 2}
    assert (hosts["d"].address, hosts["d"].gpus, hosts["d"].cores) == ("10.0.0.3", 4, (0, 1))
    assert "dead" not in hosts
    assert [host.name for host in hosts.values() if host.head] == ["head"]
    assert hosts["head"].slots == {}
    assert world.asked.count("head") == 0, "nothing runs there that would have to know its cores"


async def test_labels_say_which_machines_are_near_each_other() -> None:
    zone = {"ray.io/availability-zone": "a"}
    named = [
        ray_node(f"m{number}", "10.0.0.4", labels=labels, decode=1.0)
        for number, labels in enumerate([zone, {**zone, "tandem-island": "rack-7"}, {}])
    ]
    assert [host.island for host in await World(*named).hosts().present()] == ["a", "rack-7", ""]


async def test_labels_choose_the_machines_of_a_pool_and_its_autoscaler_hears_of_them() -> None:
    needy = World(DECODE, PREFILL).hosts(decode={"GPU": 4}, prefill={"GPU": 1})
    assert {host.name: host.slots for host in await needy.present()} == {"d": {Role.DECODE: 1}}
    near = ray_node("near", "10.0.0.4", labels={"zone": "a"}, decode=1.0, prefill=1.0)
    far = ray_node("far", "10.0.0.5", labels={"zone": "b"}, decode=1.0, prefill=1.0)
    world = World(near, far)
    hosts = world.hosts(decode=Offer({}, {"zone": "!a"}))
    found = {host.name: host.slots for host in await hosts.present()}
    assert found == {"near": {Role.PREFILL: 1}, "far": {Role.PREFILL: 1, Role.DECODE: 1}}
    await hosts.want({Role.PREFILL: 1, Role.DECODE: 2})
    assert world.requested == [[{"prefill": 1.0}, {"decode": 1.0}, {"decode": 1.0}]]
    assert world.labels == [[{}, {"zone": "!a"}, {"zone": "!a"}]]


async def test_each_machine_is_asked_once_and_one_that_does_not_say_again_and_why_is_told_once() -> None:
    world = World(PREFILL, DECODE)
    world.silent.add("d")
    hosts = world.hosts()
    assert [host.name for host in await hosts.present()] == ["p"]
    await hosts.changed(0.05)
    assert world.asked.count("d") > 1
    assert world.said == ["the machine 10.0.0.3 gets no nodes: it did not report its cores and GPUs: d says nothing"]
    world.silent.clear()
    await hosts.changed(60)  # as soon as it has answered
    assert {host.name for host in await hosts.present()} == {"p", "d"}
    assert world.asked.count("p") == 1


async def test_one_machine_that_never_answers_keeps_no_other_waiting() -> None:
    world = World(PREFILL, DECODE)
    world.sick.add("d")
    hosts = world.hosts()
    for _ in range(3):
        assert [host.name for host in await hosts.present()] == ["p"]
    world.nodes.append(ray_node("p2", "10.0.0.4", prefill=1.0))
    await hosts.changed(60)
    assert [host.name for host in await hosts.present()] == ["p", "p2"]
    assert world.asked.count("d") == 1
    world.nodes.remove(DECODE)
    await hosts.changed(0.01)  # no caller waits for it any more


async def test_an_answer_that_comes_while_another_is_kept_is_heard_at_the_next_look() -> None:
    world = World(PREFILL, DECODE)
    world.sick.add("d")
    save = world.store.save

    async def slow(state: bytes) -> None:
        world.healed.set()
        await settle()
        await save(state)

    world.store.save = slow  # type: ignore[method-assign]
    hosts = world.hosts()
    assert [host.name for host in await hosts.present()] == ["p"]
    await hosts.changed(60)
    assert [host.name for host in await hosts.present()] == ["p", "d"]


async def test_cores_are_the_same_for_a_controller_that_comes_back() -> None:
    world = World(PREFILL)
    world.machines = {name: MachineFacts("one", (0, 1)) for name in ("p", "d")}
    hosts = world.hosts()
    await hosts.present()
    world.nodes.append(DECODE)
    before = await hosts.present()
    world.asked.clear()
    assert await world.hosts().present() == before
    assert world.asked == [], "what is known of a machine stays true for as long as it is there"


async def test_a_machine_that_comes_or_goes_is_noticed() -> None:
    world = World(PREFILL)
    hosts = world.hosts()
    await hosts.present()
    world.nodes.append(DECODE)
    await hosts.changed(60)
    await hosts.present()
    world.nodes.remove(PREFILL)
    await hosts.changed(60)
    assert [host.name for host in await hosts.present()] == ["d"]
    await hosts.changed(0.01)  # nothing has changed: the time is over


async def test_the_autoscaler_is_asked_for_what_is_needed_in_all_and_only_when_that_changes() -> None:
    world = World()
    hosts = world.hosts(decode={"GPU": 1})
    world.refuses = True
    await hosts.want({Role.PREFILL: 1, Role.DECODE: 2})
    world.refuses = False
    for _ in range(2):
        await hosts.want({Role.PREFILL: 1, Role.DECODE: 2})
    await hosts.want({})
    needs = {"decode": 1.0, "GPU": 1}
    assert world.requested == [[{"prefill": 1.0}, needs, needs], []]


def their_node(host: str, *cores: int) -> NodePlacement:
    return NodePlacement(host, "10.0.0.3", Role.DECODE, cores, "cpu", 0.5)


async def test_places_and_cores_of_other_deployments_are_not_offered_and_the_autoscaler_is_asked_for_all() -> None:
    world = World(PREFILL, DECODE)
    neighbour = OneNeighbour(their_node("d", 0))
    hosts = world.hosts(neighbour)
    found = {host.name: host for host in await hosts.present()}
    assert (found["d"].slots, found["d"].cores) == ({Role.DECODE: 1}, (1,))
    assert (found["p"].slots, found["p"].cores) == ({Role.PREFILL: 1}, (0, 1))
    neighbour.nodes = [their_node("d", 0), their_node("d", 1)]
    assert [host.name for host in await hosts.present()] == ["p"], "it is full"
    neighbour.nodes = [their_node("d", 0, 1)]
    found = {host.name: host for host in await hosts.present()}
    assert found["d"].cores == (0, 1), "where each core has a node they are shared"
    await hosts.want({Role.PREFILL: 1})
    neighbour.nodes = []
    await hosts.want({Role.PREFILL: 1})
    assert world.requested == [[{"prefill": 1.0}, {"decode": 1.0}], [{"prefill": 1.0}]]


async def test_other_needs_keep_machines_with_nodes_and_are_asked_for() -> None:
    world = World(ray_node("d", "10.0.0.3", decode=2.0), ray_node("e", "10.0.0.4", decode=2.0, GPU=4.0))
    hosts = world.hosts()
    assert {host.name: host.slots for host in await hosts.present()} == {"d": {Role.DECODE: 2}, "e": {Role.DECODE: 2}}
    old = TakenPlace("d", Role.DECODE, Offer({"decode": 1.0}))
    hosts.use({Role.DECODE: Offer({"GPU": 4})}, [old])
    there = {host.name: host for host in await hosts.present()}
    assert {name: host.slots for name, host in there.items()} == {"d": {Role.DECODE: 1}, "e": {Role.DECODE: 1}}
    assert (there["d"].could_have(Role.DECODE), there["e"].could_have(Role.DECODE)) == (False, True)
    await hosts.want({Role.DECODE: 2})
    assert world.requested[-1] == [{"decode": 1.0}, {"decode": 1.0, "GPU": 4}]
    hosts.use({Role.DECODE: Offer({"GPU": 4})}, [])
    assert [host.name for host in await hosts.present()] == ["e"]
