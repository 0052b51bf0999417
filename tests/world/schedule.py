"""One schedule: a cluster, requests and faults by a seed; then everything heals. What must hold:

- at every moment a client has a prefix of the right answer, and at the end all of it, or a typed error that is true;
- without faults nothing fails;
- after the faults every request ends, every block, transfer and place comes back, and new requests are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import math
import os
import random
import threading
import traceback
from collections.abc import Collection, Iterator
from typing import Any

from tandem.api.sequence import SequenceSpec
from tandem.base.errors import AdapterMissing, InternalError, TandemError
from tandem.kvtransfer.config import ChecksumPolicy, TransferConfig
from tandem.node.loop import ResetCache
from tandem.simulator.clock import VirtualLoop
from tandem.wire.handoff import ProcessIdentity
from tandem.wire.nodes import NodeInfo, Role
from tandem.wire.requests import RequestFacts, forget_drawn_ids
from tandem.wire.sampling import SamplingParams
from tandem.wire.sharing import LEASE_S
from tests.world.adapters import AdapterChanges, WorldAdapters, number_of
from tests.world.background import Background
from tests.world.clocks import Clocks
from tests.world.features import Features
from tests.world.images import Images, WorldEncoder
from tests.world.model import VOCABULARY, answer_to
from tests.world.moves import Fabric, MoveWeather
from tests.world.network import Network, OnFrame, Weather
from tests.world.node import WorldNode
from tests.world.process import Process, begin_pids
from tests.world.router import WorldRouter
from tests.world.sharing import Sharing
from tests.world.storage import Asked, Storage
from tests.world.stranger import STRANGER, Stranger
from tests.world.wrong_kv import WrongKV

FAULTS_S = 20.0
AWAY = "away"  # one node stays away after the faults
PARTITION = "partition"  # a busy link between two machines is cut
LATE = "late"  # frames come late, or once more
GIVEN_UP_S = 3.0  # while all is well, what a client that went away had is free again within this
AWAY_S = 45.0
AT_ONCE_S = 7.5  # while a node has been away for long, new requests are answered within this
QUIET_S = 120.0  # after the faults, everything has ended within this time
STARTED_S = 10.0  # nodes that were killed last serve again within this
PROBE_S = 15.0  # and a new request is answered within this


@dataclasses.dataclass
class Outcome:
    seed: int
    violations: list[str] = dataclasses.field(default_factory=list)
    history: list[str] = dataclasses.field(default_factory=list)
    requests: int = 0
    answered: int = 0
    errors: dict[str, int] = dataclasses.field(default_factory=dict)
    faults: int = 0
    frames: int = 0
    steps: int = 0
    preemptions: int = 0
    tier_loads: int = 0  # tokens
    copied: int = 0  # bytes from other nodes' tiers
    corrupted: int = 0  # blocks
    forged: int = 0  # frames that a stranger sent
    image_rows: int = 0  # that encoder nodes made
    followed: int = 0  # answers that were read to their end at another router than they were begun at
    wrong_answers: int = 0  # that were asked before their cause was found
    transfers: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    digest: str = ""  # of every frame, with its time
    parts: list[str] = dataclasses.field(default_factory=list)  # what can be left out, the largest first
    columns: list[str] = dataclasses.field(default_factory=list)  # of its diagram: who sends messages
    names: dict[str, str] = dataclasses.field(default_factory=dict)  # of requests, by their ids on nodes


class _Broken(Exception):
    """A promise was broken: the schedule ends here."""


@contextlib.contextmanager
def _drawn_from(rng: random.Random) -> Iterator[None]:
    """What the product draws from the system comes from the seed."""
    real, state = os.urandom, random.getstate()
    drawn = random.Random(rng.random()).randbytes
    # `secrets` draws by what `random` has imported
    os.urandom = random._urandom = drawn  # type: ignore[assignment, attr-defined]
    random.seed(rng.random())
    forget_drawn_ids()
    begin_pids()
    try:
        yield
    finally:
        os.urandom = random._urandom = real  # type: ignore[attr-defined]
        random.setstate(state)


def is_partitioned(seed: int) -> bool:
    return random.Random(f"is {PARTITION} {seed}").random() < 0.3


def is_late(seed: int) -> bool:
    return random.Random(f"is {LATE} {seed}").random() < 0.2


def run(
    seed: int, *, with_faults: bool = True, without: Collection[str] = (), on_frame: OnFrame | None = None
) -> Outcome:
    """`without`: what the seed's schedule has and this one leaves out: nodes, requests (r1, r2 ...), faults (f1, f2 ...), and AWAY."""
    rng = random.Random(seed)
    loop = VirtualLoop()
    outcome = Outcome(seed)
    logging.disable(logging.CRITICAL)
    try:
        clocks = Clocks(seed, loop)
        with _drawn_from(rng), clocks.told():
            schedule = Schedule(loop, rng, outcome, with_faults, frozenset(without), clocks)
            schedule.network.on_frame = on_frame
            try:
                loop.run_until_complete(schedule.run())
            finally:
                schedule.count()
                _end_tasks(loop)
    except _Broken as broken:
        outcome.violations.append(str(broken))
    except Exception as error:  # a callback of the product's raised
        outcome.violations.append(f"{type(error).__name__}: {error}")
        outcome.history.append(traceback.format_exc())
    finally:
        logging.disable(logging.NOTSET)
        outcome.seconds = loop.time()
        loop.close()
    return outcome


def _end_tasks(loop: VirtualLoop) -> None:
    """A schedule that was broken leaves clients that wait."""
    for task in asyncio.all_tasks(loop):
        with contextlib.suppress(Exception):
            task.get_coro().close()


class Schedule:
    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        outcome: Outcome,
        with_faults: bool,
        without: frozenset[str],
        clocks: Clocks,
    ) -> None:
        self.loop, self.rng, self.outcome = loop, rng, outcome
        self.clocks = clocks
        self.with_faults, self.without = with_faults, without
        self.network = Network(rng, self.note)
        self.fabric = Fabric(rng, self.note)
        self.fabric.is_cut = self.network.is_cut
        self.fabric.on_broken = self.broken
        self.ended: set[ProcessIdentity] = set()
        self.nodes: dict[str, WorldNode] = {}
        self.routers: list[WorldRouter] = []
        self.machines = [f"m{i}" for i in range(rng.choice([1, 2, 3]))]
        self.transfer = TransferConfig(
            direction=rng.choice(["push", "push", "pull"]),
            lease_s=rng.choice([1.0, 3.0, 10.0]),
            timeout_s=rng.choice([5.0, 20.0]),
            handshake_timeout_s=2.0,
            checksums=ChecksumPolicy.ALL,
            canary_share=rng.choice([0.0, 0.0, 0.5]),
        )
        self._epochs = itertools.count(rng.randrange(1, 1 << 40))
        self._clients: dict[asyncio.Task[Any], WorldRouter] = {}
        families = rng.randint(1, 4)
        self._families = [self._tokens(rng.randint(0, 50)) for _ in range(families)]
        self._router_settings: dict[str, Any] = {"local_prefill": rng.choice(["auto", "never", "never"])}
        self.features = Features(outcome.seed)
        self.storage = Storage(self)
        self.sharing = Sharing(outcome.seed, bool(self.storage.tiers.cpu_slots))
        self._router_settings = {**self._router_settings, **self.sharing.router_settings}
        self.wrong_kv = WrongKV(self)
        self.transfer = self.wrong_kv.with_canary(self.transfer)
        self.stranger = Stranger(self)
        self.background = Background(self)
        self.adapters = AdapterChanges(self)
        self.images = Images(self)
        self._admitting = self._drawn_for("keys")
        self.healthy_since = 0.0
        self.has_killed = False  # a node

    def _drawn_for(self, name: str) -> random.Random:
        """Each request and fault is drawn by itself, so that it stays the same when another one is left out."""
        return random.Random(f"{self.outcome.seed} {name}")

    def has(self, part: str) -> bool:
        """Whether the schedule has this part, which may be left out."""
        if part not in self.outcome.parts:
            self.outcome.parts.append(part)
        return part not in self.without

    def note(self, text: str) -> None:
        self.outcome.history.append(f"{self.loop.time():8.3f} {text}")

    def broken(self, text: str) -> None:
        self.note(f"BROKEN: {text}")
        if not self.outcome.violations:
            self.outcome.violations.append(text)

    def _tokens(self, count: int, rng: random.Random | None = None) -> list[int]:
        return [(rng or self.rng).randrange(VOCABULARY) for _ in range(count)]

    # ── the cluster ──

    def _layout(self) -> list[tuple[str, Role]]:
        rng = self.rng
        if rng.random() < 0.1:
            return [(f"aggregated-{i}", Role.AGGREGATED) for i in range(rng.randint(1, 2))]
        return [
            *((f"prefill-{i}", Role.PREFILL) for i in range(rng.randint(1, 2))),
            *((f"decode-{i}", Role.DECODE) for i in range(rng.randint(1, 3))),
        ]

    def _start_node(self, name: str, role: Role) -> WorldNode:
        rng = self.rng
        process = Process(
            self.loop, name, rng.choice(self.machines), rng.choice([0.0, 1000.0, -3.0]), self.clocks.rate()
        )
        node = WorldNode(
            process,
            self.network,
            self.fabric,
            role,
            next(self._epochs),
            self.transfer,
            rng,
            self.ended,
            num_blocks=self._num_blocks,
            ahead=self._ahead,
            tiers=self.storage.tiers,
            scheduler=self.features.scheduler,
            has_news=self.features.has_news,
            disk=self.storage.disk_of(name),
            sharing=self.sharing,
            adapters=WorldAdapters() if self.adapters.exist else None,
            reads_images=self.images.exist,
            has_states=self.features.has_states,
            on_broken=self._on_broken,
        )
        self.adapters.starts(node)
        self.nodes[name] = node
        self.joined(process)
        return node

    def joined(self, process: Process) -> None:
        self._admit(process)
        self._add_column(process.name)
        self.note(f"{process.name} starts on {process.machine}")

    def _on_broken(self, name: str, error: BaseException) -> None:
        self.outcome.history.append("".join(traceback.format_exception(error)))
        self.broken(f"{name}: its step failed: {type(error).__name__}: {error}")

    def _start_router(self) -> WorldRouter:
        name, machine = f"router-{len(self.routers)}", self.rng.choice(self.machines)
        process = Process(self.loop, name, machine, rate=self.clocks.rate())
        router = WorldRouter(process, self.network, **self._router_settings)
        self.routers.append(router)
        self.features.join(router)
        self._admit(process)
        self._add_column(process.name)
        self.note(f"{process.name} starts")
        return router

    def _add_column(self, name: str) -> None:
        if name not in self.outcome.columns:
            self.outcome.columns.append(name)

    def _infos(self) -> list[NodeInfo]:
        nodes: list[WorldNode | WorldEncoder] = [*self.nodes.values(), *self.images.encoders.values()]
        return [node.info for node in nodes if node.process.is_alive]

    def tell_members(self) -> None:
        """Each router is told after a while, of those that live then: an older list must not follow a newer one."""
        self._tell_keys(0.3)
        for router in self.routers:
            if router.process.is_alive:
                router.process.later(
                    self.rng.uniform(0.0, 0.3), lambda router=router: router.set_members(self._infos())
                )

    @property
    def processes(self) -> list[Process]:
        """Those that live."""
        every: list[WorldNode | WorldEncoder | WorldRouter] = [
            *self.nodes.values(),
            *self.images.encoders.values(),
            *self.routers,
        ]
        return [each.process for each in every if each.process.is_alive]

    def _tell_keys(self, within_s: float) -> None:
        """Each process is told whom to admit: those that live then."""
        for process in self.processes:
            process.later(self._admitting.uniform(0.0, within_s), lambda process=process: self._admit(process))

    def _admit(self, process: Process) -> None:
        process.keys.admit(other.keys.public for other in self.processes)

    def kill_node(self, node: WorldNode) -> None:
        name, role = node.process.name, node.role
        self.note(f"{name} is killed")
        self.has_killed = True
        node.process.end()
        self.ended.add(node.process.identity)
        self.loop.call_later(self.rng.uniform(0.1, 2.0), self.tell_members)
        self.loop.call_later(self.rng.uniform(0.5, 6.0), self._restart, name, role)

    def _restart(self, name: str, role: Role) -> None:
        if not self.nodes[name].process.is_alive:
            self._start_node(name, role)
            self.tell_members()

    def kill_router(self, router: WorldRouter) -> None:
        self.note(f"{router.process.name} is killed")
        router.process.end()
        self.background.router_ends(router)
        for task, of in list(self._clients.items()):
            if of is router:
                task.cancel()
        self.loop.call_later(self.rng.uniform(0.1, 3.0), self._new_router)

    def _new_router(self) -> None:
        self._start_router()
        self.tell_members()

    # ── clients ──

    def _spec(self, label: str, within_s: float, router: WorldRouter) -> tuple[SequenceSpec, list[int]]:
        rng = self._drawn_for(label)
        family = rng.choice(self._families)
        prompt = [*family[: rng.randint(0, len(family))], *self._tokens(rng.randint(1, 40), rng)]
        num_tokens = rng.choice([1, 2, 5, 20, 45])
        asked = self.storage.asked(prompt, rng.choice([None, "a", "b"]))
        prompt = asked.prompt
        self.wrong_kv.asked(label, asked)
        lora = self.adapters.chosen(router, label)
        shown = self.images.shown(label, prompt)
        spec = SequenceSpec(
            label=label,
            facts=RequestFacts(
                prompt_token_ids=shown.prompt,
                media=shown.media,
                images=shown.files,
                sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens, seed=1),
                priority=rng.choice([0, 0, 0, 1]),
                cache_salt=asked.salt,
                lora=lora,
                job_id=asked.job,
                is_last_step=self.features.is_last_step(),
            ),
            deadline=router.process.clock() + within_s,
            keep=self.background.keep(label),
        )
        return spec, self.right(shown.read, num_tokens, number_of(lora) if lora is not None else 0)

    def right(self, read: list[int], num_tokens: int, adapter: int = 0) -> list[int]:
        """The right answer to what is read."""
        return answer_to(read, num_tokens, adapter, has_states=self.features.has_states)

    def _ask(self, router: WorldRouter, *, within_s: float, must_succeed: bool, gives_up: bool) -> asyncio.Task[None]:
        self.outcome.requests += 1
        label = f"r{self.outcome.requests}"
        spec, right = self._spec(label, within_s, router)
        self.note(f"{label} at {router.process.name}: {len(spec.facts.prompt_token_ids)} tokens, {len(right)} wanted")
        task = self.loop.create_task(self._client(router, spec, right, must_succeed))
        self.add_client(task, router, spec, right)
        if gives_up and spec.keep is None:
            self.loop.call_later(self.rng.choice([0.01, 0.1, 3.0]) * self.rng.random(), self._give_up, task, label)
        return task

    @property
    def is_busy(self) -> bool:
        """New requests come."""
        return self.loop.time() < 1.0 + FAULTS_S

    def ask_again(self, router: WorldRouter, asked: Asked, *, must_succeed: bool) -> asyncio.Task[None]:
        """Asks this prompt, which must be answered."""
        self.outcome.requests += 1
        spec = SequenceSpec(
            label=f"r{self.outcome.requests}",
            facts=RequestFacts(
                prompt_token_ids=asked.prompt,
                sampling=SamplingParams(temperature=0.0, max_tokens=5, seed=1),
                cache_salt=asked.salt,
                job_id=asked.job,
            ),
            deadline=router.process.clock() + PROBE_S,
        )
        self.wrong_kv.asked(spec.label, asked)
        self.note(f"{spec.label} at {router.process.name}: {len(asked.prompt)} tokens again, 5 wanted")
        right = self.right(asked.prompt, 5)
        task = self.loop.create_task(self._client(router, spec, right, must_succeed))
        self.add_client(task, router, spec, right)
        return task

    def add_client(self, task: asyncio.Task[Any], router: WorldRouter, spec: SequenceSpec, right: list[int]) -> None:
        """The task reads an answer at this router."""
        self._clients[task] = router
        task.add_done_callback(lambda task: self._clients.pop(task, None))
        self.background.reads(task, router, spec, right)

    @property
    def living_routers(self) -> list[WorldRouter]:
        return [router for router in self.routers if router.process.is_alive]

    def _give_up(self, task: asyncio.Task[None], label: str) -> None:
        if not task.done():
            self.note(f"{label}: its client goes away")
            task.cancel()

    async def _client(self, router: WorldRouter, spec: SequenceSpec, right: list[int], must_succeed: bool) -> None:
        label, error, asked_at = spec.label, None, self.loop.time()
        tenant = self.rng.choice(["x", "y"])
        try:
            generation = await router.dispatcher.generate([spec], tenant, eager=True)
        except TandemError as refused:
            self._on_error(router, spec, refused, must_succeed)
            return
        (life,) = generation.lives
        try:
            while not life.ended:
                await generation.news()
                tokens = list(life.ledger.tokens)
                if tokens != right[: len(tokens)] and not self.wrong_kv.explains(label, asked_at):
                    wrong = next(i for i, token in enumerate(tokens) if i >= len(right) or token != right[i])
                    self.broken(
                        f"{label}: token {wrong} is wrong (nodes {life.request_ids}, {life.failovers} failovers)"
                    )
                    return
            error = life.error
            if error is not None:
                self._on_error(router, spec, error, must_succeed)
            elif list(life.ledger.tokens) != right and not self.wrong_kv.explains(label, asked_at):
                self.broken(f"{label}: ended as {life.finish} after {len(life.ledger.tokens)} of {len(right)} tokens")
            else:
                generation.turn_ended(self.features.called())
                self.outcome.answered += 1
                self.note(f"{label} is answered" + (f", {life.failovers} failovers" if life.failovers else ""))
        finally:
            self.outcome.names |= dict.fromkeys(life.request_ids, label)
            generation.cancel()

    def _on_error(self, router: WorldRouter, spec: SequenceSpec, error: TandemError, must_succeed: bool) -> None:
        name = type(error).__name__
        self.outcome.errors[name] = self.outcome.errors.get(name, 0) + 1
        self.note(f"{spec.label}: {name}: {error}")
        if must_succeed or not self.with_faults:
            self.broken(f"{spec.label} failed although nothing was wrong: {name}: {error}")
        elif isinstance(error, InternalError):
            self.broken(f"{spec.label}: {name}: {error}")
        elif isinstance(error, AdapterMissing) and not self.has_killed:
            self.broken(f"{spec.label}: {error}, and no node that had it has ended")

    # ── faults ──

    def _fault(self) -> None:
        self.outcome.faults += 1
        name = f"f{self.outcome.faults}"
        if name in self.without:
            return
        rng = self._drawn_for(name)
        kind = rng.choice(
            ["weather", "weather", "cut", "moves", "moves", "stop", "stop", "kill", "kill", "router", "reset"]
        )
        lasts = rng.choice([0.1, 0.5, 2.0, 6.0, 12.0]) * rng.uniform(0.5, 1.5)
        alive = [node for node in self.nodes.values() if node.process.is_alive]
        if kind == "weather":
            self.network.weather = Weather(
                rng.choice([0.0, 0.05, 0.3]),
                rng.choice([0.0, 0.1]),
                rng.choice([0.0, 0.1, 0.5]),
                rng.choice([0.0, 0.02, 0.2]),
            )
            self.note(f"the network: {self.network.weather} for {lasts:.1f} s")
            self.loop.call_later(lasts, self._fair_weather)
        elif kind == "cut" and len(self.machines) > 1:
            pair = tuple(rng.sample(self.machines, 2))
            self._cut({pair, pair[::-1]} if rng.random() < 0.5 else {pair}, lasts)
        elif kind == "moves":
            self.fabric.weather = MoveWeather(
                rng.choice([0.0, 0.2]),
                rng.choice([0.0, 0.1]),
                rng.choice([0.0, 0.1, 0.5]),
                rng.choice([1e4, 1e6, 50e6]),
            )
            self.note(f"moves: {self.fabric.weather} for {lasts:.1f} s")
            self.loop.call_later(lasts, self._fair_moves)
        elif kind == "stop" and alive:
            node = rng.choice(alive)
            self.note(f"{node.process.name} is stopped for {lasts:.1f} s")
            node.process.stop()
            self.loop.call_later(lasts, self.go_on, node.process)
        elif kind == "kill" and alive:
            self.kill_node(rng.choice(alive))
        elif kind == "router":
            living = [router for router in self.routers if router.process.is_alive]
            if living:
                self.kill_router(rng.choice(living))
        elif kind == "reset" and alive:
            node = rng.choice(alive)
            self.note(f"{node.process.name}: its cache is reset")
            node.process.do(lambda: node.mailbox.put(ResetCache(threading.Event())))

    def _jump(self) -> None:
        if not self.processes:
            return
        process = self._drawn_for(f"jump {self.loop.time()}").choice(self.processes)
        self.note(f"{process.name}: its time of day jumps by {self.clocks.jump(process):.0f} s")

    def _begin_late(self) -> None:
        """For a while some frames come so late that all who knew of them have gone on, or come once more."""
        if LATE in self.without:
            return
        self.outcome.faults += 1
        rng = self.network.late_rng = self._drawn_for(f"{LATE} itself")
        self.network.late, lasts = rng.choice([0.01, 0.05, 0.2]), rng.uniform(2.0, 10.0)
        self.note(f"the network: {self.network.late:.0%} of the frames come late, for {lasts:.1f} s")
        self.loop.call_later(lasts, self._in_time)

    def _in_time(self) -> None:
        self.network.late = 0.0

    def _begin_partition(self) -> None:
        """Between two machines moves become slow, and then nothing passes: what was posted arrives when the link is back."""
        if len(self.machines) < 2 or PARTITION in self.without:
            return
        self.outcome.faults += 1
        rng = self._drawn_for(f"{PARTITION} itself")
        lasts, pair = rng.uniform(2.0, 7.0), tuple(rng.sample(self.machines, 2))
        self.fabric.weather = MoveWeather(stalls=rng.choice([0.2, 0.6]), bytes_per_s=rng.choice([2e3, 1e5]))
        self.note(f"moves: {self.fabric.weather}")
        self.loop.call_later(rng.uniform(0.2, 1.5), self._cut, {pair, pair[::-1]}, lasts)
        self.loop.call_later(lasts, self._fair_moves)

    def _cut(self, ways: set[tuple[str, str]], lasts: float) -> None:
        self.network.cut |= ways
        self.note(f"cut: {sorted(ways)} for {lasts:.1f} s")
        self.loop.call_later(lasts, self.network.cut.difference_update, ways)

    def _fair_weather(self) -> None:
        self.network.weather = Weather()

    def _fair_moves(self) -> None:
        self.fabric.weather = MoveWeather(bytes_per_s=self._bytes_per_s)

    def go_on(self, process: Process) -> None:
        if process.is_alive and process.is_stopped:
            self.healthy_since = max(self.healthy_since, self.loop.time())
            self.note(f"{process.name} goes on")
            process.go_on()

    def _stay_away(self) -> WorldNode | None:
        """One node may stay away for longer: the others must do its work."""
        living = [node for node in self.nodes.values() if node.process.is_alive]
        node = self.rng.choice(living) if living else None
        if AWAY in self.without:
            return None
        if node is None or sum(other.role is node.role for other in living) < 2 or self.rng.random() < 0.5:
            return None
        self.note(f"{node.process.name} stays away for {AWAY_S:.0f} s")
        node.process.stop()
        return node

    def _heal(self) -> None:
        self.note("everything heals")
        self.healthy_since = self.loop.time()
        self._fair_weather()
        self._fair_moves()
        self.network.cut.clear()
        self.storage.heal()
        self.sharing.stalls = False
        self.wrong_kv.heal()
        self.images.heal()
        for node in self.nodes.values():
            self.go_on(node.process)

    async def _others_do_its_work(self, away: WorldNode) -> None:
        await asyncio.sleep(AWAY_S / 2)
        if away.process.is_alive:
            await self._probe(AT_ONCE_S, promised=self._can_do_its_work(away))
        await asyncio.sleep(AWAY_S / 2)
        self.look()
        if self._clients and not away.process.is_alive:
            return  # it was killed meanwhile, and comes back
        if self._clients and self._can_do_its_work(away):
            raise _Broken(f"{len(self._clients)} clients wait although only {away.process.name} is away")
        self.go_on(away.process)

    def _can_do_its_work(self, away: WorldNode) -> bool:
        """A stopped process writes on when it goes on. What it began to write to nodes of its own machine stays held until then, because
        they cannot shut it out; where that leaves too few blocks for a long request, nothing is promised."""
        shut_in = [
            node
            for node in self.nodes.values()
            if node.process.machine == away.process.machine and not node.has_room_for_any
        ]
        return any(
            node.role is not Role.PREFILL and node is not away and node not in shut_in for node in self.nodes.values()
        )

    # ── the course ──

    async def run(self) -> None:
        rng = self.rng
        self._num_blocks = rng.choice([36, 38, 44, 80])
        if self.storage.has_tiers:
            self._num_blocks = 44  # so that the tiers have what the device has not
        self._ahead = rng.random() < 0.5
        self._bytes_per_s = rng.choice([2e5, 1e6, 5e7])
        self._fair_moves()
        for name, role in self.sharing.layout(self._layout()):
            if self.has(name):
                self._start_node(name, role)
        self.images.start()
        for _ in range(rng.randint(1, 2)):
            self._start_router()
        for process in self.processes:
            self._admit(process)
        for router in self.routers:
            router.set_members(self._infos())
        await asyncio.sleep(1.0)
        end = self.loop.time() + FAULTS_S
        bursts = [rng.uniform(0.0, FAULTS_S) for _ in range(rng.randint(1, 4))]
        for _ in range(rng.choice([8, 20, 45])):
            at = rng.choice(bursts) + 0.3 * rng.random() if rng.random() < 0.6 else rng.uniform(0.0, FAULTS_S)
            self.loop.call_later(at, self._arrival)
        self.sharing.stalls &= self.with_faults
        if self.with_faults:
            faults = [rng.uniform(0.0, FAULTS_S) for _ in range(rng.randint(1, 8))]
            for at in () if self.wrong_kv.is_calm else faults:
                self.healthy_since = math.inf
                self.loop.call_later(at, self._fault)
            if is_partitioned(self.outcome.seed) and not self.wrong_kv.is_calm:
                at = self._drawn_for(PARTITION).uniform(1.0, FAULTS_S - 8.0)
                self.loop.call_later(at, self._begin_partition)
            if is_late(self.outcome.seed) and not self.wrong_kv.is_calm:
                at = self._drawn_for(LATE).uniform(0.0, FAULTS_S - 10.0)
                self.loop.call_later(at, self._begin_late)
            self.storage.begin(FAULTS_S)
            self.wrong_kv.begin(FAULTS_S)
            self.stranger.begin(FAULTS_S)
            self.adapters.begin(FAULTS_S)
            self.images.begin(FAULTS_S)
            for at in self.clocks.times_of_jumps(FAULTS_S):
                self.loop.call_later(at, self._jump)
        while self.loop.time() < end:
            await asyncio.sleep(0.5)
            self.look()
        self._heal()
        if self.with_faults and (away := self._stay_away()) is not None:
            await self._others_do_its_work(away)
        await self._until_quiet()
        await asyncio.sleep(max(0.0, end + STARTED_S - self.loop.time()))
        self.look()
        await self._probe()
        await self._until_quiet()
        if not self.features.has_jobs:  # their blocks stay pinned for the next turn
            await self._give_up_some()
        await self.background.outlive_a_router()
        await self.wrong_kv.finish()
        await self._until_quiet()
        if self.sharing.exists:
            await asyncio.sleep(LEASE_S + 1.0)
        for node in self.nodes.values():
            node.tiers.check_idle()
        self.look()

    def count(self) -> None:
        self.outcome.parts = [
            AWAY,
            PARTITION,
            LATE,
            STRANGER,
            *self.outcome.parts,
            *(f"f{number}" for number in range(1, self.outcome.faults + 1)),
            *(f"r{number}" for number in range(1, self.outcome.requests + 1)),
        ]
        self.outcome.digest = self.network.digest.hexdigest()
        self.outcome.frames = self.network.frames
        self.outcome.steps = sum(node.service.loop.steps for node in self.nodes.values())
        self.outcome.preemptions = sum(node.scheduler.stats().preemptions for node in self.nodes.values())
        for node in self.nodes.values():
            self.outcome.image_rows += node.scheduler.stats().encoder_tokens_received
            self.outcome.copied += node.tiers.copied_bytes
            if node.worker is not None:
                for tier in node.tiers.tiers:
                    self.outcome.tier_loads += tier.loaded_tokens
                for name, number in node.worker.stats().outcomes.items():
                    self.outcome.transfers[name] = self.outcome.transfers.get(name, 0) + number

    def _arrival(self) -> None:
        label = f"r{self.outcome.requests + 1}"
        rng = self._drawn_for(f"arrival of {label}")
        living = [router for router in self.routers if router.process.is_alive]
        if label in self.without:
            self.outcome.requests += 1
        elif living:
            self._ask(rng.choice(living), within_s=300.0, must_succeed=False, gives_up=rng.random() < 0.25)

    def look(self) -> None:
        if self.outcome.violations:
            raise _Broken(self.outcome.violations.pop())

    async def _until_quiet(self) -> None:
        until = self.loop.time() + QUIET_S
        while True:
            await asyncio.sleep(0.5)
            self.look()
            busy = [node for node in self.nodes.values() if not node.is_quiet]
            held = [router for router in self.routers if router.process.is_alive and router.dispatcher.held]
            if not busy and not held and not self._clients and self.images.are_quiet:
                return
            if self.loop.time() > until:
                left = "; ".join(node.left_over() for node in busy)
                places = ", ".join(f"{router.process.name} holds {router.dispatcher.held} places" for router in held)
                raise _Broken(
                    f"not quiet {QUIET_S:.0f} s after all faults: {left}; {places}; {len(self._clients)} clients wait"
                )

    async def _give_up_some(self) -> None:
        """Clients go away in the middle of their requests, while all is well."""
        for _ in range(3):
            tasks = [
                self._ask(router, within_s=PROBE_S, must_succeed=False, gives_up=False)
                for router in self.living_routers
            ]
            await asyncio.sleep(self.rng.uniform(0.0, 0.1))
            for task in tasks:
                self._give_up(task, "a client of a healthy cluster")
            await asyncio.sleep(GIVEN_UP_S)
            self.look()
            if busy := [node.left_over() for node in self.nodes.values() if not node.is_quiet]:
                raise _Broken(f"not quiet {GIVEN_UP_S:.0f} s after a client went away: {'; '.join(busy)}")

    async def _probe(self, within_s: float = PROBE_S, *, promised: bool = True) -> None:
        tasks = [
            self._ask(router, within_s=within_s, must_succeed=promised, gives_up=False)
            for router in self.routers
            if router.process.is_alive
            for _ in range(2)
        ]
        if tasks:
            await asyncio.wait(tasks)
        self.look()
