"""The controller of a deployment as other processes call it. Implements `cluster.orders.OperatedCluster` and what commands need besides."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import ray
from ray.exceptions import RayError

from tandem.base.errors import ConfigurationError, DeadlineExceeded, NodeLost, TandemError, Unavailable
from tandem.base.own_thread import from_own_thread
from tandem.base.settings import without_defaults
from tandem.cluster.config import DEFAULT_NAME, TandemConfig
from tandem.cluster.control import ClusterEnd
from tandem.cluster.on_ray.controller_actor import make_controller
from tandem.cluster.on_ray.deploying import DeploymentPlace, clear_away, ending_store, left_behind
from tandem.cluster.on_ray.errors import ProcessUnreachable, answer, find_actor, translated
from tandem.cluster.on_ray.exchange import ControllerParts, is_being_exchanged, parts_of, refuse_while_exchanged
from tandem.cluster.on_ray.neighbours import stands
from tandem.cluster.on_ray.runtime import CONTROLLER, deployment_in, namespace_of, own_job
from tandem.cluster.on_ray.state_store import RayStateStore
from tandem.cluster.orders import Order
from tandem.cluster.pools.controller_host import ClusterAccount, ClusterStage, ConfigChange

logger = logging.getLogger(__name__)

FOLLOW_S = 10.0
_ANSWER_S = 30.0  # long enough for a controller that Ray is just restarting
_ASK_AGAIN_S = 0.2
T = TypeVar("T")


def _latest(name: str) -> RayStateStore:
    """Holds the id of the deployment that runs under this name, or ran last."""
    return RayStateStore("deployment", namespace_of(name))


def _lookup(name: str) -> Any | None:
    return find_actor(CONTROLLER, namespace_of(name))


def standing() -> list[str]:
    """Returns the names of the deployments that have a process on this Ray cluster."""
    try:
        named = ray.util.list_named_actors(True)
    except RayError as error:
        raise translated(error) from error
    return sorted({name for one in named if (name := deployment_in(one["namespace"])) is not None})


def chosen(name: str | None) -> str:
    """Returns `name`; without one, the name of the only deployment on this Ray cluster. Raises ConfigurationError when there
    are several."""
    if name is not None:
        return name
    there = standing()
    if len(there) > 1:
        raise ConfigurationError(
            f"several deployments run on this Ray cluster: choose one with --name ({', '.join(there)})"
        )
    return there[0] if there else DEFAULT_NAME


def find_controller(name: str) -> RemoteController | None:
    """Returns None when no controller runs under this name."""
    actor = _lookup(name)
    return None if actor is None else RemoteController(actor, name)


def the_controller(name: str) -> RemoteController:
    """Like `find_controller`, but raises Unavailable when there is none."""
    controller = find_controller(name)
    if controller is None:
        others = [other for other in standing() if other != name]
        if others:
            raise Unavailable(
                f"no deployment named {name!r} runs on this Ray cluster; these do: {', '.join(others)} (choose one with --name)"
            )
        raise Unavailable(
            "Tandem does not run on this Ray cluster: start it with `tandem serve --address ... --detach`"
        )
    return controller


async def create_controller(config: TandemConfig, *, own_ray: bool, detach: bool) -> RemoteController:
    """Creates the controller of a deployment. When two commands call this at once, both get the same controller.

    An earlier deployment of this name may have left processes. If its end was recorded, they are ended first. If not, its
    controller was lost for good while its nodes may still serve: the new controller adopts them, and without `detach`
    Unavailable is raised instead."""
    deployment, name = secrets.token_hex(8), config.name
    await refuse_while_exchanged(name)
    if not own_ray:
        if (unended := await _left_without_a_controller(name)) is not None:
            if not detach:
                raise Unavailable(
                    "nodes of an earlier deployment run on this Ray cluster without a controller: `tandem serve --detach` "
                    "adopts them, `tandem down` ends them"
                )
            deployment = unended
        else:
            await clear_away(name)
        await stands(name).save(deployment.encode())
    await _latest(name).save(deployment.encode())
    # A Ray of our own ends with this process. On a cluster the controller must watch for our end.
    place = DeploymentPlace(own_ray, deployment, "" if own_ray or detach else own_job(), name)

    parts = ControllerParts(msgspec.msgpack.encode(without_defaults(config)), msgspec.msgpack.encode(place))
    actor = await from_own_thread("make-controller", lambda: make_controller(parts, name))
    return RemoteController(actor, name, deployment, parts)


async def _left_without_a_controller(name: str) -> str | None:
    """Returns the id of the deployment of this name that has processes and whose end was not recorded; else None."""
    kept = await _latest(name).load()
    if kept is None or not await left_behind(name, but=CONTROLLER):
        return None
    deployment = kept.decode()
    return deployment if await ending_store(deployment, name).load() is None else None


async def end_without_a_controller(name: str, why: str) -> bool:
    """Ends the processes of a deployment whose controller is gone for good. Returns False when there are none."""
    if not await left_behind(name):
        return False
    kept = await _latest(name).load()
    if kept is not None:
        await _record_end(kept.decode(), name, why)
    await clear_away(name)
    return True


async def _record_end(deployment: str, name: str, why: str) -> None:
    await ending_store(deployment, name).save(msgspec.msgpack.encode(ClusterEnd(time.time(), why)))


class RemoteController:
    """`parts` is what the calling command created the controller with. If the controller is lost for good, `revive` creates it
    again from them. Commands that only ask pass none."""

    def __init__(self, actor: Any, name: str, deployment: str = "", parts: ControllerParts | None = None) -> None:
        self._actor = actor
        self.name = name  # the deployment's
        self._deployment = deployment
        self._followed = ""  # the id of the deployment whose account was read first
        self._parts = parts

    async def _ask(self, timeout_s: float, what: str, ask: Callable[[Any], Awaitable[T]]) -> T:
        """Calls the controller and waits for its answer for `timeout_s` in all. If the controller's process is lost, or cannot be
        reached, as right after its death, looks up the one that Ray starts in its place and calls that: a request that is made twice has
        no effect the second time."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return await asyncio.wait_for(answer(ask(self._actor)), deadline - time.monotonic())
            except TimeoutError as error:
                raise DeadlineExceeded(f"the controller did not {what} within {timeout_s:.0f} s") from error
            except (NodeLost, ProcessUnreachable) as error:
                if time.monotonic() + _ASK_AGAIN_S > deadline:
                    raise
                actor = await from_own_thread("find-controller", lambda: _lookup(self.name))
                if actor is None and not await is_being_exchanged(self.name):
                    raise NodeLost(
                        f"the deployment {self.name} has no controller any more: it was ended, or its controller is lost for good "
                        f"(`tandem status --all` lists what runs); Ray says: {error}"
                    ) from error
                self._actor = actor or self._actor  # after an exchange it is another actor
                await asyncio.sleep(_ASK_AGAIN_S)

    # --- following

    async def ending(self) -> ClusterEnd | None:
        deployment = self._followed or self._deployment
        kept = await ending_store(deployment, self.name).load() if deployment else None
        return msgspec.msgpack.decode(kept, type=ClusterEnd) if kept else None

    async def revive(self) -> None:
        """Looks up the controller again. Creates it again from `parts` if it is lost for good and no exchange is running."""
        actor = await from_own_thread("find-controller", lambda: _lookup(self.name))
        if actor is None and self._parts is not None:
            if await is_being_exchanged(self.name):
                return  # the exchange creates the next one
            logger.warning("the controller is gone for good and its end was not recorded: starting another one")
            parts = await parts_of(self.name) or self._parts
            try:
                actor = await from_own_thread("make-controller", lambda: make_controller(parts, self.name))
            except RayError as error:
                raise translated(error) from error
        if actor is not None:
            self._actor = actor

    async def account_after(self, seen: int, stage: ClusterStage) -> ClusterAccount:
        """Calls only the actor that is known, and raises NodeLost when it is lost: a follower wants to know. Waits FOLLOW_S for
        something newer than `seen`. Raises DeadlineExceeded when nothing comes."""
        ref = self._actor.account_after.remote(seen, stage.value, FOLLOW_S)
        try:
            account = await asyncio.wait_for(answer(ref), FOLLOW_S + _ANSWER_S)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the controller has not answered for {FOLLOW_S + _ANSWER_S:.0f} s") from error
        told: ClusterAccount = msgspec.msgpack.decode(account, type=ClusterAccount)
        if self._followed and told.deployment != self._followed:
            raise NodeLost("another deployment runs under this name now")
        self._followed = told.deployment
        return told

    # --- operating

    async def configuration(self) -> TandemConfig:
        config = await self._ask(_ANSWER_S, "return its configuration", lambda actor: actor.configuration.remote())
        return msgspec.msgpack.decode(config, type=TandemConfig)

    async def configure(self, config: TandemConfig) -> ConfigChange:
        encoded = msgspec.msgpack.encode(without_defaults(config))
        change = await self._ask(_ANSWER_S, "accept the configuration", lambda actor: actor.configure.remote(encoded))
        return msgspec.msgpack.decode(change, type=ConfigChange)

    async def ask(self, order: Order[T]) -> T:
        def call(actor: Any) -> Any:
            if not hasattr(actor, "order"):
                raise Unavailable(
                    "the controller runs an earlier version of Tandem, which takes orders of this one through a router only: "
                    "use --url, or the command of that version"
                )
            return actor.order.remote(order.action, order.body())

        return order.decoded(await self._ask(order.limit_s + _ANSWER_S, f"carry out {order.action!r}", call))

    async def drain(self, timeout_s: float) -> bool:
        return bool(await self._ask(timeout_s + _ANSWER_S, "drain", lambda actor: actor.drain.remote()))

    # --- ending

    async def end(self, timeout_s: float, why: str) -> None:
        """Ends every node and router, then the controller. Processes that do not stop in time are killed. The controller
        records the end; if it does not answer, this process records it. Raises Unavailable when Ray does not answer."""
        try:
            await self._ask(timeout_s, "stop everything", lambda actor: actor.end.remote(why))
        except TandemError as error:
            logger.warning("%s: the remaining processes are killed without it", error)
            await self._record_end(why)
        try:
            await from_own_thread("kill-controller", lambda: ray.kill(self._actor, no_restart=True))
            await clear_away(self.name)
        except RayError as error:
            raise Unavailable(f"Ray could not end the remaining processes: {error}") from error

    async def _record_end(self, why: str) -> None:
        deployment = self._followed or self._deployment
        try:
            if not deployment and (kept := await _latest(self.name).load()) is not None:
                deployment = kept.decode()
            await _record_end(deployment, self.name, why)
        except TandemError as error:
            logger.warning("the end of the deployment could not be recorded: %s", error)
