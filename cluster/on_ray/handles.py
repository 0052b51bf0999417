"""Processes that run as named Ray actors: each is found or made, followed while it starts, watched and ended. An actor that already runs
under the name with the same configuration is adopted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import msgspec
import ray
from ray.exceptions import RayError

from tandem.base.errors import NodeLost, TandemError, Unavailable
from tandem.base.logs import LogPage, LogPosition
from tandem.base.progress import Report
from tandem.base.settings import without_defaults
from tandem.cluster.launcher import Confirm, LogSource
from tandem.cluster.on_ray.errors import ProcessUnreachable, answer, find_actor, translated
from tandem.cluster.on_ray.hosts import ray_nodes
from tandem.cluster.on_ray.spread import NodePlacementGroup, group_of
from tandem.cluster.tasks import cancel, first_ended, first_of, has_ended
from tandem.node.config import NodeConfig
from tandem.router.config import RouterConfig
from tandem.wire.forecasts import ForecastScore, MeasuredRequest
from tandem.wire.nodes import NodeInfo, NodeSighting, PoolReport, RouterInfo, RouterQueue
from tandem.wire.requests import NodeStatus

logger = logging.getLogger(__name__)

_PROGRESS_WAIT_S = 10.0
_HOLD_S = 60.0
_REACH_AGAIN_S = 0.5
_ADOPT_S = 5.0  # an actor under the name that does not tell its configuration within this time is replaced
_NAME_S = 10.0  # for Ray to free the name of an actor that was killed
_HTTP_S = 2.0
_NAME_RETRY_S = 0.05  # Ray does not announce when a name is free, so creating the actor is tried again

Create = Callable[[], Any]


async def end_actor(name: str, namespace: str, within_s: float | None = None) -> None:
    """Kills the actor with this name, if there is one. Ray kills one on a machine that it does not see when it sees it again.
    Raises Unavailable if Ray's control store has not answered `within_s`. None: it asks for as long as it must."""
    try:
        async with asyncio.timeout(within_s):
            await _until_taken(name, lambda: ray.kill(ray.get_actor(name, namespace), no_restart=True))
    except TimeoutError:
        raise Unavailable(f"Ray did not end the process {name} within {within_s:g} s") from None


async def end_node(name: str, namespace: str) -> None:
    """Ends a node by its name alone. One on several machines has processes there, in a placement group of its own."""
    await end_actor(name, namespace)
    await _until_taken(name, NodePlacementGroup(group_of(name, namespace), {}, ()).give_back)


async def _until_taken(name: str, kill: Callable[[], None]) -> None:
    """Tries again until Ray's control store answers: a process that is forgotten and not ended would keep its place."""
    while True:
        try:
            with contextlib.suppress(ValueError):  # there is none
                await asyncio.to_thread(kill)
            return
        except (RayError, Unavailable) as error:
            why = translated(error) if isinstance(error, RayError) else error
            logger.warning("Ray could not end the process %s; trying again: %s", name, why)
        await asyncio.sleep(_REACH_AGAIN_S)


class RayHandle:
    """One actor, which is found or created in the background. Its end is seen by a call to its `hold`, which fails when the
    process dies. `machine` is the id of its Ray node; "" on a Ray of a single machine."""

    def __init__(
        self,
        name: str,
        namespace: str,
        is_wanted: Callable[[bytes], bool],
        create: Create,
        confirm: Confirm,
        stop_s: float,
        machine: str = "",
    ) -> None:
        self._name = name
        self._namespace = namespace
        self._machine = machine
        # Whether an actor that was created with this configuration may be adopted
        self._is_wanted = is_wanted
        self._create = create
        self._confirm = confirm
        self._stop_s = stop_s
        self._is_creating = False  # in a thread, which goes on when the wait for it is cancelled
        self._actor = asyncio.ensure_future(self._find_or_create())
        self._held: asyncio.Future[str] | None = None
        self._unreached = ""  # why the actor cannot be reached, so that its end would not be seen
        self.is_adopted = False
        self._serves = False  # it has started, so it must be asked to stop before it is killed

    async def _find_or_create(self) -> Any:
        running = await self._running()
        if running is not None:
            if await self._is_the_same(running):
                logger.info("%s is running already, and is adopted", self._name)
                self.is_adopted = True
                return running
            await self._confirm()  # it may be a later controller's
            await self._kill(running)
        return await self._created()

    async def _created(self) -> Any:
        deadline = asyncio.get_running_loop().time() + _NAME_S
        while True:
            await self._confirm()
            self._is_creating = True
            try:
                # Blocks: registering a named actor waits for Ray's control store.
                return await asyncio.to_thread(self._create)
            except ValueError as error:
                self._is_creating = False
                if asyncio.get_running_loop().time() > deadline:
                    raise Unavailable(
                        f"Ray did not free the name {self._name} within {_NAME_S:.0f} s: {error}"
                    ) from error
                await asyncio.sleep(_NAME_RETRY_S)
            except RayError as error:
                raise translated(error) from error

    async def _running(self) -> Any | None:
        return await asyncio.to_thread(find_actor, self._name, self._namespace)

    async def _is_the_same(self, actor: Any) -> bool:
        try:
            asked = self._until_reached(actor.configuration.remote, _ADOPT_S)
            return self._is_wanted(await asked)
        except (TandemError, TimeoutError, msgspec.DecodeError) as error:
            logger.info("%s did not tell its configuration, so it is replaced: %s", self._name, error)
            return False

    async def _until_reached(self, ask: Callable[[], Any], answer_s: float | None = None) -> Any:
        """Asks again while the process cannot be reached: it may be serving, and must not be replaced for that. Raises TimeoutError
        for one that does not answer in time."""
        while True:
            try:
                return await asyncio.wait_for(answer(ask()), answer_s)
            except ProcessUnreachable as error:
                logger.warning("%s cannot be reached; trying again: %s", self._name, error)
                await asyncio.sleep(_REACH_AGAIN_S)

    async def _kill(self, actor: Any) -> None:
        """Kills the actor. Waits for Ray's control store, which may not answer; so this blocks its caller alone."""
        await _until_taken(self._name, lambda: ray.kill(actor, no_restart=True))

    async def actor(self) -> Any:
        return await asyncio.shield(self._actor)

    async def _actor_to_start(self, report: Report) -> Any:
        actor = await self.actor()
        if not self.is_adopted:  # it reports nothing itself until it has imported its code
            report("starting its process", 0.0)
        return actor

    async def ended(self) -> str:
        return await self._gone()

    async def _gone(self) -> str:
        if self._held is None:
            self._held = asyncio.ensure_future(self._hold())
        return await asyncio.shield(self._held)

    async def _hold(self) -> str:
        try:
            actor = await self.actor()
            while not await self._held_on(actor):
                pass
        except TandemError as error:
            return str(error)
        return "it was stopped"

    async def _held_on(self, actor: Any) -> bool:
        """Waits for one call to `hold`. Returns whether the process has ended.

        A broken connection does not prove an end. Ray's report that the process died does, unless Ray has lost contact with
        the machine: then Ray reports every process there dead, although routers and nodes may still reach it by another way
        than Ray's control store does. Raises NodeLost when the process has died."""
        try:
            ended = bool(await answer(actor.hold.remote(_HOLD_S)))
        except (ProcessUnreachable, NodeLost) as error:
            if isinstance(error, NodeLost) and await self._machine_is_seen():
                raise
            if not self._unreached:
                logger.warning("%s cannot be reached; trying again: %s", self._name, error)
            self._unreached = str(error)
            await asyncio.sleep(_REACH_AGAIN_S)
            return False
        self._unreached = ""
        return ended

    async def _machine_is_seen(self) -> bool:
        if not self._machine:
            return True
        try:
            nodes = await asyncio.to_thread(ray_nodes)
        except TandemError:
            return False  # Ray does not answer, so nothing is proven; the caller asks again
        return any(node["NodeID"] == self._machine and node["Alive"] for node in nodes)

    async def _followed(self, actor: Any, question: Any, report: Report) -> Any:
        """Returns the result of `question` and reports the process's progress until it comes. If the progress can no longer
        be followed, the question is cancelled too: a process that reports nothing would look as if it stood still."""
        answered, following = await first_of(question, self._follow_progress(actor, report))
        return answered.result() if has_ended(answered) else following.result()

    async def _follow_progress(self, actor: Any, report: Report) -> None:
        if not hasattr(actor, "progress_after"):
            # A router of an older version, which has no progress; it runs already
            await asyncio.Event().wait()
        seen = 0
        while True:
            try:
                number, what, fraction = await answer(actor.progress_after.remote(seen, _PROGRESS_WAIT_S))
            except TandemError as error:  # the question itself finds out whether the process has ended
                logger.debug("%s did not report its progress: %s", self._name, error)
                await asyncio.sleep(_REACH_AGAIN_S)
                continue
            if number > seen:
                seen = number
                report(what, fraction)

    async def drain(self, timeout_s: float) -> bool:
        return bool(await answer((await self.actor()).drain.remote(timeout_s)))

    async def log_page(self, after: LogPosition | None, last: int, most: int) -> LogPage:
        seen = (after.process, after.number) if after is not None else None
        page = await answer((await self.actor()).log_page.remote(seen, last, most))
        return msgspec.msgpack.decode(page, type=LogPage)

    async def stop(self) -> None:
        await asyncio.wait({self._actor}, timeout=_ADOPT_S + _NAME_S)
        if self._is_creating:  # if this were cancelled, the actor would be left running
            await asyncio.wait({self._actor})
        if self._actor.done() and not self._actor.cancelled() and self._actor.exception() is None:
            actor = self._actor.result()
            if self._serves:
                with contextlib.suppress(TandemError, TimeoutError):
                    await asyncio.wait_for(answer(actor.stop.remote()), self._stop_s)
            await self._kill(actor)
            if not self._unreached:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._gone(), self._stop_s)
        await cancel(self._actor)
        if self._held is not None:
            await cancel(self._held)


class RayNode(RayHandle):
    @property
    def keepers(self) -> Mapping[str, LogSource]:
        return {}

    async def start(self, report: Report) -> NodeInfo:
        actor = await self._actor_to_start(report)
        given = await self._start_arguments(actor)
        started = self._until_reached(lambda: actor.start.remote(*given))
        info = msgspec.msgpack.decode(await self._followed(actor, started, report), type=NodeInfo)
        self._serves = True
        return info

    async def _start_arguments(self, actor: Any) -> Sequence[Any]:
        return ()

    async def admit(self, keys: list[str]) -> None:
        await answer((await self.actor()).admit.remote(keys))

    async def status(self) -> NodeStatus:
        return msgspec.msgpack.decode(await answer((await self.actor()).status.remote()), type=NodeStatus)

    async def routers_heard(self) -> list[str]:
        return list(await answer((await self.actor()).routers_heard.remote()))

    async def reset_cache(self, timeout_s: float) -> bool:
        return bool(await answer((await self.actor()).reset_cache.remote(timeout_s)))

    async def set_adapters(self, wanted: Mapping[str, str], timeout_s: float, report: Report) -> dict[str, str]:
        actor = await self.actor()
        return dict(await self._followed(actor, answer(actor.set_adapters.remote(dict(wanted), timeout_s)), report))

    async def change_role(self, config: NodeConfig, report: Report) -> NodeInfo:
        actor = await self.actor()
        changed = answer(actor.change_role.remote(encoded(config)))
        return msgspec.msgpack.decode(await self._followed(actor, changed, report), type=NodeInfo)


class RayRanks(RayHandle):
    """A node's ranks on one of its other machines. If the node was adopted, so is this actor; if the node was created,
    an older actor under this name is killed."""

    def __init__(
        self, name: str, namespace: str, node: RayHandle, create: Create, confirm: Confirm, stop_s: float, machine: str
    ) -> None:
        self._node = node
        super().__init__(name, namespace, lambda running: True, create, confirm, stop_s, machine)

    async def _find_or_create(self) -> Any:
        await self._node.actor()
        running = await self._running()
        if self._node.is_adopted:
            if running is None:
                raise NodeLost(f"{self._name} has ended")
            return running
        if running is not None:
            await self._confirm()
            await self._kill(running)
        return await self._created()

    @property
    def name(self) -> str:
        return self._name

    async def open(self, key: str) -> str:
        return str(await answer((await self.actor()).open.remote(key)))


class SpreadNode(RayNode):
    """A node whose ranks are on several machines. `ended` returns when the first of its processes has ended, because the others
    are useless without it; `stop` returns when all are gone."""

    ranks: Sequence[RayRanks] = ()
    placement_group: NodePlacementGroup

    @property
    def keepers(self) -> Mapping[str, LogSource]:
        return {part.name: part for part in self.ranks}

    async def _start_arguments(self, actor: Any) -> Sequence[Any]:
        """Opens a keeper for rank 0 in each other actor. Returns their addresses, which rank 0's `start` takes."""
        key = await answer(actor.key.remote())
        return [[await part.open(key) for part in self.ranks]]

    async def ended(self) -> str:
        waits = await first_ended([self._gone(), *(part.ended() for part in self.ranks)])
        return next(wait.result() for wait in waits if has_ended(wait))

    async def stop(self) -> None:
        """Rank 0's process ends the other ranks if it can; the rest are stopped after it."""
        await super().stop()
        await asyncio.gather(*(part.stop() for part in self.ranks))
        try:
            await asyncio.to_thread(self.placement_group.give_back)
        except TandemError as error:
            logger.warning("the placement group of %s could not be removed: %s", self._name, error)


class RayRouter(RayHandle):
    _url = ""
    door = ""  # where the router that it replaces hands over its listening socket

    async def start(self, report: Report) -> RouterInfo:
        actor = await self._actor_to_start(report)
        asked = self._until_reached(lambda: actor.start.remote(self.door))
        started = await self._followed(actor, asked, report)
        info = msgspec.msgpack.decode(started, type=RouterInfo)
        self._url = info.url
        self._serves = True
        return info

    async def set_members(
        self, members: list[NodeInfo], paused: Sequence[str], desks: Mapping[str, str], pools: Sequence[PoolReport]
    ) -> RouterQueue:
        actor = await self.actor()
        encode = msgspec.msgpack.encode
        told = actor.set_members.remote(encode(members), list(paused), dict(desks), encode(pools))
        load = await answer(told)
        return msgspec.msgpack.decode(load, type=RouterQueue)

    async def leave(self, timeout_s: float) -> bool:
        return bool(await answer((await self.actor()).leave.remote(timeout_s)))

    async def forget_prefixes(self, node_ids: Sequence[str]) -> None:
        await answer((await self.actor()).forget_prefixes.remote(list(node_ids)))

    async def follow_forecasts(self, score: ForecastScore, ended_within_s: float) -> list[MeasuredRequest]:
        actor = await self.actor()
        if not hasattr(actor, "follow_forecasts"):
            return []  # it runs an earlier version
        took = await answer(actor.follow_forecasts.remote(msgspec.msgpack.encode(score), ended_within_s))
        return msgspec.msgpack.decode(took, type=list[MeasuredRequest])

    async def recalled(self) -> bytes:
        actor = await self.actor()
        if not hasattr(actor, "recalled"):
            return b""  # it runs an earlier version
        return bytes(await answer(actor.recalled.remote()))

    async def nodes_heard(self) -> list[NodeSighting]:
        heard = await answer((await self.actor()).nodes_heard.remote())
        return msgspec.msgpack.decode(heard, type=list[NodeSighting])

    async def answers_clients(self) -> bool:
        """Returns True for any HTTP response, since a draining router answers 503."""
        if not self._url:
            return False
        async with httpx.AsyncClient(trust_env=False, timeout=_HTTP_S, verify=False) as client:
            try:
                await client.get(f"{self._url}/health")
            except httpx.HTTPError:
                return False
        return True


def encoded(config: NodeConfig | RouterConfig) -> bytes:
    """Encodes without defaults, so that a process of another version can read it unless a setting is set that it lacks."""
    return msgspec.msgpack.encode(without_defaults(config))
