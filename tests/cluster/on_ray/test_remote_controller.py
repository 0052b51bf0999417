"""A controller's actor as commands call it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.base.errors import Unavailable
from tandem.cluster.on_ray.runtime import import_ray
from tandem.cluster.orders import ScaleOrder
from tandem.wire.nodes import Role

import_ray()

from tandem.cluster.on_ray.remote_controller import RemoteController  # noqa: E402


async def test_an_order_goes_as_its_action_and_comes_back_as_its_answer() -> None:
    asked: list[tuple[str, bytes]] = []

    async def order(action: str, body: bytes) -> bytes:
        asked.append((action, body))
        return b'{"changes":["decode: stays at 2"]}'

    actor: Any = SimpleNamespace(order=SimpleNamespace(remote=order))
    assert await RemoteController(actor, "chat").ask(ScaleOrder({Role.DECODE: 2})) == ["decode: stays at 2"]
    assert asked == [("scale", b'{"pools":{"decode":2}}')]


async def test_a_controller_of_a_version_without_orders_is_named() -> None:
    with pytest.raises(Unavailable, match=r"earlier version of Tandem.*--url"):
        await RemoteController(SimpleNamespace(), "chat").ask(ScaleOrder({Role.DECODE: 2}))
