"""A node of the world: the product's service, loop, scheduler, cache and connector around the world's model. Only threads, sockets and
moves are the world's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tandem.decode_node.node import DecodeRules
from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.config import CacheConfig, EngineConfig, Reserve, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.kvtransfer.base import ConnectorContext, SchedulerConnector, WorkerConnector
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.multi import joined
from tandem.kvtransfer.protocol.commands import Command
from tandem.kvtransfer.protocol.endpoint import ProtocolLoop, TransferEndpoint
from tandem.kvtransfer.protocol.halves import SchedulerHalf, Surroundings, WorkerHalf
from tandem.kvtransfer.protocol.settings import parse_direction
from tandem.kvtransfer.sources import ASK_S, NodeSources
from tandem.node.canary.part import CanaryChecks
from tandem.node.config import NodeConfig
from tandem.node.loop import Item, Mailbox
from tandem.node.service import NodeService
from tandem.prefill_node.node import PrefillRules
from tandem.wire.handoff import HandoffMessage, ProcessIdentity
from tandem.wire.nodes import NodeInfo, Role
from tests.world.adapters import SLOTS, WorldAdapters
from tests.world.disk import WorldDisk
from tests.world.images import ROWS_KEPT, ROWS_OF_A_STEP, TIMEOUTS, AskingWing, NodeImages
from tests.world.line import WorldLine
from tests.world.model import WorldModel
from tests.world.moves import Fabric, WorldTransport
from tests.world.network import Network, WorldChannel
from tests.world.news import WorldNews
from tests.world.process import Process, Timer
from tests.world.sharing import Sharing, WorldExchange
from tests.world.tiers import NodeTiers, TierSetting

MODEL = "world"
BLOCK_SIZE = 4
MAX_LEN = 140
AUDITED = 8  # the scheduler audits itself after one of so many turns


class WorldMailbox(Mailbox[Item]):
    """Brings the next turn of the loop forward when something comes."""

    def __init__(self) -> None:
        super().__init__()
        self.on_item: Callable[[], None] = lambda: None

    def put(self, item: Item) -> None:
        super().put(item)
        self.on_item()

    def wake(self) -> None:
        super().wake()
        self.on_item()


class WatchedHalf(SchedulerHalf):
    """Knows the pool, to say which blocks are free when something is written."""

    tables: KVCacheManager

    def bind_block_tables(self, tables: Any) -> None:
        self.tables = tables
        super().bind_block_tables(tables)


def protocol_loop_of(process: Process, transport: WorldTransport) -> type[ProtocolLoop]:
    class WorldProtocolLoop(ProtocolLoop):
        """Takes the turns of the protocol's thread on the world's clock."""

        _timer: Timer | None = None

        def start(self, endpoint: TransferEndpoint) -> None:
            self._endpoint = endpoint
            self._timer = Timer(process, self._fire)
            transport.wake = lambda: self._timer.within(0.0) if self._timer is not None else None
            self._timer.within(0.0)

        def _fire(self) -> float | None:
            wait = self.turn(self._endpoint, 0.0)
            # Moves wake the loop themselves, so that a schedule need not poll.
            return None if wait is None else min(max(wait, 0.02), ASK_S)

        def _put(self, item: HandoffMessage | Sequence[Command] | object) -> None:
            super()._put(item)  # type: ignore[arg-type]
            if self._timer is not None:
                self._timer.within(0.0)

        def stop(self, grace_s: float) -> None:
            self._timer = None

    return WorldProtocolLoop


class WorldNode:
    def __init__(
        self,
        process: Process,
        network: Network,
        fabric: Fabric,
        role: Role,
        epoch: int,
        transfer: TransferConfig,
        rng: random.Random,
        ended_processes: set[ProcessIdentity],
        *,
        num_blocks: int = 64,
        ahead: bool = False,
        tiers: TierSetting,
        scheduler: dict[str, Any],
        has_news: bool,
        disk: WorldDisk,
        sharing: Sharing,
        adapters: WorldAdapters | None,
        reads_images: bool,
        has_states: bool,
        on_broken: Callable[[str, BaseException], None],
    ) -> None:
        self.process = process
        self.role = role
        self.epoch = epoch
        self.step_s = 0.0  # of the turn under way: its messages leave so much later
        self._turns_taken = 0
        self._on_broken = on_broken
        images = NodeImages(self._took) if reads_images else None
        self.model = model = WorldModel(
            num_blocks, BLOCK_SIZE, MAX_LEN, self._took, adapters, images, has_states=has_states
        )
        # With a disk, or shared tiers, the names of blocks are those of other processes, too.
        cache = CacheConfig(
            block_size=BLOCK_SIZE,
            tiers=tiers.configs(model.block_bytes),
            remote=sharing.exists and sharing.remote,
            mirror=sharing.exists and sharing.mirror,
            encoder_tokens=ROWS_KEPT,
            checkpoint_tokens=2 * BLOCK_SIZE,
        )
        config = NodeConfig(
            node_id=process.name,
            role=role,
            engine=EngineConfig(
                cache=cache,
                scheduler=SchedulerConfig(
                    max_num_batched_tokens=rng.choice([16, 32, 64]),
                    max_num_seqs=8,
                    reserve=rng.choice(list(Reserve)),
                    max_loras=SLOTS if adapters is not None else 0,
                    max_encoder_tokens=ROWS_OF_A_STEP,
                    **scheduler,
                ),
            ),
            transfer=transfer if role is not Role.AGGREGATED else None,
            timeouts=TIMEOUTS,
        )
        self.mailbox = mailbox = WorldMailbox()
        parts: list[tuple[SchedulerConnector, WorkerConnector]] = []
        context = ConnectorContext(
            process.name,
            epoch,
            "10.0.0.1",
            BLOCK_SIZE,
            transfer,
            mailbox.wake,
            state_blocks=model.info.state_blocks,
            groups=model.info.groups,
            sources=NodeSources(process.clock),
        )
        if role is not Role.AGGREGATED:
            transport = WorldTransport(fabric, process)
            half = WatchedHalf(BLOCK_SIZE, model.info.state_blocks)
            fabric.num_free_among[transport.memory_name] = lambda blocks: half.tables.pool.num_free_among(blocks)
            worker = WorkerHalf(
                context,
                transport,
                parse_direction(transfer.direction),
                None,
                Surroundings(
                    clock=process.clock,
                    process=lambda: process.identity,
                    has_ended=lambda other: other.machine == process.machine and other in ended_processes,
                    loop=protocol_loop_of(process, transport),
                    channel=lambda host, name, on_message: WorldChannel(network, process, on_message),
                ),
            )
            parts.append((half, worker))
        self.tiers = NodeTiers(
            sharing.context(context),
            model.block_bytes,
            tiers,
            process,
            disk,
            rng,
            lambda blocks: self.scheduler.state.cache.pool.num_free_among(blocks),
            fabric.on_broken,
            lambda context: WorldExchange(context, network, fabric, process, self.tiers.await_no_copy, sharing.stall_s),
        )
        if len(self.tiers.halves) > 1:
            parts.append(joined(self.tiers.halves, longest=True))
        else:
            parts += self.tiers.halves
        self.worker: WorkerConnector | None
        scheduler_half, self.worker = (
            (None, None) if not parts else parts[0] if len(parts) == 1 else joined(parts, longest=False)
        )
        self.scheduler = Scheduler(
            config.engine.scheduler,
            config.engine.cache,
            groups=model.info.groups,
            num_blocks=num_blocks,
            max_model_len=MAX_LEN,
            connector=scheduler_half,
            load_failure_policy=transfer.on_failure,
            clock=self._step_clock,
            reads_images=reads_images,
        )
        self.engine = Engine(self.scheduler, model, self.worker, ahead=ahead, clock=self._step_clock)
        self.canary = CanaryChecks(self.scheduler, model, transfer.canary_share)
        if transfer.canary_share and role is Role.DECODE:
            self.engine.idle_check = self.canary
        self.line = WorldLine(network, process, epoch, lambda: self.step_s)
        rules = PrefillRules() if role is Role.PREFILL else DecodeRules(role)
        if has_news:
            self.scheduler.tell_cache_events()
        self.service = NodeService(
            config,
            epoch,
            rules,
            self.engine,
            mailbox,
            self.line,
            process.clock,
            news=(lambda tell, _: WorldNews(process, process.name, epoch, BLOCK_SIZE, tell)) if has_news else None,
            wings=[AskingWing(network, process, lambda: self.step_s)] if reads_images else (),
        )
        self.line.deliver = self.service.receive
        self.line.begun = self.service.line_begun
        self.line.replaced = self.service.router_replaced
        self._turns = Timer(process, self._turn)
        mailbox.on_item = lambda: self._turns.within(max(0.0, self._free_at - process.loop.time()))
        self._free_at = 0.0  # when the step under way ends
        self._reports = Timer(process, self._report)
        self._reports.within(rng.uniform(0.0, 0.25))
        self._turns.within(0.0)
        self.info = NodeInfo(
            node_id=process.name,
            role=role,
            epoch=epoch,
            request_endpoint=self.line.endpoint,
            peer_endpoint=self.worker.peer_endpoint if self.worker is not None else "",
            model=MODEL,
            max_model_len=MAX_LEN,
            block_size=BLOCK_SIZE,
            content="world",
            state_blocks=model.info.state_blocks,
            tier_endpoint=self.worker.tier_endpoint if self.worker is not None else "",
            mirrors=sharing.exists and sharing.mirror,
            pin_seconds=config.engine.scheduler.pins_for_s,
        )

    def _took(self, seconds: float) -> None:
        self.step_s += seconds

    def _step_clock(self) -> float:
        return self.process.clock() + self.step_s

    def _turn(self) -> float | None:
        self.step_s = 0.0
        try:
            wait = self.service.loop.turn(0.0)
            self._turns_taken += 1
            if self._turns_taken % AUDITED == 0:
                self.scheduler.check_integrity()
                self.tiers.check_integrity()
        except BaseException as error:
            self._on_broken(self.process.name, error)
            return None
        took, self.step_s = self.step_s, 0.0
        self._free_at = self.process.loop.time() + took
        return None if wait is None else took + wait

    def _report(self) -> float:
        self.service.report()
        return 0.25

    # ── how it stands ──

    @property
    def generation(self) -> int:
        """Of its cache."""
        return self.scheduler.state.totals.cache_generation

    @property
    def is_quiet(self) -> bool:
        stats = self.scheduler.stats()
        return (
            not stats.running
            and not stats.waiting
            and stats.free_blocks == stats.total_blocks
            and (self.worker is None or not self.worker.stats().in_progress)
        )

    @property
    def has_room_for_any(self) -> bool:
        """Whether the longest request fits beside the blocks that a silent peer may still write to."""
        stats = self.scheduler.stats()
        held = stats.held_blocks + (self.worker.stats().quarantined_blocks if self.worker is not None else 0)
        return stats.total_blocks - held >= -(-MAX_LEN // BLOCK_SIZE) + self.info.state_blocks

    def left_over(self) -> str:
        stats = self.scheduler.stats()
        transfers = self.worker.stats() if self.worker is not None else None
        return (
            f"{self.process.name}: {stats.running} run, {stats.waiting} wait, {stats.free_blocks} of {stats.total_blocks} blocks free"
            + (
                f", {transfers.in_progress} transfers, {transfers.quarantined_blocks} blocks in quarantine"
                if transfers
                else ""
            )
        )
