"""A controller that is killed at any step of a rollout, and what else may happen during one. Nothing is wrong with the new
configuration here, so no rollout may be taken back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, TandemError, Unavailable
from tandem.cluster.config import TandemConfig
from tandem.cluster.launcher import CheckKept
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import (
    FakeHosts,
    FakeNode,
    FakeProcess,
    FakeRouter,
    Rig,
    in_loop,
    one_machine,
    settle,
)
from tests.cluster.pools.memory_store import MemoryStore
from tests.cluster.pools.pools_rig import pools

replace = msgspec.structs.replace
LONG_S = 400.0
QUIET_S = 40  # without a rollout: what leaves has gone by then, and often before
SURELY_QUIET_S = 4  # after the last process went that leaves
VARIATIONS = int(os.environ.get("TANDEM_ROLLOUT_VARIATIONS", "1"))  # of each step
EVERY = 5 if VARIATIONS == 1 else 1  # the steps at which something else than a kill happens
# At which steps the controller is killed. A rollout of nodes and routers has the steps of either; every third is before an effect or after it.
KILLED_EVERY = {"both": 1, "routers": 3, "nodes": 3, "taken back": 3} if VARIATIONS == 1 else {}
FAILOVERS, SEQS = 7, 77
STEPS_OF_BOTH = 60  # a rollout of one prefill node, two decode nodes and a router has some more


class Steps:
    """Every record and every effect of the controller is a step. At step `fatal` it goes no further."""

    def __init__(self, rig: Rig, chance: random.Random) -> None:
        self.rig, self.chance = rig, chance
        self.fatal: int | None = None
        self.taken = 0
        self.reached = False
        self.is_slow = False
        self.at: int | None = None  # the step at which something else happens
        self.happens: Callable[[], None] = lambda: None
        self.delays = {name: chance.choice([0.0, 0.0, 2.0, 9.0]) for name in ("start", "finish", "stop")}
        save = rig.store.save

        async def saved(kept: bytes, check: CheckKept | None = None) -> None:
            await self.step()
            await save(kept, check)
            await self.step()

        rig.store.save = saved  # type: ignore[method-assign]
        names = [f"{role.value}-{i}" for role in Role for i in range(20)]
        names += ["router", *(f"router~{i}" for i in range(2, 20))]
        rig.launcher.prepare |= dict.fromkeys(names, self._prepare)

    async def step(self) -> None:
        self.taken += 1
        if self.taken == self.at:
            self.at = None
            self.happens()
        if self.taken == self.fatal:
            self.reached = True
        if self.reached:
            await asyncio.Event().wait()

    def _prepare(self, process: FakeProcess, _: int) -> None:
        def stepped(call: Callable[..., Awaitable[Any]], delay: str) -> Callable[..., Awaitable[Any]]:
            async def work(*args: Any) -> Any:
                await self.step()
                if (seconds := self.delays[delay]) and self.is_slow:
                    await self.rig.clock.sleep(seconds)
                result = await call(*args)
                await self.step()
                return result

            return work

        for name, delay in (("start", "start"), ("drain", "finish"), ("leave", "finish"), ("stop", "stop")):
            if hasattr(process, name):
                call = getattr(process, name)
                if name == "start" and isinstance(process, FakeRouter):
                    call = self._on_its_port(process, call)
                setattr(process, name, stepped(call, delay))

    def _on_its_port(
        self, router: FakeRouter, start: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        async def work(*args: Any) -> Any:
            others = [one for one in self.rig.launcher.routers if one is not router and not one.died.done()]
            if not router.door and any(one.config.port == router.config.port for one in others):
                raise ConfigurationError("router.port: cannot listen: Address already in use")
            return await start(*args)

        return work

    def live_on(self) -> None:
        self.fatal, self.taken, self.reached, self.is_slow = None, 0, False, False


def wish(rig: Rig, kind: str) -> TandemConfig:
    config = rig.config
    if kind != "nodes":
        config = replace(config, router=replace(config.router, max_failovers=FAILOVERS))
    if kind != "routers":
        config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=SEQS))
    return config


async def next_controller(rig: Rig, steps: Steps, fatal: int | None) -> bool:
    """The controller dies, and the next one starts, unless it dies at step `fatal` of its own. Returns whether it has started."""
    rig.hosts.forget_waiters()
    await rig.kill_controller()
    await rig.clock.advance(steps.chance.choice([0.0, 1.0, 15.0]))
    steps.live_on()
    steps.fatal, steps.is_slow = fatal, fatal is not None
    starting = asyncio.create_task(rig.controller.start())
    while not (starting.done() or steps.reached):
        await rig.clock.advance(1.0)
    if not steps.reached:
        await starting
    return not steps.reached


def num_living(rig: Rig) -> int:
    return sum(not process.died.done() for process in rig.launcher.everything)


def num_wanted(rig: Rig) -> int:
    """How many processes are to be there after a rollout, among them one router."""
    return 1 + sum(size or 0 for size in rig.controller.pools.state.sizes.values())


async def roll_out(kind: str, fatal: int | None, seed: int) -> int:
    """Returns how many steps the rollout took."""
    chance = random.Random(seed)
    hosts = FakeHosts(one_machine(16))
    async with (
        Rig(pools=pools(1, chance.choice([1, 2])), hosts=hosts) as rig,
        contextlib.AsyncExitStack() as clean_up,
    ):
        steps = Steps(rig, chance)
        clean_up.callback(steps.live_on)  # so that a failure can be told
        await rig.controller.start()
        steps.taken, steps.fatal, steps.is_slow = 0, fatal, fatal is not None
        asked = wish(rig, kind)
        goes_back_after = chance.choice([1.0, 6.0, 11.0]) if kind == "taken back" else None
        asking = asyncio.create_task(rig.controller.apply(asked, dry_run=False))
        kills = quiet = 0
        while quiet < QUIET_S and rig.clock.now() < LONG_S:
            await rig.clock.advance(1.0)
            under_way = rig.controller.pools.state.rollout is not None or not asking.done()
            quiet = 0 if under_way or steps.reached or goes_back_after is not None else quiet + 1
            if quiet >= SURELY_QUIET_S and num_living(rig) == num_wanted(rig):
                break
            if steps.reached and kills < 2:
                kills += 1
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                if await next_controller(
                    rig, steps, chance.randrange(1, 30) if seed % 2 and kills == 1 else None
                ):
                    # The command asks the new controller again.
                    with contextlib.suppress(Unavailable):
                        asking = asyncio.create_task(rig.controller.apply(asked, dry_run=False))
                        await settle()
            if goes_back_after is not None and rig.clock.now() >= goes_back_after and not steps.reached:
                with contextlib.suppress(ConfigurationError):
                    if asking.done():
                        if rig.controller.pools.state.rollout is None:
                            goes_back_after = None  # it is over already
                        back = asyncio.create_task(rig.controller.go_back())
                        await settle()
                        if back.done():
                            back.result()
                            goes_back_after = None
                        else:
                            await rig.clock.advance(0.5)
        with contextlib.suppress(TandemError, asyncio.CancelledError):
            await asking
        taken, steps.fatal, steps.reached = steps.taken, None, False
        view = await rig.controller.view()
        said = [one.text for one in view.decisions if "taken back: " in one.text]
        allowed = "as asked" if kind == "taken back" else "nothing may be said"
        assert view.rollout is None, view.rollout
        assert all(allowed in text for text in said), said
        running = rig.launcher.running
        routers = [router for router in rig.launcher.routers if not router.died.done()]
        assert {(router.name, router.phase) for router in view.routers} == {(routers[0].name, "ready")}
        assert len(running) == sum(rig.config.pools.of(role).nodes or 0 for role in Role)
        seqs = {node.config.engine.scheduler.max_num_seqs for node in running}
        failovers = {router.config.max_failovers for router in routers}
        if kind == "taken back":
            assert (len(seqs), len(failovers)) == (1, 1)
            assert (seqs == {SEQS}) == (failovers == {FAILOVERS}), "it is one of the two, whole"
        else:
            assert (seqs == {SEQS}) == (kind != "routers")
            assert (failovers == {FAILOVERS}) == (kind != "nodes")
        assert routers[0].node_ids == {node.info.node_id for node in running}, [
            one.name for one in rig.launcher.routers
        ]
        return taken


@pytest.mark.slow
@pytest.mark.timeout(300 * VARIATIONS)
@pytest.mark.parametrize("kind", ["routers", "nodes", "both", "taken back"])
def test_a_controller_that_dies_at_any_step_goes_on(kind: str) -> None:
    steps = 0

    @in_loop
    async def count() -> None:
        nonlocal steps
        steps = await roll_out(kind, None, 0)

    count()
    assert steps > 10
    for fatal in range(1, steps + 1, KILLED_EVERY.get(kind, 1)):
        for variation in range(VARIATIONS):

            @in_loop
            async def kill(fatal: int = fatal, seed: int = fatal * 100 + variation) -> None:
                await roll_out(kind, fatal, seed)

            try:
                kill()
            except BaseException as error:
                error.add_note(f"{kind}: killed at step {fatal}, seed {fatal * 100 + variation}")
                raise


OTHER_SEQS = 78
FULL_S = (3.0, 8.0, 60.0)
DECODE = 3

Call = Callable[[], Awaitable[object]]


class Orders:
    """Operators, each with one order. Who is told to try again, or loses the controller, asks again until it is done."""

    def __init__(self) -> None:
        self._open: dict[str, Call] = {}
        self._asking: dict[str, asyncio.Task[object]] = {}

    def begin(self, what: str, call: Call) -> None:
        self._open[what] = call

    async def look(self) -> bool:
        """Returns whether every order is done."""
        for what, task in list(self._asking.items()):
            if task.done():
                del self._asking[what]
                if not task.cancelled() and not isinstance(task.exception(), Unavailable):
                    task.result()
                    del self._open[what]
        for what in self._open.keys() - self._asking.keys():
            self._asking[what] = asyncio.ensure_future(self._open[what]())
        await settle()
        return not self._open


async def meanwhile(what: str, at: int, seed: int) -> None:
    """A rollout of nodes and routers, and something else at one of its steps. With an odd seed the controller dies some steps later."""
    chance = random.Random(seed)
    async with (
        Rig(pools=pools(1, 2), hosts=FakeHosts(one_machine(16))) as rig,
        contextlib.AsyncExitStack() as clean_up,
    ):
        store = MemoryStore()
        rig.store = store
        rig.controller = rig.new_controller()
        steps, orders = Steps(rig, chance), Orders()
        clean_up.callback(steps.live_on)
        await rig.controller.start()
        asked = wish(rig, "both")
        other = replace(asked, scheduler=replace(asked.scheduler, max_num_seqs=OTHER_SEQS))
        full_until: float | None = None

        def happens() -> None:
            nonlocal full_until
            if seed % 2:
                steps.fatal = steps.taken + chance.randrange(1, 20)
            match what:
                case "scaled":
                    orders.begin(what, lambda: rig.controller.scale({Role.DECODE: DECODE}))
                case "applied":
                    orders.begin(what, lambda: rig.controller.apply(other, dry_run=False))
                case "no space":
                    full_until = rig.clock.now() + chance.choice(FULL_S)
                    store.error = Unavailable("no space left on device")

        orders.begin("rollout", lambda: rig.controller.apply(asked, dry_run=False))
        steps.taken, steps.at, steps.happens, steps.is_slow = 0, at, happens, True
        quiet = 0
        while quiet < QUIET_S and rig.clock.now() < LONG_S:
            done = await orders.look()
            await rig.clock.advance(1.0)
            if full_until is not None and rig.clock.now() >= full_until:
                store.error = full_until = None
            if steps.reached and store.error is None:
                await next_controller(rig, steps, None)
            is_over = done and full_until is None and rig.controller.pools.state.rollout is None
            quiet = quiet + 1 if is_over else 0
            if quiet >= SURELY_QUIET_S and num_living(rig) == num_wanted(rig):
                break
        assert steps.at is None, "it has happened"
        view = await rig.controller.view()
        assert view.rollout is None, view.rollout
        assert not [one.text for one in view.decisions if "taken back" in one.text]
        (router,) = (router for router in rig.launcher.routers if not router.died.done())
        running = rig.launcher.running
        assert router.config.max_failovers == FAILOVERS
        assert len(running) == 1 + (DECODE if what == "scaled" else 2)
        assert router.node_ids == {node.info.node_id for node in running}
        (seqs,) = {node.config.engine.scheduler.max_num_seqs for node in running}
        assert seqs in ({SEQS, OTHER_SEQS} if what == "applied" else {SEQS})


@pytest.mark.slow
@pytest.mark.timeout(300 * VARIATIONS)
@pytest.mark.parametrize("what", ["scaled", "applied", "no space"])
def test_at_any_step_something_else_may_happen(what: str) -> None:
    for at in range(1, STEPS_OF_BOTH, EVERY):
        for variation in range(VARIATIONS):
            seed = at * 100 + variation + at // EVERY

            @in_loop
            async def happen(at: int = at, seed: int = seed) -> None:
                await meanwhile(what, at, seed)

            try:
                happen()
            except BaseException as error:
                error.add_note(f"{what} at step {at}, seed {seed}")
                raise


@in_loop
async def test_a_store_that_takes_nothing_for_a_while_only_delays_a_rollout() -> None:
    async with Rig(pools=pools(1, 2), hosts=FakeHosts(one_machine(16))) as rig:
        await rig.controller.start()
        before = await rig.controller.configuration()
        rig.store.error = Unavailable("no space left on device")  # type: ignore[attr-defined]
        with pytest.raises(Unavailable, match="no space left"):
            await rig.controller.apply(wish(rig, "both"), dry_run=False)
        assert await rig.controller.configuration() == before
        rig.store.error = None  # type: ignore[attr-defined]
        await rig.controller.apply(wish(rig, "both"), dry_run=False)
        for _ in range(12):
            rig.store.error = Unavailable("no space left on device")  # type: ignore[attr-defined]
            await rig.clock.advance(9.0)
            assert any(node.config.role is Role.DECODE for node in rig.launcher.running)
            rig.store.error = None  # type: ignore[attr-defined]
            await rig.clock.advance(4.0)
        await rig.clock.advance(LONG_S)
        view = await rig.controller.view()
        assert (view.rollout, [one.text for one in view.decisions if "taken back" in one.text]) == (None, [])
        assert {node.config.engine.scheduler.max_num_seqs for node in rig.launcher.running} == {SEQS}


@pytest.mark.parametrize("decode", [1, 4])
@in_loop
async def test_a_pool_that_is_scaled_during_a_rollout_has_its_size_and_one_configuration(decode: int) -> None:
    async with Rig(pools=pools(1, 2), hosts=FakeHosts(one_machine(16))) as rig:
        await rig.controller.start()
        await rig.controller.apply(wish(rig, "both"), dry_run=False)
        await rig.clock.advance(9.0)
        await rig.controller.scale({Role.DECODE: decode})
        with pytest.raises(Unavailable, match="a rollout is running"):
            await rig.controller.apply(rig.config, dry_run=False)
        await rig.clock.advance(LONG_S)
        view = await rig.controller.view()
        assert (view.rollout, [one.text for one in view.decisions if "taken back" in one.text]) == (None, [])
        nodes = [node for node in rig.launcher.running if isinstance(node, FakeNode)]
        assert len(nodes) == 1 + decode
        assert {node.config.engine.scheduler.max_num_seqs for node in nodes} == {SEQS}


@in_loop
async def test_an_end_at_any_step_of_a_rollout_leaves_nothing_running() -> None:
    for at in range(1, STEPS_OF_BOTH, EVERY):
        async with Rig(pools=pools(1, 2), hosts=FakeHosts(one_machine(16))) as rig:
            steps = Steps(rig, random.Random(at))
            await rig.controller.start()
            ending: list[asyncio.Task[None]] = []
            steps.happens = lambda: ending.append(asyncio.create_task(rig.controller.stop()))  # noqa: B023
            steps.taken, steps.at, steps.is_slow = 0, at, True
            asking = asyncio.create_task(rig.controller.apply(wish(rig, "both"), dry_run=False))
            while not (ending and ending[0].done()):
                await rig.clock.advance(1.0)
                assert rig.clock.now() < LONG_S, f"step {at}"
            ending[0].result()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert num_living(rig) == 0, f"step {at}"
            steps.live_on()
