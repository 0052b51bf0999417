"""The controller of a cluster, from another process. Implements `cluster.control.Control`, and what commands need
besides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec
import ray

from tandem.cluster.config import TandemConfig
from tandem.cluster.control import ClusterView
from tandem.cluster.on_ray.controller_actor import ControllerActor
from tandem.cluster.on_ray.deploying import MACHINES, STATE, Place
from tandem.cluster.on_ray.errors import answer
from tandem.cluster.on_ray.runtime import HEAD_ONLY, NAMESPACE
from tandem.cluster.on_ray.state_store import RayStateStore
from tandem.cluster.pools.controller_host import Account, Change, Stage
from tandem.wire.errors import DeadlineExceeded, TandemError, Unavailable
from tandem.wire.nodes import Role

logger = logging.getLogger(__name__)

NAME = "controller"
FOLLOW_S = 10.0
_ANSWER_S = 30.0  # a controller that Ray is just starting again answers in less
_LONGER_THAN_ASKED_S = 15.0

T = TypeVar("T")


def find_controller() -> RemoteController | None:
    try:
        return RemoteController(ray.get_actor(NAME, NAMESPACE))
    except ValueError:
        return None


def the_controller() -> RemoteController:
    controller = find_controller()
    if controller is None:
        raise Unavailable(
            "Tandem does not run on this Ray cluster: start it with `tandem serve --address ... --detach`"
        )
    return controller


def create_controller(config: TandemConfig, place: Place) -> RemoteController:
    """The one that is there already, where two commands do this at once: there is one of it in a cluster."""
    actor: Any = ControllerActor
    placed = actor.options(
        name=NAME,
        namespace=NAMESPACE,
        lifetime="detached" if place.detached else None,
        get_if_exists=True,
        resources=HEAD_ONLY,
    )
    return RemoteController(placed.remote(msgspec.msgpack.encode(config), msgspec.msgpack.encode(place)))


async def clear_away() -> None:
    """What a deployment leaves whose controller is gone for good, which may have been killed with its command: the next
    one would take over its nodes, and its pools' sizes instead of its own."""
    for one in await asyncio.to_thread(ray.util.list_named_actors, True):
        if one["namespace"] == NAMESPACE:
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                ray.kill(ray.get_actor(one["name"], NAMESPACE), no_restart=True)
    for name in (STATE, MACHINES):
        await RayStateStore(name).forget()


class RemoteController:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def _within(self, timeout_s: float, ref: Awaitable[T], what: str) -> T:
        try:
            return await asyncio.wait_for(answer(ref), timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the controller did not {what} within {timeout_s:.0f} s") from error

    async def account_after(self, seen: int, stage: Stage) -> Account:
        ref = self._actor.account_after.remote(seen, stage.value, FOLLOW_S)
        account = await self._within(FOLLOW_S + _ANSWER_S, ref, "tell how far it is")
        return msgspec.msgpack.decode(account, type=Account)

    async def configuration(self) -> TandemConfig:
        config = await self._within(_ANSWER_S, self._actor.configuration.remote(), "say what it runs")
        return msgspec.msgpack.decode(config, type=TandemConfig)

    async def configure(self, config: TandemConfig) -> Change:
        ref = self._actor.configure.remote(msgspec.msgpack.encode(config))
        return msgspec.msgpack.decode(
            await self._within(_ANSWER_S, ref, "take the configuration"), type=Change
        )

    async def view(self) -> ClusterView:
        view = await self._within(_ANSWER_S, self._actor.view.remote(), "tell what it sees")
        return msgspec.msgpack.decode(view, type=ClusterView)

    async def scale(self, wanted: dict[Role, int]) -> list[str]:
        ref = self._actor.scale.remote(msgspec.msgpack.encode(wanted))
        return list(await self._within(_ANSWER_S, ref, "decide"))

    async def drain_node(self, node_id: str, timeout_s: float) -> bool:
        ref = self._actor.drain_node.remote(node_id, timeout_s)
        return bool(await self._within(timeout_s + _LONGER_THAN_ASKED_S, ref, f"drain {node_id}"))

    async def change_role(self, node_id: str, role: Role, timeout_s: float) -> None:
        await self._within(
            timeout_s, self._actor.change_role.remote(node_id, role.value), f"change {node_id}"
        )

    async def drain(self, timeout_s: float) -> bool:
        return bool(await self._within(timeout_s + _LONGER_THAN_ASKED_S, self._actor.drain.remote(), "drain"))

    async def end(self, timeout_s: float) -> None:
        """Ends every node and router, then the controller. What does not end politely is ended all the same."""
        try:
            await self._within(timeout_s, self._actor.stop.remote(), "stop everything")
        except TandemError as error:
            logger.warning("%s: what is left is ended without it", error)
        ray.kill(self._actor, no_restart=True)
        await clear_away()
