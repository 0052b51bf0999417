"""What deployments on one Ray cluster learn of each other, with Ray's store in this process's memory."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, TandemError, Unavailable
from tandem.cluster.commands import operate
from tandem.cluster.commands.address import WhichCluster
from tandem.cluster.config import DEFAULT_NAME
from tandem.cluster.launcher import Offer
from tandem.cluster.on_ray.runtime import NAMESPACE, deployment_in, import_ray, namespace_of
from tandem.cluster.pools import state
from tandem.cluster.pools.state import ClusterState, NodePlacement, NodeRecord
from tandem.wire.nodes import Role
from tests.cluster.direct_cluster import DirectCluster

import_ray()  # its environment is set first, or other tests of this run could not set it

from tandem.cluster.on_ray import neighbours, remote_controller, state_store  # noqa: E402
from tandem.cluster.on_ray.neighbours import STATE, WANTED, Neighbours, stands  # noqa: E402
from tandem.cluster.on_ray.state_store import RayStateStore  # noqa: E402


class MemoryKv:
    """Ray's, as `state_store` calls it."""

    def __init__(self) -> None:
        self.values: dict[tuple[bytes, bytes], bytes] = {}

    def _internal_kv_get(self, key: bytes, *, namespace: bytes) -> bytes | None:
        return self.values.get((namespace, key))

    def _internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, *, namespace: bytes) -> bool:
        is_there = (namespace, key) in self.values
        if overwrite or not is_there:
            self.values[namespace, key] = value
        return is_there

    def _internal_kv_del(self, key: bytes, *, namespace: bytes) -> None:
        self.values.pop((namespace, key), None)

    def _internal_kv_list(self, prefix: bytes, *, namespace: bytes) -> list[bytes]:
        return [key for where, key in self.values if where == namespace and key.startswith(prefix)]


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryKv:
    kv = MemoryKv()
    monkeypatch.setattr(state_store, "internal_kv", lambda: kv)
    return kv


@pytest.mark.parametrize("name", ["a", "chat", "tandem-chat", "0-1", "a" * 40, DEFAULT_NAME, f"{DEFAULT_NAME}-1"])
def test_a_namespace_tells_its_deployment_and_no_two_share_one(name: str) -> None:
    assert deployment_in(namespace_of(name)) == name
    assert (namespace_of(name) == NAMESPACE) == (name == DEFAULT_NAME)
    assert namespace_of(DEFAULT_NAME) == NAMESPACE
    assert deployment_in("someone-elses") is None


async def keep_nodes(name: str, *placements: NodePlacement | None) -> None:
    await stands(name).save(b"id")
    nodes = [NodeRecord(f"decode-{n}", Role.DECODE, placement) for n, placement in enumerate(placements)]
    kept = state.encode(ClusterState(sizes={}, nodes=nodes))
    await RayStateStore(STATE, namespace_of(name)).save(kept)


async def test_a_deployment_sees_the_others_nodes_and_not_its_own() -> None:
    here = NodePlacement("d", "10.0.0.3", Role.DECODE, (0,), "cpu", 0.5)
    there = NodePlacement("d", "10.0.0.3", Role.DECODE, (1,), "cpu", 0.5)
    await keep_nodes("chat", here, None)
    await keep_nodes("code", there)
    assert await Neighbours("chat").placements() == [there]
    assert await Neighbours("code").placements() == [here]
    assert await Neighbours("new").placements() == [here, there]
    await stands("chat").forget()
    assert await Neighbours("code").names() == []


async def test_what_all_ask_for_is_summed_up() -> None:
    for name in ("chat", "code"):
        await stands(name).save(b"id")
    decode, prefill = Offer({"decode": 1.0}, {"zone": "!a"}), Offer({"prefill": 1.0})
    assert await Neighbours("chat").with_wanted([decode]) == [decode]
    assert await Neighbours("code").with_wanted([prefill]) == [prefill, decode]
    assert await Neighbours("chat").with_wanted([]) == [prefill]
    # One of an earlier version keeps no labels.
    await RayStateStore(WANTED, namespace_of("code")).save(msgspec.msgpack.encode([{"decode": 1.0}]))
    assert await Neighbours("chat").with_wanted([]) == [Offer({"decode": 1.0})]


async def test_deployments_place_their_nodes_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_ASK_AGAIN_S", 0.001)
    for name in ("chat", "code"):
        await stands(name).save(b"id")
    happened: list[str] = []
    ending = asyncio.Event()

    async def second() -> None:
        async with Neighbours("code").placing():
            happened.append("code")

    async with Neighbours("chat").placing():
        waiting = asyncio.create_task(second())
        asyncio.get_running_loop().call_later(0.02, ending.set)
        await ending.wait()
        happened.append("chat")
    await waiting
    assert happened == ["chat", "code"]


PLACING = (NAMESPACE.encode(), b"placing-7")


def holders(store: MemoryKv) -> list[str]:
    """Those whose turn it is to place nodes."""
    turns = {key: held for (_, key), held in store.values.items() if key.startswith(b"placing")}
    return [held.decode().partition(" ")[0] for held in [turns[max(turns)] if turns else b""] if held]


async def test_a_controller_that_was_killed_while_it_placed_nodes_keeps_no_other_waiting_for_long(
    store: MemoryKv,
) -> None:
    await stands("chat").save(b"id")
    async with Neighbours("chat").placing():
        assert holders(store) == [], "one that is alone waits for no other"
    await stands("code").save(b"id")
    store.values[PLACING] = f"chat {time.time() - neighbours.LONGEST_S - 1}".encode()
    for _ in range(2):
        async with Neighbours("code").placing():
            assert holders(store) == ["code"]
        assert holders(store) == []


@pytest.mark.parametrize("calls", range(1, 5))
async def test_of_two_that_no_longer_wait_for_a_killed_controller_one_goes_first(
    store: MemoryKv, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """One of them is slow before any of its calls to the store, and the other has its turn meanwhile."""
    for name in ("chat", "code"):
        await stands(name).save(b"id")
    store.values[PLACING] = f"gone {time.time() - neighbours.LONGEST_S - 1}".encode()
    monkeypatch.setattr(neighbours, "_ASK_AGAIN_S", 0.001)
    first_is_in, second_goes_on = asyncio.Event(), asyncio.Event()
    inside: list[str] = []
    made = 0

    async def asked(call: Callable[..., Any], *args: bytes) -> Any:
        nonlocal made
        if asyncio.current_task() is slow:
            made += 1
            if made == calls:
                await first_is_in.wait()
            elif made == calls + 10:
                second_goes_on.set()
        return call(*args)

    async def place(name: str) -> None:
        async with Neighbours(name).placing():
            inside.append(name)
            assert inside == [name]
            first_is_in.set()
            if name == "chat":
                await second_goes_on.wait()
            inside.remove(name)
        second_goes_on.set()

    monkeypatch.setattr(state_store, "_asked", asked)
    slow = asyncio.create_task(place("code"))
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await asyncio.gather(slow, place("chat"))


async def test_a_lock_on_placement_is_broken_also_after_the_clock_was_set_back(
    store: MemoryKv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "_ASK_AGAIN_S", 0.001)
    monkeypatch.setattr(neighbours, "LONGEST_S", 0.02)
    for name in ("chat", "code"):
        await stands(name).save(b"id")
    store.values[PLACING] = f"chat {time.time() + 3600}".encode()
    async with asyncio.timeout(10.0), Neighbours("code").placing():
        assert holders(store) == ["code"]


class EvacuatedDeployment(DirectCluster):
    def __init__(self, answer: dict[str, bool] | TandemError) -> None:
        self.answer = answer

    async def evacuate(self, machine: str, timeout_s: float) -> dict[str, bool]:
        if isinstance(self.answer, TandemError):
            raise self.answer
        return self.answer


def evacuate(
    monkeypatch: pytest.MonkeyPatch, said: list[str], **answers: dict[str, bool] | TandemError
) -> dict[str, bool]:
    controllers = {name: EvacuatedDeployment(answer) for name, answer in answers.items()}
    monkeypatch.setattr(operate, "joined", lambda which: contextlib.nullcontext())
    monkeypatch.setattr(operate, "own_address", lambda: "10.0.0.1:6379")  # to ask Ray would start one
    monkeypatch.setattr(remote_controller, "standing", lambda: sorted(controllers))
    monkeypatch.setattr(remote_controller, "the_controller", controllers.__getitem__)
    options = argparse.Namespace(machine="10.0.0.3", timeout=1.0)
    target = operate.CommandTarget(WhichCluster(), say=said.append)
    finished: dict[str, bool] = operate.evacuate(target, options)["finished"]
    return finished


def test_a_machine_is_emptied_of_the_nodes_of_every_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    nowhere = ConfigurationError("there is no machine 10.0.0.3")
    one = evacuate(monkeypatch, said, tandem={"decode-0": True})
    assert one == {"decode-0": True}
    all_of_them = evacuate(monkeypatch, said, chat={"decode-0": True}, code={"decode-0": False}, draft=nowhere)
    assert all_of_them == {"chat/decode-0": True, "code/decode-0": False}
    assert said[-1] == "10.0.0.3 can go"
    assert "code/decode-0: ended before everything was finished" in said
    with pytest.raises(ConfigurationError, match="there is no machine"):
        evacuate(monkeypatch, said, chat=nowhere, code=nowhere)
    with pytest.raises(Unavailable, match="stopped"):
        evacuate(monkeypatch, said, chat=Unavailable("the cluster has been stopped"), code=nowhere)
