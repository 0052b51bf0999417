"""The controller's process, without Ray, with several commands that call it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
import pytest

from tandem.base.errors import InternalError, InvalidRequest, TandemError, Unavailable
from tandem.cluster.commands.following import Follower
from tandem.cluster.config import ControllerConfig, PoolConfig, PoolsConfig, TandemConfig
from tandem.cluster.control import AppliedChange, ClusterEnd, ClusterView, ExchangePhase, ExchangeView, PoolView
from tandem.cluster.events import Events
from tandem.cluster.orders import AdaptersOrder, ApplyOrder, Order, ScaleOrder, ViewOrder
from tandem.cluster.pools.changes import difference
from tandem.cluster.pools.controller_host import ClusterAccount, ClusterStage, ConfigChange, ControllerHost
from tandem.cluster.tasks import cancel
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import FakeClock, RecordedEvents, settle
from tests.cluster.pools.memory_store import MemoryStore

T = TypeVar("T")

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode
replace = msgspec.structs.replace


class FakeControl:
    def __init__(self) -> None:
        self.config = TandemConfig()
        self.sizes = {Role.PREFILL: 1, Role.DECODE: 1, Role.AGGREGATED: 0}

    async def view(self) -> ClusterView:
        pools = [PoolView(role, size, size, size, size) for role, size in self.sizes.items()]
        return ClusterView("fake", pools, [], [], [])

    async def scale(self, wanted: dict[Role, int]) -> list[str]:
        if wanted.get(Role.DECODE) == 0:
            raise InvalidRequest("a node must write answers")
        self.sizes |= wanted
        return [f"{role.value}: {size}" for role, size in wanted.items()]

    async def configuration(self) -> TandemConfig:
        return self.config

    async def apply(self, config: TandemConfig, *, dry_run: bool) -> AppliedChange:
        sizes = difference(self.config, config).sizes
        self.config = config
        return AppliedChange([f"{role.value}: {size}" for role, size in sizes.items()], [], [], [], 0)

    async def adapters(self, load: Mapping[str, str], unload: Sequence[str]) -> dict[str, str]:
        return dict(load)


class FakeDeployment:
    def __init__(self, events: Events) -> None:
        self.events = events
        self.control = FakeControl()
        self.url = "http://router"
        self.model_name = "fake"
        self.may_start = asyncio.Event()
        self.may_recover = asyncio.Event()
        self.error: Exception | None = None
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.stopped = False
        self.may_stop = asyncio.Event()
        self.may_stop.set()
        self.drained = False

    async def start(self) -> None:
        self.events.progress("decode-0", "loading", 0.5)
        await self.may_start.wait()
        if self.error is not None:
            raise self.error
        self.events.ready("decode-0", "decode")

    async def recovered(self) -> None:
        await self.may_recover.wait()

    async def failed(self) -> str:
        return await asyncio.shield(self.failure)

    async def drain(self) -> bool:
        self.drained = True
        return True

    async def stop(self) -> None:
        await self.may_stop.wait()
        self.stopped = True


class Rig:
    """The rig with the host's platform, and the questions of a following command."""

    def __init__(self, ended: ClusterEnd | None = None) -> None:
        self.id = "one"
        self.endings = MemoryStore()
        self.endings.state = encode(ended) if ended else None
        self.restarted = asyncio.Event()
        self.ended = asyncio.Event()
        self.owner: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.made: FakeDeployment
        self.exchanges: list[tuple[dict[str, str], dict[str, str]]] = []
        self.exchanged: ExchangeView | None = None
        self.clock = FakeClock()
        self.host = ControllerHost(encode(TandemConfig()), self, self.clock)
        self.events = RecordedEvents()
        self.follower = Follower(self, self.events, self.clock)

    def deployment(self, config: TandemConfig, events: Events) -> FakeDeployment:
        self.made = FakeDeployment(events)
        return self.made

    async def exchange(self) -> ExchangeView | None:
        return self.exchanged

    async def begin_exchange(self, old: TandemConfig, new: TandemConfig) -> str:
        self.exchanges.append((old.controller.env, new.controller.env))
        return f"exchange {len(self.exchanges)}"

    async def owner_ended(self) -> str:
        return await asyncio.shield(self.owner)

    def restart(self) -> None:
        self.restarted.set()

    async def end(self) -> None:
        self.ended.set()

    async def ending(self) -> ClusterEnd | None:
        kept = await self.endings.load()
        return decode(kept, type=ClusterEnd) if kept else None

    async def recorded(self) -> str | None:
        ending = await self.ending()
        return ending.why if ending else None

    async def revive(self) -> None:
        """It lives."""

    async def account_after(self, seen: int, stage: ClusterStage) -> ClusterAccount:
        return decode(await self.host.account_after(seen, stage.value, 60.0), type=ClusterAccount)

    async def __aenter__(self) -> Rig:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.host.end("the test")
        assert self.made.stopped
        await self.clock.advance(60.0)
        assert self.ended.is_set()


@asynccontextmanager
async def serving() -> AsyncIterator[Rig]:
    async with Rig() as rig:
        rig.made.may_start.set()
        await rig.follower.until_serving()
        yield rig


async def test_who_follows_sees_what_happens_until_it_serves() -> None:
    async with Rig() as rig:
        following = asyncio.create_task(rig.follower.until_serving())
        await settle()
        assert rig.events.of("progress", "decode-0") == ["loading"]
        assert not following.done()
        rig.made.may_start.set()
        account = await following
        assert (account.url, account.model) == ("http://router", "fake")
        assert rig.events.of("ready", "decode-0") == ["decode"]


@pytest.mark.parametrize(
    ("error", "seen_as"), [(Unavailable("no memory"), Unavailable), (KeyError("a bug"), InternalError)]
)
async def test_a_start_that_fails_is_told_to_who_follows(error: Exception, seen_as: type[TandemError]) -> None:
    async with Rig() as rig:
        rig.made.error = error
        rig.made.may_start.set()
        with pytest.raises(seen_as):
            await rig.follower.until_serving()


async def test_a_cluster_that_answers_after_all_serves() -> None:
    """A controller has restarted and its machines have reappeared later: it is drained before it ends, like any other."""
    async with Rig() as rig:
        rig.made.error = Unavailable("no machine")
        rig.made.may_start.set()
        with pytest.raises(Unavailable, match="no machine"):
            await rig.follower.until_serving()
        rig.made.may_recover.set()
        account = await rig.follower.until_serving()
        assert account.failure is None
        assert await rig.host.drain()


async def test_a_controller_that_can_do_nothing_any_more_says_so_and_ends_and_the_cluster_goes_on() -> None:
    async with serving() as rig:
        over = asyncio.create_task(rig.follower.until_over())
        rig.made.failure.set_result("supervise decode-0 died")
        await rig.restarted.wait()
        await settle()
        assert "supervise decode-0 died" in rig.events.of("trouble", "controller")[0]
        assert not over.done()
        assert not rig.made.stopped
        await cancel(over)


async def test_an_end_is_recorded_before_anything_is_ended_and_told_to_who_follows() -> None:
    async with serving() as rig:
        over = asyncio.create_task(rig.follower.until_over())
        await settle()
        rig.made.may_stop.clear()
        ending = asyncio.create_task(rig.host.end("`tandem down`"))
        await settle()
        assert await rig.recorded() == "`tandem down`"
        assert not rig.made.stopped
        assert not over.done(), "it is not over while it is being ended"
        rig.made.may_stop.set()
        await ending
        assert (await over).why == "`tandem down`"
        with pytest.raises(Unavailable, match="has been stopped"):
            await ordered(rig, ViewOrder())


async def test_a_controller_whose_down_was_interrupted_ends_by_itself() -> None:
    """`tandem down` kills its process when all others have ended. Left over, it would keep the deployment's name."""
    async with Rig() as rig:
        await rig.host.end("`tandem down`")
        await rig.clock.advance(20.0)
        assert not rig.ended.is_set()
        await rig.clock.advance(20.0)
        assert rig.ended.is_set()


async def test_a_deployment_ends_with_the_command_that_it_belongs_to() -> None:
    async with serving() as rig:
        rig.owner.set_result("the command has ended")
        await rig.ended.wait()
        assert rig.made.stopped
        assert await rig.recorded() == "the command has ended"


async def test_a_controller_that_finds_a_recorded_end_carries_it_out_and_starts_nothing() -> None:
    async with Rig(ClusterEnd(0.0, "`tandem down`")) as rig:
        await rig.ended.wait()
        assert rig.events.happened == []
        assert (await rig.follower.until_over()).why == "`tandem down`"


async def test_a_controller_whose_store_is_away_waits_for_it() -> None:
    async with Rig() as rig:
        rig.endings.error = Unavailable("away")
        rig.made.may_start.set()
        following = asyncio.create_task(rig.follower.until_serving())
        await rig.clock.advance(5)
        assert not following.done()
        rig.endings.error = None
        await rig.clock.advance(5)
        assert (await following).stage is ClusterStage.SERVING


async def test_what_is_asked_reaches_the_controller() -> None:
    async with Rig() as rig:
        assert await ordered(rig, ScaleOrder({Role.DECODE: 2})) == ["decode: 2"]
        changes = await rig.host.act("scale", b'{"pools": {"decode": 3}}')
        assert changes == b'{"changes":["decode: 3"]}'
        view = await ordered(rig, ViewOrder())
        assert {pool.role: pool.wanted for pool in view.pools}[Role.DECODE] == 3
        assert await rig.host.drain(), "a controller that was killed while it drained is asked again when it is back"
        rig.made.may_start.set()
        await rig.follower.until_serving()
        assert await rig.host.drain()


async def test_an_operators_request_over_http_sets_no_environment_and_a_command_on_a_machine_does() -> None:
    async with Rig() as rig:
        wanted = TandemConfig(pools=PoolsConfig(decode=PoolConfig(nodes=1, env={"LD_PRELOAD": "/x.so"})))
        with pytest.raises(InvalidRequest, match=r"pools\.decode\.env\.LD_PRELOAD cannot be changed over HTTP"):
            await rig.host.act("apply", msgspec.json.encode({"config": wanted}))
        with pytest.raises(InvalidRequest, match=r"'/home/x' is in none of the folders"):
            await rig.host.act("adapters", b'{"load": {"x": "/home/x"}}')
        assert rig.made.control.config == TandemConfig()
        await ordered(rig, ApplyOrder(wanted))
        assert rig.made.control.config == wanted
        await rig.host.act("apply", msgspec.json.encode({"config": wanted}))
        assert await ordered(rig, AdaptersOrder({"x": "/home/x"})) == {"x": "/home/x"}


async def test_another_environment_for_the_controller_begins_an_exchange_and_one_at_a_time() -> None:
    async with Rig() as rig:
        wanted = TandemConfig(controller=ControllerConfig(env={"PYTHONPATH": "/later"}))
        told = await ordered(rig, ApplyOrder(wanted, dry_run=True))
        assert (told.exchange, rig.exchanges) == ("", [])

        rig.made.control.config = TandemConfig()
        rig.exchanged = ExchangeView("another", ExchangePhase.REPLACING)
        with pytest.raises(Unavailable, match="is being replaced"):
            await ordered(rig, ApplyOrder(wanted))
        assert rig.made.control.config == TandemConfig(), "nothing of it was applied"

        rig.exchanged = ExchangeView("another", ExchangePhase.FAILED, "it did not serve")
        told = await ordered(rig, ApplyOrder(wanted))
        assert told.exchange == "exchange 1"
        assert rig.exchanges == [({}, {"PYTHONPATH": "/later"})]
        view = await ordered(rig, ViewOrder())
        assert view.exchange == rig.exchanged


async def test_the_same_configuration_again_changes_nothing_and_other_sizes_are_applied() -> None:
    async with Rig() as rig:
        assert await configure(rig, TandemConfig()) == ConfigChange([], [])
        more = TandemConfig(pools=PoolsConfig(decode=PoolConfig(nodes=2)))
        assert await configure(rig, more) == ConfigChange(["decode: 2"], [])
        await ordered(rig, ScaleOrder({Role.DECODE: 3}))
        assert await configure(rig, more) == ConfigChange([], [])
        assert rig.made.control.sizes[Role.DECODE] == 3, "what an operator scaled stays"


async def test_a_deployment_that_is_being_ended_is_not_served_once_more() -> None:
    """`tandem serve` while `tandem down` waits for the last requests would say that it answers."""
    async with serving() as rig:
        assert await rig.host.drain()
        with pytest.raises(Unavailable, match="`tandem down` ends it: start it again when it is down"):
            await configure(rig, TandemConfig())


async def test_what_cannot_be_applied_is_named_without_its_value() -> None:
    async with Rig() as rig:
        config = TandemConfig()
        router = replace(config.router, api_keys_file="/secret/file", port=9)
        model = replace(config.model, path="another")
        change = await configure(rig, replace(config, name="another", model=model, router=router))
        assert change.applied == []
        names = [line.split()[0] for line in change.refused]
        assert names == ["model.path", "name", "router.api_keys_file", "router.port"]
        assert ["tandem apply" in line for line in change.refused] == [True, False, True, True]
        assert "tandem down" in change.refused[1]
        assert all("secret" not in line for line in change.refused)


async def test_a_command_of_another_version_is_told_so() -> None:
    async with Rig() as rig:
        newer = {**msgspec.to_builtins(TandemConfig()), "invented_later": 1}
        with pytest.raises(Unavailable, match=r"another version of Tandem.*invented_later"):
            await rig.host.configure(encode(newer))
        with pytest.raises(Unavailable, match=r"another version of Tandem.*invented_later"):
            await rig.host.order("apply", msgspec.json.encode({"config": newer}))


async def configure(rig: Rig, config: TandemConfig) -> ConfigChange:
    return decode(await rig.host.configure(encode(config)), type=ConfigChange)


async def ordered(rig: Rig, order: Order[T]) -> T:
    return order.decoded(await rig.host.order(order.action, order.body()))
