"""Nodes and routers as Ray actors. The one place where Ray's exceptions become ours."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec
import ray
from ray import exceptions as ray_errors

from cluster.clock import cancel
from cluster.hosts import Host
from cluster.launcher import NodeHandle, Report, RouterHandle
from decode_node.actor import DecodeActor
from engine.node_config import NodeConfig
from prefill_node.actor import PrefillActor
from router.actor import RouterActor
from router.config import RouterConfig
from wire.errors import InternalError, NodeLost, TandemError, Unavailable
from wire.nodes import NodeInfo, Role
from wire.requests import NodeStatus

logger = logging.getLogger(__name__)

_NODE_ACTORS: dict[Role, Any] = {
    Role.PREFILL: PrefillActor,
    Role.DECODE: DecodeActor,
    Role.AGGREGATED: DecodeActor,
}
_PROGRESS_WAIT_S = 10.0

T = TypeVar("T")


def translated(error: ray_errors.RayError) -> TandemError:
    match error:
        case ray_errors.RayTaskError(cause=TandemError() as cause):
            return cause
        case ray_errors.RayTaskError(cause=cause):
            return InternalError(f"{type(cause).__name__}: {cause}")
        case ray_errors.RayActorError():
            return NodeLost(_last_words(error))
        case _:
            return Unavailable(f"Ray: {type(error).__name__}: {error}")


def _last_words(error: ray_errors.RayActorError) -> str:
    """Ray's account of a death is a page long; its last line says what happened, its first sentences why."""
    line = str(error).strip().splitlines()[-1]
    detail = line.rpartition("Worker exit detail: ")[2]
    return detail.partition(" Some common causes")[0].strip() or type(error).__name__


async def _answer(ref: Awaitable[T]) -> T:
    try:
        return await ref
    except ray_errors.RayError as error:
        raise translated(error) from error


class RayHandle:
    """One actor: `hold` is a call that only its end answers."""

    def __init__(self, actor: Any, stop_s: float) -> None:
        self._actor = actor
        self._stop_s = stop_s
        self._held = actor.hold.remote()
        self._serves = False  # it has started: there is something to end politely

    async def ended(self) -> str:
        try:
            await _answer(self._held)
        except TandemError as error:
            return str(error)
        return "it was stopped"

    async def drain(self, timeout_s: float) -> bool:
        return bool(await _answer(self._actor.drain.remote(timeout_s)))

    async def stop(self) -> None:
        if self._serves:
            with contextlib.suppress(TandemError, TimeoutError):
                await asyncio.wait_for(_answer(self._actor.stop.remote()), self._stop_s)
        ray.kill(self._actor, no_restart=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended(), self._stop_s)


class RayNode(RayHandle):
    async def start(self, report: Report) -> NodeInfo:
        progress = asyncio.ensure_future(self._follow_progress(report))
        try:
            info = msgspec.msgpack.decode(await _answer(self._actor.start.remote()), type=NodeInfo)
        finally:
            await cancel(progress)
        self._serves = True
        return info

    async def _follow_progress(self, report: Report) -> None:
        seen = 0
        while True:
            number, what, fraction = await _answer(self._actor.progress_after.remote(seen, _PROGRESS_WAIT_S))
            if number > seen:
                seen = number
                report(what, fraction)

    async def status(self) -> NodeStatus:
        return msgspec.msgpack.decode(await _answer(self._actor.status.remote()), type=NodeStatus)

    async def change_role(self, config: NodeConfig) -> NodeInfo:
        encoded = await _answer(self._actor.change_role.remote(msgspec.msgpack.encode(config)))
        return msgspec.msgpack.decode(encoded, type=NodeInfo)


class RayRouter(RayHandle):
    async def start(self, report: Report) -> str:
        report("loading the tokenizer", 0.0)
        url = str(await _answer(self._actor.start.remote()))
        self._serves = True
        return url

    async def set_members(self, members: list[NodeInfo]) -> None:
        await _answer(self._actor.set_members.remote(msgspec.msgpack.encode(members)))


class RayLauncher:
    def __init__(self, stop_s: float) -> None:
        self._stop_s = stop_s

    def launch_node(self, config: NodeConfig, host: Host, slot: Role) -> NodeHandle:
        actor = _NODE_ACTORS[config.role].options(num_cpus=0)
        return RayNode(actor.remote(msgspec.msgpack.encode(config)), self._stop_s)

    def launch_router(self, name: str, config: RouterConfig, host: Host | None) -> RouterHandle:
        actor: Any = RouterActor
        return RayRouter(actor.options(num_cpus=0).remote(msgspec.msgpack.encode(config)), self._stop_s)
