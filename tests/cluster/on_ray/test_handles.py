"""Processes that an earlier controller started, or that cannot be reached at first, and their ends."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tandem.cluster.on_ray.runtime import import_ray
from tandem.wire.nodes import RouterInfo

ray = import_ray()  # its environment is set first, or other tests of this run could not set it

from ray.exceptions import ActorUnavailableError, GetTimeoutError  # noqa: E402

from tandem.base.errors import Unavailable  # noqa: E402
from tandem.cluster.on_ray import handles, spread  # noqa: E402
from tandem.cluster.on_ray.handles import RayRouter  # noqa: E402
from tandem.cluster.on_ray.launcher import RayLauncher  # noqa: E402


async def latest() -> None: ...


class FarActor:
    """Answers from the third call on."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _remote(self, name: str, result: Any) -> Callable[..., Any]:
        async def call() -> Any:
            self.calls.append(name)
            if self.calls.count(name) < 3:
                raise ActorUnavailableError("the connection was reset", b"a" * 16)
            return result

        return lambda *_: call()

    def __getattr__(self, name: str) -> Any:
        info = msgspec.msgpack.encode(RouterInfo("http://host:8000", "inbox", "door", "desk"))
        result = {"configuration": b"as it is wanted", "start": info}.get(name)
        return type("Method", (), {"remote": staticmethod(self._remote(name, result))})


@pytest.fixture
def asks_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "_REACH_AGAIN_S", 0.0)


@pytest.mark.usefixtures("asks_again_at_once")
async def test_a_process_that_cannot_be_reached_is_asked_again_and_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending it for that would end all that serves on a machine when the controller restarts while the network to it is broken."""
    actor, killed = FarActor(), []
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: actor)
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: killed.append(actor))

    def create() -> Any:
        raise AssertionError("another one is started")

    router = RayRouter("router", "tandem", lambda running: running == b"as it is wanted", create, latest, 1.0)
    info = await router.start(lambda what, share: pytest.fail(what))
    assert info.url == "http://host:8000"
    assert router.is_adopted
    assert not killed
    assert actor.calls.count("configuration") == actor.calls.count("start") == 3


def no_such_actor(name: str, namespace: str) -> Any:
    raise ValueError("no such actor")


@pytest.fixture
def gives_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_ADOPT_S", "_NAME_S"):
        monkeypatch.setattr(handles, name, 0.0)


@pytest.mark.usefixtures("asks_again_at_once")
async def test_a_process_that_has_imported_nothing_yet_is_said_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_actor", no_such_actor)
    said: list[str] = []
    router = RayRouter("router", "tandem", lambda running: True, FarActor, latest, 1.0)
    await router.start(lambda what, share: said.append(what))
    assert said == ["starting its process"]


@pytest.mark.usefixtures("asks_again_at_once")
async def test_an_end_is_asked_for_again_until_the_control_store_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner forgets the process then. If it lived on, it would keep its place, and no controller would know it. Who ends a
    whole deployment is told that Ray does not answer."""
    actor, killed, refusals = FarActor(), [], iter([True, True])

    def kill(actor: FarActor, no_restart: bool) -> None:
        if next(refusals, False):
            raise GetTimeoutError("the control store did not answer")
        killed.append(actor)

    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: actor)
    monkeypatch.setattr(ray, "kill", kill)
    await handles.end_actor("decode-0", "tandem")
    assert killed == [actor]
    refusals = itertools.repeat(True)
    monkeypatch.setattr(handles, "_REACH_AGAIN_S", 0.001)
    with pytest.raises(Unavailable, match="did not end the process decode-0 within"):
        await handles.end_actor("decode-0", "tandem", 0.05)


@pytest.mark.usefixtures("asks_again_at_once")
async def test_a_node_that_is_ended_by_its_name_leaves_nothing_on_its_other_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its ranks there would go on to hold their places and their memory."""
    removed, asked = list[str](), list[int]()
    groups = {
        f"{number:036x}": {"name": name, "state": "CREATED"}
        for number, name in enumerate(("tandem:decode-1", "tandem:decode-0", "other:decode-0"))
    }

    def table() -> dict[str, dict[str, str]]:
        asked.append(1)
        if len(asked) == 1:
            raise GetTimeoutError("the control store did not answer")
        return groups

    monkeypatch.setattr(ray, "get_actor", no_such_actor)
    monkeypatch.setattr(spread, "placement_group_table", table)
    monkeypatch.setattr(spread, "remove_placement_group", lambda group: removed.append(group.id.hex()))
    await RayLauncher(1.0, namespace="tandem").end("decode-0")
    assert [groups[each]["name"] for each in removed] == ["tandem:decode-0"]


@pytest.mark.usefixtures("gives_up_at_once")
async def test_what_is_being_created_when_its_end_is_asked_for_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray registers it when its control store is back, whether or not that is waited for."""
    actor, killed, begun, is_back = FarActor(), [], threading.Event(), threading.Event()

    def create() -> Any:
        begun.set()
        assert is_back.wait(10.0)
        return actor

    monkeypatch.setattr(ray, "get_actor", no_such_actor)
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: killed.append(actor))
    router = RayRouter("router", "tandem", lambda running: True, create, latest, 0.1)
    await asyncio.to_thread(begun.wait, 10.0)
    stopping = asyncio.create_task(router.stop())
    await asyncio.wait({stopping}, timeout=0.05)
    assert not stopping.done()
    is_back.set()
    await asyncio.wait_for(stopping, 10.0)
    assert killed == [actor]


@pytest.mark.usefixtures("gives_up_at_once")
async def test_who_was_replaced_while_it_looked_for_a_process_creates_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have waited for minutes, and the deployment may have ended."""
    asked, created = asyncio.Event(), list[FarActor]()

    async def replaced() -> None:
        asked.set()
        await asyncio.Event().wait()

    def create() -> FarActor:
        created.append(FarActor())
        return created[0]

    monkeypatch.setattr(ray, "get_actor", no_such_actor)
    router = RayRouter("router", "tandem", lambda running: True, create, replaced, 0.1)
    await asyncio.wait_for(asked.wait(), 10.0)
    await asyncio.wait_for(router.stop(), 10.0)
    assert created == []
