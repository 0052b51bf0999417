"""Replaces a deployment's controller by one with other environment variables, and thereby possibly of another version of Tandem.

No process can supervise its own successor, so a separate actor, the Exchanger, does this. It runs the old controller's version.

1. It starts a process with the new environment and asks it whether it can read the old controller's kept state.
2. It ends the old controller, has that process create the new one, and waits until the new one serves.
3. If the new one does not serve, it creates the old one again.

The Exchanger records each phase before it begins it, and continues from there if it is killed. It also records what
controllers of this deployment are created with before it ends one, so a controller that another process creates is the same.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from tandem.base.errors import DeadlineExceeded, TandemError, Unavailable
from tandem.base.settings import without_defaults
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import ExchangePhase, ExchangeView
from tandem.cluster.on_ray.errors import answer, find_actor, translated
from tandem.cluster.on_ray.neighbours import STATE
from tandem.cluster.on_ray.runtime import CONTROLLER, HEAD_ONLY, namespace_of
from tandem.cluster.on_ray.state_store import RayStateStore
from tandem.cluster.pools import state
from tandem.cluster.pools.controller_host import ClusterAccount, ClusterStage

logger = logging.getLogger(__name__)

EXCHANGE = "exchange"  # the name of the Exchanger's actor, and of the record of its progress
MADE_WITH = "made-with"  # the name under which ControllerParts are kept
_ANSWER_S = 10.0
_LOOK_S = 0.3
_GONE_S = 30.0  # for Ray to free the name of a controller that was killed
_CHECK_S = 60.0  # for a process with the new environment to start and to answer


class ControllerParts(msgspec.Struct, frozen=True):
    """What a controller is created with."""

    config: bytes  # a TandemConfig, without defaults
    place: bytes  # a DeploymentPlace


MakeController = Callable[[ControllerParts, str], Any]
"""Creates the controller of the deployment with this name, or returns the existing one. It is a function of a module, so that
a process of another version runs its own."""


class ControllerExchange(msgspec.Struct, frozen=True):
    id: str
    phase: ExchangePhase
    old: ControllerParts
    new: ControllerParts
    why: str = ""

    @property
    def view(self) -> ExchangeView:
        return ExchangeView(self.id, self.phase, self.why)


def _recorded(name: str) -> RayStateStore:
    return RayStateStore(EXCHANGE, namespace_of(name))


def _parts(name: str) -> RayStateStore:
    return RayStateStore(MADE_WITH, namespace_of(name))


async def exchange_of(name: str) -> ControllerExchange | None:
    """Returns the deployment's current exchange, or its last one; None if it never had one."""
    kept = await _recorded(name).load()
    exchange = msgspec.msgpack.decode(kept, type=ControllerExchange) if kept else None
    if exchange is None or exchange.view.is_over or await _has_exchanger(name):
        return exchange
    why = "the process that was to carry it out is not there: `tandem apply` begins another exchange"
    return msgspec.structs.replace(exchange, phase=ExchangePhase.FAILED, why=why)


async def _has_exchanger(name: str) -> bool:
    """Ray keeps the name of one that it restarts. There is none if the controller died, or Ray refused, when it was to be made."""
    return await asyncio.to_thread(find_actor, EXCHANGE, namespace_of(name)) is not None


async def parts_of(name: str) -> ControllerParts | None:
    """Returns what the controller was last created with. None: it has never been exchanged, so the parts of the command
    that started the deployment hold."""
    kept = await _parts(name).load()
    return msgspec.msgpack.decode(kept, type=ControllerParts) if kept else None


async def begin_exchange(name: str, old: TandemConfig, new: TandemConfig, place: bytes, make: MakeController) -> str:
    """Starts an exchange and returns its id. Raises Unavailable while another exchange of this deployment is running."""
    await refuse_while_exchanged(name)
    begun = ControllerExchange(
        secrets.token_hex(4), ExchangePhase.CHECKING, _parts_for(old, place), _parts_for(new, place)
    )
    await _recorded(name).save(msgspec.msgpack.encode(begun))
    try:
        await asyncio.to_thread(_make_exchanger, name, make)
    except RayError as error:
        raise translated(error) from error
    return begun.id


def _parts_for(config: TandemConfig, place: bytes) -> ControllerParts:
    return ControllerParts(msgspec.msgpack.encode(without_defaults(config)), place)


async def is_being_exchanged(name: str) -> bool:
    last = await exchange_of(name)
    return last is not None and not last.view.is_over


async def refuse_while_exchanged(name: str) -> None:
    if await is_being_exchanged(name):
        raise Unavailable("the controller is being replaced: wait until `tandem status` says that the exchange is over")


def _make_exchanger(name: str, make: MakeController) -> None:
    actor: Any = ray.remote(num_cpus=0, max_restarts=-1)(Exchanger)
    actor.options(
        name=EXCHANGE, namespace=namespace_of(name), lifetime="detached", get_if_exists=True, resources=HEAD_ONLY
    ).remote(name, make)


def only_with(wanted: Mapping[str, str]) -> dict[str, Any]:
    """Returns Ray's `runtime_env` for a process that gets exactly the variables in `wanted`.

    Ray also passes on the variables that this process's own `runtime_env` set. Each of those is set back to the value
    with which Ray was started on this machine."""
    own = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    given = _environment_of_ray() if own.keys() - wanted.keys() else {}
    variables = {**{name: given.get(name, "") for name in own}, **wanted}
    return {"env_vars": variables} if variables else {}


def _environment_of_ray() -> dict[str, str]:
    """Returns the environment of the raylet, which is this process's parent."""
    try:
        words = (Path("/proc") / str(os.getppid()) / "environ").read_bytes().split(b"\0")
    except OSError as error:
        logger.warning("the environment of Ray's raylet, this process's parent, cannot be read: %s", error)
        return {}
    pairs = (word.decode(errors="replace").partition("=") for word in words)
    return {name: value for name, _, value in pairs}


class Maker:
    """An actor with the new controller's environment, so it imports the new controller's version of Tandem."""

    def __init__(self, make: MakeController) -> None:
        self._make = make

    def refusal(self, parts: bytes, kept: bytes | None) -> str:
        """Returns why a controller of this version cannot read the old controller's kept state; "" if it can."""
        try:
            given = msgspec.msgpack.decode(parts, type=ControllerParts)
            msgspec.msgpack.decode(given.config, type=TandemConfig)
            if kept is not None:
                state.decode(kept)
        except (msgspec.DecodeError, TandemError) as error:
            return str(error)
        return ""

    def make(self, parts: bytes, name: str) -> None:
        self._make(msgspec.msgpack.decode(parts, type=ControllerParts), name)


class Exchanger:
    """The actor that carries out an exchange. When Ray restarts it, it continues from the recorded phase. It ends itself when
    the exchange is over."""

    def __init__(self, name: str, make: MakeController) -> None:
        self._name = name
        self._make = make
        self._run = asyncio.get_event_loop().create_task(self._until_over(), name="exchange")

    async def _until_over(self) -> None:
        try:
            exchange = await exchange_of(self._name)
            while exchange is not None and not exchange.view.is_over:
                exchange = await self._next(exchange)
                await _recorded(self._name).save(msgspec.msgpack.encode(exchange))
            me = ray.get_runtime_context().current_actor
            await asyncio.to_thread(ray.kill, me, no_restart=True)
        except Exception:
            logger.exception(
                "the exchange of the controller failed in this process: Ray starts another one, which continues it"
            )
            await asyncio.sleep(_LOOK_S)
            os._exit(1)

    async def _next(self, exchange: ControllerExchange) -> ControllerExchange:
        def now(phase: ExchangePhase, why: str = "") -> ControllerExchange:
            return msgspec.structs.replace(exchange, phase=phase, why=why)

        if exchange.phase is ExchangePhase.CHECKING:
            why = await self._refusal(exchange.new)
            return now(ExchangePhase.FAILED, why) if why else now(ExchangePhase.REPLACING)
        if exchange.phase is ExchangePhase.REPLACING:
            why = await self._put_in_place(exchange.new)
            return now(ExchangePhase.RESTORING, why) if why else now(ExchangePhase.DONE)
        why = await self._put_in_place(exchange.old)
        return now(ExchangePhase.FAILED, f"{exchange.why}; the old controller: {why}" if why else exchange.why)

    async def _refusal(self, parts: ControllerParts) -> str:
        maker = _maker(parts, self._make)
        kept = await RayStateStore(STATE, namespace_of(self._name)).load()
        try:
            told = answer(maker.refusal.remote(msgspec.msgpack.encode(parts), kept))
            return str(await asyncio.wait_for(told, _CHECK_S))
        except TimeoutError:
            return f"a process with the new environment did not answer within {_CHECK_S:.0f} s"
        except TandemError as error:
            return f"a process with the new environment does not start: {error}"
        finally:
            ray.kill(maker)

    async def _put_in_place(self, parts: ControllerParts) -> str:
        """Replaces the running controller by one with these parts. Returns why the new one does not serve; "" if it does."""
        await _parts(self._name).save(msgspec.msgpack.encode(parts))
        await self._end_the_one_there()
        maker = _maker(parts, self._make)
        try:
            made = answer(maker.make.remote(msgspec.msgpack.encode(parts), self._name))
            await asyncio.wait_for(made, _CHECK_S)
            return await self._until_it_serves(msgspec.msgpack.decode(parts.config, type=TandemConfig))
        except TimeoutError:
            return f"the controller was not created within {_CHECK_S:.0f} s"
        except TandemError as error:
            return f"the controller could not be created: {error}"
        finally:
            ray.kill(maker)

    async def _end_the_one_there(self) -> None:
        """Kills the running controller and waits until its name is free. Its kept state is enough for the next one."""
        there, deadline = await self._controller(), time.monotonic() + _GONE_S
        if there is None:
            return
        await asyncio.to_thread(ray.kill, there, no_restart=True)
        while (other := await self._controller()) is not None and other._actor_id == there._actor_id:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"Ray did not free the name of the killed controller within {_GONE_S:.0f} s")
            await asyncio.sleep(_LOOK_S)

    async def _controller(self) -> Any | None:
        return await asyncio.to_thread(find_actor, CONTROLLER, namespace_of(self._name))

    async def _until_it_serves(self, config: TandemConfig) -> str:
        """Waits until the new controller has served for `rollout.settle_s`. Returns why it did not within
        time; "" if it did."""
        deadline = time.monotonic() + config.controller.start_s
        serves_since, why = None, "it did not answer"
        while (now := time.monotonic()) < deadline:
            why = await self._why_not()
            serves_since = None if why else serves_since or now
            if serves_since is not None and now - serves_since >= config.rollout.settle_s:
                return ""
            await asyncio.sleep(_LOOK_S)
        return f"it did not serve within {config.controller.start_s:g} s: {why or 'it did not stay'}"

    async def _why_not(self) -> str:
        try:
            controller = await self._controller()
            if controller is None:
                return "its process has ended"
            told = controller.account_after.remote(0, ClusterStage.STOPPED.value, 0.0)
            account = msgspec.msgpack.decode(await asyncio.wait_for(answer(told), _ANSWER_S), type=ClusterAccount)
        except (TandemError, TimeoutError) as error:
            return str(error) or "it does not answer"
        if account.stage is ClusterStage.SERVING:
            return ""
        return account.failure.message if account.failure is not None else f"it is {account.stage.value}"


def _maker(parts: ControllerParts, make: MakeController) -> Any:
    config = msgspec.msgpack.decode(parts.config, type=TandemConfig)
    actor: Any = ray.remote(num_cpus=0)(Maker)
    return actor.options(resources=HEAD_ONLY, runtime_env=only_with(config.controller.env)).remote(make)
