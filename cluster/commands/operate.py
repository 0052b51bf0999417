"""What the commands that change a running cluster do. They call its controller through Ray, or with --url through one of its routers."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import msgspec

from tandem.base.errors import ConfigurationError, InternalError, TandemError, Unavailable
from tandem.base.own_thread import from_own_thread, in_own_thread
from tandem.base.settings import LONGEST_S
from tandem.cluster.api_client import ANSWER_S, ApiClient, key_from_environment
from tandem.cluster.commands.address import RAY_ADDRESS, WhichCluster, choose_address, url_of
from tandem.cluster.commands.foretelling import after_role, as_json, foretold
from tandem.cluster.commands.output import LibraryOutput
from tandem.cluster.control import DRAIN_S
from tandem.cluster.describe import parse_role, parse_sizes
from tandem.cluster.on_ray.runtime import connect_to_ray, listens_on_loopback_only, own_address, stop_ray, until_ended
from tandem.cluster.orders import (
    ChangeRoleOrder,
    DrainOrder,
    EvacuateOrder,
    OperatedCluster,
    Order,
    PauseOrder,
    ResetCacheOrder,
    ResumeOrder,
    ScaleOrder,
    TimeoutsOrder,
    ViewOrder,
)
from tandem.cluster.tasks import first_of, has_ended, saying_if_slow
from tandem.wire.nodes import Role

if TYPE_CHECKING:
    from tandem.cluster.on_ray.remote_controller import RemoteController

# How long a router waits for the controller's answer, and then some.
_DECIDE_S = 45.0

T = TypeVar("T")


class HttpControl(ApiClient):
    """An `OperatedCluster` through one of its routers, for commands with `--url`."""

    async def ask(self, order: Order[T]) -> T:
        path, timeout = f"/admin/{order.action}", httpx.Timeout(ANSWER_S, read=order.limit_s + _DECIDE_S)
        asking = in_own_thread(order.action, lambda: self.post(path, order.body(), timeout))
        answer = await asyncio.wrap_future(asking)
        try:
            return order.decoded(answer.content)
        except msgspec.DecodeError as error:
            raise InternalError(f"{self.url}{path} did not answer like a Tandem router: {error}") from error


END_S = 60.0
DOWN = "`tandem down`"

Say = Callable[[str], None]


def say_line(line: str) -> None:
    """Prints to the terminal. While a cluster is joined, sys.stdout goes to the log."""
    print(line, file=sys.__stdout__, flush=True)


def say_aside(line: str) -> None:
    """Prints to standard error, when standard output is for JSON."""
    print(line, file=sys.__stderr__, flush=True)


@dataclass(frozen=True, slots=True)
class CommandTarget:
    """The cluster that a command changes, how it gets there, and where it says what it does."""

    which: WhichCluster
    url: str | None = None  # of the router to go through; None: join the Ray cluster
    say: Say = say_line

    def run(self, work: Callable[[OperatedCluster], Awaitable[T]], *, silently: bool = False) -> T:
        """Says first which deployment it is, unless nothing will be changed."""
        return with_controller(self.which, work, self.url, None if silently else self.say)

    def ask(self, order: Order[T], *, silently: bool = False) -> T:
        return self.run(lambda cluster: cluster.ask(order), silently=silently)


def with_controller(
    which: WhichCluster, work: Callable[[OperatedCluster], Awaitable[T]], url: str | None = None, say: Say | None = None
) -> T:
    """Runs `work` on the cluster: through the router at `url` if there is one, otherwise joined to the Ray cluster. `say` is told first
    which deployment it is, by a command that changes it."""
    if url is not None:
        if which.address is not None or which.name is not None:
            named = "--address" if which.address is not None else "--name"
            raise ConfigurationError(f"--url and {named} name two ways to the cluster: leave one out")
        control = HttpControl(url, key_from_environment())
        if say is not None:
            say(f"the deployment at {url}:")
        try:
            return asyncio.run(_awaited(work(control)))
        finally:
            control.close()
    with joined(which):
        from tandem.cluster.on_ray.remote_controller import chosen, the_controller

        async def run() -> T:
            controller = await from_own_thread("find-controller", lambda: the_controller(chosen(which.name)))
            if say is not None:
                say(f"{await _named(controller)}:")
            return await work(controller)

        return asyncio.run(while_ray_runs(run()))


class ServerEnded(Unavailable):
    """A Ray of one machine has ended, with the `tandem serve` that it belongs to."""


async def while_ray_runs(work: Coroutine[Any, Any, T]) -> T:
    """Raises ServerEnded. On a cluster the head may come back, and Ray waits for it."""
    address = own_address()
    if not listens_on_loopback_only(address):
        return await work
    done, _ = await first_of(work, until_ended(address))
    if not has_ended(done):
        raise ServerEnded(f"the server whose Ray was at {address} has ended")
    return done.result()


async def _named(controller: RemoteController) -> str:
    url = url_of(own_address(), controller.name) or next(
        (router.url for router in (await controller.ask(ViewOrder())).routers if router.phase == "ready"), ""
    )
    return f"{controller.name} at {url}" if url else f"{controller.name} (no router is ready)"


async def _awaited(work: Awaitable[T]) -> T:
    return await work


@contextmanager
def joined(which: WhichCluster) -> Iterator[None]:
    address = choose_address(which)
    with redirect_stdout(LibraryOutput("ray")):
        try:
            connect_to_ray(address)
        except (ConfigurationError, Unavailable) as error:
            if which.address is None and address == os.environ.get(RAY_ADDRESS):
                raise type(error)(
                    f"{error}. That address is RAY_ADDRESS: unset it to find the server of this machine, or name another with --address"
                ) from error
            raise
        try:
            yield
        finally:
            stop_ray()


# --- commands: each returns what `-o json` prints

Printed = dict[str, Any]


def scale(target: CommandTarget, options: argparse.Namespace) -> Printed:
    sizes = parse_sizes(options.sizes)

    async def work(cluster: OperatedCluster) -> Printed:
        expected = await foretold(cluster, sizes, target.say)
        lines = await cluster.ask(ScaleOrder(sizes))
        for line in lines:
            target.say(line)
        return {"changes": lines, **as_json(expected)}

    return target.run(work)


def drain(target: CommandTarget, options: argparse.Namespace) -> Printed:
    """`nodes` are names, or addresses of machines for all of their nodes."""
    limit_s = _limit_s(options)
    return {"finished": target.run(lambda cluster: drain_nodes(cluster, options.nodes, limit_s, target.say))}


async def drain_nodes(cluster: OperatedCluster, names: Sequence[str], timeout_s: float, say: Say) -> dict[str, bool]:
    nodes = (await cluster.ask(ViewOrder())).nodes
    chosen = [node.node_id for node in nodes if any(name in (node.node_id, node.host) for name in names)]
    unknown = [name for name in names if not any(name in (node.node_id, node.host) for node in nodes)]
    if unknown:
        there = ", ".join(node.node_id for node in nodes) or "none"
        raise ConfigurationError(f"there is no node or machine {', '.join(unknown)}: the nodes are {there}")

    async def one(node_id: str) -> bool:
        finished = await saying_if_slow(
            cluster.ask(DrainOrder(node_id, timeout_s)),
            lambda: say(f"{node_id}: finishing what it has (up to {timeout_s:.0f} s)"),
        )
        say(_ended(node_id, finished))
        return finished

    return dict(zip(chosen, await asyncio.gather(*map(one, chosen)), strict=True))


def _ended(node_id: str, finished: bool) -> str:
    return f"{node_id}: {'everything was finished' if finished else 'ended before everything was finished'}"


def evacuate(target: CommandTarget, options: argparse.Namespace) -> Printed:
    """Without a name, it evacuates the machine in all deployments."""
    machine, limit_s, say = options.machine, _limit_s(options), target.say

    def empty(cluster: OperatedCluster) -> Awaitable[dict[str, bool]]:
        return saying_if_slow(
            cluster.ask(EvacuateOrder(machine, limit_s)),
            lambda: say(f"{machine}: its nodes finish what they have (up to {limit_s:.0f} s)"),
        )

    if target.url is not None or target.which.name is not None:
        finished = target.run(empty)
    else:
        finished = _of_every_deployment(target.which, empty)
    for node_id, done in finished.items():
        say(_ended(node_id, done))
    say(f"{machine} can go")
    return {"finished": finished}


def _of_every_deployment(
    which: WhichCluster, empty: Callable[[OperatedCluster], Awaitable[dict[str, bool]]]
) -> dict[str, bool]:
    """With several deployments, the result's names are DEPLOYMENT/NODE. A deployment that does not know the machine has no nodes there."""
    with joined(which):
        from tandem.cluster.on_ray.remote_controller import chosen, standing, the_controller

        async def run() -> dict[str, bool]:
            names = await from_own_thread("find-deployments", standing)
            if len(names) < 2:
                return await empty(await from_own_thread("find-controller", lambda: the_controller(chosen(None))))
            controllers = await from_own_thread("find-controllers", lambda: [the_controller(name) for name in names])
            answers = await asyncio.gather(*map(empty, controllers), return_exceptions=True)
            failed = [answer for answer in answers if isinstance(answer, BaseException)]
            mistakes = [error for error in failed if isinstance(error, ConfigurationError)]
            if len(mistakes) < len(failed) or len(mistakes) == len(names):
                raise next((error for error in failed if error not in mistakes), failed[0])
            return {
                f"{name}/{node_id}": done
                for name, answer in zip(names, answers, strict=True)
                if isinstance(answer, dict)
                for node_id, done in answer.items()
            }

        return asyncio.run(while_ray_runs(run()))


def _limit_s(options: argparse.Namespace) -> float:
    limit_s = DRAIN_S if options.timeout is None else float(options.timeout)
    if not 0 <= limit_s <= LONGEST_S:
        raise ConfigurationError(f"--timeout must be seconds from 0 to {LONGEST_S:.0f}, not {limit_s:g}")
    return limit_s


def change_role(target: CommandTarget, options: argparse.Namespace) -> Printed:
    node_id, role = options.node, parse_role(options.role)

    async def work(cluster: OperatedCluster) -> Printed:
        sizes = after_role(await cluster.ask(ViewOrder()), node_id, role)
        expected = await foretold(cluster, sizes, target.say)
        done = await change_role_of(cluster, node_id, role, target.say)
        target.say(f"{node_id} is ready as a {role.value} node")
        return {**done, **as_json(expected)}

    return target.run(work)


async def change_role_of(cluster: OperatedCluster, node_id: str, role: Role, say: Say) -> Printed:
    limit = (await cluster.ask(TimeoutsOrder())).nodes.drain_s
    return await saying_if_slow(
        cluster.ask(ChangeRoleOrder(node_id, role)),
        lambda: say(f"{node_id}: finishing what it has (up to {limit:.0f} s), to become a {role.value} node"),
    )


def pause(target: CommandTarget, options: argparse.Namespace) -> Printed:
    return _say_paused(target, target.ask(PauseOrder(options.names)))


def resume(target: CommandTarget, options: argparse.Namespace) -> Printed:
    return _say_paused(target, target.ask(ResumeOrder(options.names)))


def _say_paused(target: CommandTarget, paused: list[str]) -> Printed:
    target.say(f"no new requests: {', '.join(paused)}" if paused else "nothing is paused")
    return {"paused": paused}


def reset_cache(target: CommandTarget, options: argparse.Namespace) -> Printed:
    done = target.ask(ResetCacheOrder(options.names))
    said = f"the prefix cache is empty: {', '.join(done)}"
    target.say(said if done else "no node serves: there was nothing to empty")
    return {"reset": done}


# --- the end


def down(which: WhichCluster, *, now: bool, say: Say = say_line) -> bool:
    """Ends the cluster. Returns whether all of its requests ended in time."""
    with joined(which):
        from tandem.cluster.on_ray.remote_controller import (
            chosen,
            end_without_a_controller,
            find_controller,
            the_controller,
        )

        async def find() -> RemoteController | None:
            """Returns None if there was none, and has then ended what it left."""
            name, address = await from_own_thread("find-deployment", lambda: chosen(which.name)), own_address()
            say(f"{name} at {url_of(address, name) or f'the Ray cluster of {address}'}:")
            controller = await from_own_thread("find-controller", lambda: find_controller(name))
            if controller is None and await end_without_a_controller(name, DOWN):
                say("it had no controller any more")
                return None
            return controller or await from_own_thread("find-controller", lambda: the_controller(name))

        async def work() -> bool:
            controller = await while_ray_runs(find())
            return controller is not None and await end_cluster(controller, now=now, say=say)

        finished = asyncio.run(work())
    say("everything was finished; it is down" if finished else "it is down; not everything was finished")
    return finished


async def end_cluster(controller: RemoteController, *, now: bool, say: Say) -> bool:
    """Ends the cluster even if its controller does not answer. Returns whether all of its requests ended in time."""

    async def drain_all() -> bool:
        limit = (await controller.ask(TimeoutsOrder())).nodes.drain_s
        say(f"finishing what is running (up to {limit:.0f} s)")
        return await controller.drain(limit)

    finished = False
    if not now:
        try:
            finished = await while_ray_runs(drain_all())
        except ServerEnded:
            raise
        except TandemError as error:
            say(f"it cannot be drained: {error}")
        except asyncio.CancelledError:
            say("it takes nothing new, and is not ended: `tandem down --now` ends it")
            raise
    with suppress(ServerEnded):  # it ends once its end is recorded, maybe before we have seen every process end
        await while_ray_runs(saying_if_slow(controller.end(END_S, DOWN), lambda: say("ending every process")))
    return finished
