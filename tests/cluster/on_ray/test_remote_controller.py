"""A controller's actor as commands call it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.base.errors import NodeLost, Unavailable
from tandem.cluster.on_ray.runtime import import_ray
from tandem.cluster.orders import ScaleOrder, ViewOrder
from tandem.wire.nodes import Role

ray = import_ray()

from tandem.cluster.on_ray import remote_controller  # noqa: E402
from tandem.cluster.on_ray.remote_controller import RemoteController  # noqa: E402


async def test_an_order_goes_as_its_action_and_comes_back_as_its_answer() -> None:
    asked: list[tuple[str, bytes]] = []

    async def order(action: str, body: bytes) -> bytes:
        asked.append((action, body))
        return b'{"changes":["decode: stays at 2"]}'

    actor: Any = SimpleNamespace(order=SimpleNamespace(remote=order))
    assert await RemoteController(actor, "chat").ask(ScaleOrder({Role.DECODE: 2})) == ["decode: stays at 2"]
    assert asked == [("scale", b'{"pools":{"decode":2}}')]


async def test_an_order_during_which_the_controller_dies_is_asked_again_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray first says that the connection is broken, and a moment later that the process is dead."""
    said = [ray.exceptions.ActorUnavailableError("Socket closed", b"0" * 16), ray.exceptions.RayActorError()]

    async def dies() -> bool:
        raise said.pop(0)

    async def drains() -> bool:
        return True

    old, new = (SimpleNamespace(drain=SimpleNamespace(remote=drain)) for drain in (dies, drains))
    monkeypatch.setattr(ray, "get_actor", lambda *_: new if not said else old)
    assert await RemoteController(old, "chat").drain(1.0)
    assert not said


async def test_an_order_to_a_deployment_that_another_command_has_ended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: object) -> bytes:
        raise ray.exceptions.RayActorError

    def no_actor(*_: object) -> object:
        raise ValueError

    async def not_exchanged(name: str) -> bool:
        return False

    monkeypatch.setattr(ray, "get_actor", no_actor)
    monkeypatch.setattr(remote_controller, "is_being_exchanged", not_exchanged)
    actor: Any = SimpleNamespace(order=SimpleNamespace(remote=lost))
    with pytest.raises(NodeLost, match="the deployment chat has no controller any more: it was ended"):
        await RemoteController(actor, "chat").ask(ViewOrder())


async def test_a_controller_of_a_version_without_orders_is_named() -> None:
    with pytest.raises(Unavailable, match=r"earlier version of Tandem.*--url"):
        await RemoteController(SimpleNamespace(), "chat").ask(ScaleOrder({Role.DECODE: 2}))


@pytest.mark.parametrize("ask", ["revive", "view", "standing", "find"])
async def test_what_ray_raises_is_an_error_of_ours(ask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's control store cannot be reached for a while: who follows the cluster asks again, and must not take it for an end."""

    def fails(*_: object) -> object:
        raise ray.exceptions.RpcError("the control store does not answer", rpc_code=14)

    async def lost(*_: object) -> bytes:
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(ray, "get_actor", fails)
    monkeypatch.setattr(ray.util, "list_named_actors", fails)
    actor: Any = SimpleNamespace(order=SimpleNamespace(remote=lost))
    controller = RemoteController(actor, "chat")
    asked: dict[str, Callable[[], Awaitable[object]]] = {
        "revive": controller.revive,
        "view": lambda: controller.ask(ViewOrder()),
        "standing": lambda: asyncio.to_thread(remote_controller.standing),
        "find": lambda: asyncio.to_thread(remote_controller.find_controller, "chat"),
    }
    with pytest.raises(Unavailable, match="control store does not answer"):
        await asked[ask]()
