"""A world for transfer endpoints without threads: the test controls the clock, the network and the memory.

It fails the test if bytes land in a block that its owner was told is free, if a block is given back while a handle touches it, if a
request ends twice, or if an answer is computed from wrong bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from tandem.base.errors import TransferError
from tandem.kvtransfer.base import Handoff, LoadFailure
from tandem.kvtransfer.config import ChecksumPolicy
from tandem.kvtransfer.protocol import commands
from tandem.kvtransfer.protocol.cache_map import Mapping, PoolGeometry
from tandem.kvtransfer.protocol.checksums import PendingSums
from tandem.kvtransfer.protocol.endpoint import Outcomes, TransferEndpoint
from tandem.kvtransfer.protocol.halves import token_hash
from tandem.kvtransfer.protocol.settings import ProtocolSettings
from tandem.kvtransfer.protocol.side import Identity, NodeSide, Recorder
from tandem.kvtransfer.protocol.transport import Activity, Direction, HandleId, Operation, RemoteId, Transport
from tandem.kvtransfer.protocol.transport import Move as TransportMove
from tandem.wire.handoff import CacheFingerprint, CacheMemory, HandoffMessage, ProcessIdentity
from tandem.wire.listening import Listener
from tandem.wire.nodes import PeerAddress

BLOCK_SIZE = 4
SLOTS = 2  # layers
CELL_BYTES = 4
BLOCK_BYTES = SLOTS * 2 * BLOCK_SIZE * CELL_BYTES
NUM_BLOCKS = 200
SETTINGS = ProtocolSettings(
    lease_s=3.0,
    timeout_s=20.0,
    handshake_timeout_s=2.0,
    renew_s=1.0,
    silent_s=1.0,
    margin_s=0.5,
    retry_s=0.25,
    max_post_bytes=2 * BLOCK_BYTES,
    min_post_bytes=BLOCK_BYTES,
    max_link_bytes=4 * BLOCK_BYTES,
    max_early_places=10_000,
)
VOCAB_SIZE = 1000


class Memory:
    """A pool of blocks: a cell for each block, layer, key or value, and token says what it holds."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.cells_per_block = SLOTS * 2 * block_size
        self.cells: list[object] = ["nothing"] * (NUM_BLOCKS * self.cells_per_block)

    def __len__(self) -> int:
        return NUM_BLOCKS

    def cell(self, blocks: Sequence[int], slot: int, kind: int, position: int) -> int:
        block, behind = divmod(position, self.block_size)
        return blocks[block] * self.cells_per_block + (slot * 2 + kind) * self.block_size + behind

    def write(self, blocks: Sequence[int], tokens: Sequence[int], positions: range, slots: range) -> None:
        for slot in slots:
            for kind in (0, 1):
                for position in positions:
                    where = self.cell(blocks, slot, kind, position)
                    self.cells[where] = right_cell(tokens, slot, kind, position)

    def is_right(self, blocks: Sequence[int], tokens: Sequence[int]) -> bool:
        return all(
            self.cells[self.cell(blocks, slot, kind, position)] == right_cell(tokens, slot, kind, position)
            for slot in range(SLOTS)
            for kind in (0, 1)
            for position in range(len(tokens))
        )

    def scribble(self, block: int) -> None:
        first = block * self.cells_per_block
        self.cells[first : first + self.cells_per_block] = ["garbage"] * self.cells_per_block


def right_cell(tokens: Sequence[int], slot: int, kind: int, position: int) -> object:
    return (tuple(tokens[: position + 1]), slot, kind)


class FakeChecksums:
    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.taken = 0

    def of(
        self,
        blocks: Sequence[int],
        parts: Sequence[int],
        mapping: Mapping,
        *,
        groups: Sequence[int] = (),
        arrived: bool = False,
    ) -> list[int]:
        self.taken += len(blocks)
        return [self._of(block, part, mapping.grain) for block, part in zip(blocks, parts, strict=True)]

    def begin(
        self,
        blocks: Sequence[int],
        parts: Sequence[int],
        mapping: Mapping,
        *,
        groups: Sequence[int] = (),
        arrived: bool = False,
    ) -> PendingSums:
        sums = self.of(blocks, parts, mapping, arrived=arrived)
        return PendingSums(lambda: sums, lambda: None)

    def _of(self, block: int, part: int, grain: int) -> int:
        positions = range(part * grain, (part + 1) * grain)
        cells = [
            self.memory.cells[self.memory.cell([block], slot, kind, position)]
            for slot in range(SLOTS)
            for kind in (0, 1)
            for position in positions
        ]
        return hash(tuple(cells)) % (1 << 64)


@dataclasses.dataclass
class Move:
    """A handle in flight; the bytes are copied when it completes."""

    node: Node
    operation: Operation
    peer: str
    way: int  # the registration of the peer's memory that it uses
    local: list[int]  # a block for each unit
    remote: list[int]
    local_cells: list[int]
    remote_cells: list[int]
    done_at: float
    left: float = 0.0  # bytes still to move, if links have a rate
    state: str = "moving"

    @property
    def num_bytes(self) -> int:
        return len(self.local_cells) * CELL_BYTES


class FakeTransport(Transport):
    name = "fake"

    def __init__(self, world: World, node: Node) -> None:
        self.world = world
        self.node = node
        self.moves: dict[HandleId, Move] = {}
        self.remotes: dict[RemoteId, tuple[str, int]] = {}
        self.ids = itertools.count(1)
        self.refuses = False
        self.ways = [0]  # to our memory; what takes another one lands nowhere
        self.failed_writes_may_land = False

    def register(self, memory: object) -> CacheMemory:
        raise NotImplementedError

    def connect(self, memory: CacheMemory) -> RemoteId:
        if self.refuses:
            raise TransferError("no way there")
        remote = RemoteId(next(self.ids))
        name, _, way = memory.agent_metadata.decode().partition("#")
        self.remotes[remote] = (name, int(way or 0))
        return remote

    def disconnect(self, remote: RemoteId) -> None:
        gone = self.remotes.pop(remote)
        assert not any((move.peer, move.way) == gone for move in self.moves.values()), (
            "disconnected with a handle in flight"
        )

    def post(self, remote: RemoteId, move: TransportMove) -> HandleId:
        unit = move.unit_bytes // CELL_BYTES
        assert unit * CELL_BYTES == move.unit_bytes
        assert move.num_bytes <= SETTINGS.max_post_bytes
        local_cells, remote_cells = (
            [first * unit + cell for first in units.tolist() for cell in range(unit)]
            for units in (move.local, move.remote)
        )
        name, way = self.remotes[remote]
        in_flight = sum(other.num_bytes for other in self.moves.values() if (other.peer, other.way) == (name, way))
        assert not in_flight or in_flight + move.num_bytes <= SETTINGS.max_link_bytes
        peer = self.world.nodes.get(name)
        their_cells = peer.memory.cells_per_block if peer else self.node.memory.cells_per_block
        local_blocks = [cell // self.node.memory.cells_per_block for cell in local_cells]
        remote_blocks = [cell // their_cells for cell in remote_cells]
        assert len(local_blocks) == len(remote_blocks) > 0
        assert all(0 < block < NUM_BLOCKS for block in (*local_blocks, *remote_blocks))
        handle = HandleId(next(self.ids))
        self.moves[handle] = Move(
            self.node,
            move.operation,
            name,
            way,
            local_blocks,
            remote_blocks,
            local_cells,
            remote_cells,
            self.world.now + self.world.move_s(),
            move.num_bytes,
        )
        return handle

    def is_done(self, handle: HandleId) -> bool:
        move = self.moves[handle]
        if move.state == "moving":
            return False
        del self.moves[handle]
        if move.state == "failed":
            raise TransferError("the move failed")
        return True

    def may_still_write(self, remote: RemoteId) -> bool:
        assert remote in self.remotes
        return self.failed_writes_may_land

    def cancel(self, handle: HandleId) -> bool:
        if not self.world.moves_can_be_taken_back:
            return False
        del self.moves[handle]
        return True

    def expect_no_more(self, transfer_id: str) -> bool:
        return self.world.late_writes_are_refused

    def reopen(self) -> CacheMemory | None:
        if not self.world.ways_can_be_closed:
            return None
        self.ways.append(self.ways[-1] + 1)
        memory = self.node.geometry.memory
        return msgspec.structs.replace(memory, agent_metadata=f"{self.node.name}#{self.ways[-1]}".encode())

    def close_earlier(self) -> bool:
        del self.ways[:-1]
        return True

    def shuts_out(self, peer: ProcessIdentity) -> bool:
        return not self.world.same_machine

    def close(self) -> None:
        pass


@dataclasses.dataclass
class Send:
    """A request on its producer."""

    request_id: str
    transfer_id: str
    tokens: list[int]
    peer: PeerAddress
    blocks: list[int]
    computed: int = 0
    computing: int | None = None  # the number of tokens that the running forward pass will have computed
    when_idle: bool = False
    planned: bool = False
    ended: bool = False  # the request has ended; its blocks may be kept
    kept: bool = False
    reported: int = 0


@dataclasses.dataclass
class Receive:
    """A request on its consumer."""

    request_id: str
    transfer_id: str
    tokens: list[int]
    local_tokens: int
    blocks: list[int]
    when_idle: bool = False
    finished: Handoff | None = None
    failed: LoadFailure | None = None
    quarantined: set[int] = dataclasses.field(default_factory=set)

    @property
    def over(self) -> bool:
        return self.finished is not None or self.failed is not None

    @property
    def reason(self) -> str:
        """Why it failed, as it must have."""
        assert self.failed is not None
        return self.failed.reason

    @property
    def valid_tokens(self) -> int:
        assert self.failed is not None
        return self.failed.valid_tokens


def first_token_of(tokens: Sequence[int]) -> int:
    return sum(tokens) % 97


class Node:
    def __init__(
        self,
        world: World,
        name: str,
        epoch: int,
        skew: float,
        direction: Direction,
        cache: dict[str, object] | None = None,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.block_size = block_size
        self.world = world
        self.name = name
        self.skew = skew
        self.identity = Identity(name, epoch, f"tcp://{name}")
        self.memory = Memory(block_size)
        self.free = list(range(1, NUM_BLOCKS))
        self.checksums = FakeChecksums(self.memory)
        self.transport = FakeTransport(world, self)
        self.recorder = Recorder(self.clock)
        self.sends: dict[str, Send] = {}
        self.receives: dict[str, Receive] = {}
        self.unwanted: list[str] = []  # requests that the engine need not continue
        self.distrusted: list[str] = []  # why the engine should begin a new generation of its cache
        self.frozen = False
        self.line: deque[Callable[[], None]] = deque()  # work that the device has been given and has not done
        self.num_given = 0
        self.process = ProcessIdentity(f"machine of {name}", 1, epoch, 0)
        memory = CacheMemory(name.encode(), "DRAM", 0, 4096, NUM_BLOCKS, self.memory.cells_per_block * CELL_BYTES)
        fingerprint = CacheFingerprint(
            "m",
            "float32",
            SLOTS,
            1,
            1,
            block_size,
            "slot,kv,head,token,dim",
            f"fake/{direction.value}",
            num_slots=SLOTS,
        )
        self.geometry = PoolGeometry(
            msgspec.structs.replace(fingerprint, **(cache or {})),
            memory,
            block_size,
            num_groups=1,
            vocab_size=VOCAB_SIZE,
        )
        side = NodeSide(
            self.identity,
            self.geometry,
            direction,
            self.transport,
            SETTINGS,
            send=lambda to, message: world.network.append((to, message)),
            forget=world.forget,
            clock=self.clock,
            recorder=self.recorder,
            process=self.process,
            checksums=self.checksums,
            checksum_policy=world.checksum_policy,
        )
        self.sources = side.sources
        self.endpoint = TransferEndpoint(
            side,
            listener=world.listener_at,
            has_ended=lambda process: process in world.ended,
            outcomes=Outcomes(
                self._sent, self.unwanted.append, self._received, self._failed, self.distrusted.append, self._released
            ),
        )

    def clock(self) -> float:
        return self.world.now + self.skew

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.name, self.identity.epoch, self.identity.endpoint)

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count
        return taken

    def release(self, blocks: list[int]) -> None:
        touched = {block for move in self.transport.moves.values() if move.state == "moving" for block in move.local}
        assert not touched & set(blocks), "a block was given back while a handle touches it"
        for block in blocks:
            self.memory.scribble(block)
        self.free += blocks
        blocks.clear()

    # ── the device ──

    def on_device(self, work: Callable[[], None]) -> None:
        self.line.append(work)
        self.num_given += 1
        if self.world.device_does is None:
            self.wait_for_device()

    def fence(self) -> Callable[[], bool] | None:
        """Returns a function that tells whether the device has done all its work up to now. Each call lets the device advance."""
        pace, place = self.world.device_does, self.num_given
        if pace is None:
            return None

        def reached() -> bool:
            self.wait_for_device(pace())
            return self.num_given - len(self.line) >= place

        return reached

    def wait_for_device(self, most: int | None = None) -> None:
        for _ in range(len(self.line) if most is None else min(most, len(self.line))):
            self.line.popleft()()

    # ── producing ──

    def start_send(self, send: Send) -> None:
        self.sends[send.request_id] = send
        self.plan(send)

    def plan(self, send: Send) -> None:
        send.planned = True
        send.blocks += self.take(1)
        self.endpoint.execute(
            commands.PlanSend(
                send.request_id,
                send.transfer_id,
                send.peer,
                len(send.tokens),
                token_hash(send.tokens, None, None),
                [list(send.blocks)],
                send.when_idle,
            )
        )

    def compute(self, send: Send, count: int) -> None:
        self.begin_computing(send, count)
        self.end_computing(send)

    def begin_computing(self, send: Send, count: int) -> None:
        """Begins the forward pass of a chunk at its first layer."""
        upto = min(len(send.tokens), send.computed + count)
        missing = -(-upto // self.block_size) - len(send.blocks)
        if missing > 0:
            new = self.take(missing)
            send.blocks += new
            self.endpoint.execute(commands.ExtendSend(send.request_id, [new]))
        send.computing = upto
        self._write_layers(send, range(1))

    def tell_of_first_layer(self, send: Send) -> None:
        assert send.computing is not None
        self.endpoint.execute(commands.LayersComputed({send.request_id: send.computing}, 1, fence=self.fence()))

    def end_computing(self, send: Send) -> None:
        upto = send.computing
        assert upto is not None
        self._write_layers(send, range(1, SLOTS))
        send.computed, send.computing = upto, None
        self.endpoint.execute(commands.ComputedTokens({send.request_id: upto}, self.clock(), fence=self.fence()))

    def _write_layers(self, send: Send, layers: range) -> None:
        assert send.computing is not None
        blocks, tokens, positions = list(send.blocks), send.tokens, range(send.computed, send.computing)
        self.on_device(lambda: self.memory.write(blocks, tokens, positions, layers))

    def preempt(self, send: Send) -> None:
        """Preempts the request: the device's next work overwrites its blocks."""
        at = self.clock()
        for block in send.blocks:
            self.on_device(functools.partial(self.memory.scribble, block))
        self.free += send.blocks
        send.blocks = []
        send.computed = 0
        self.endpoint.execute(commands.PreemptedRequests([send.request_id], at))

    def finish_send(self, send: Send) -> None:
        self.wait_for_device()  # a real engine waits too, because it needs the first token
        send.ended = send.kept = True
        self.endpoint.execute(commands.FinishSend(send.request_id, first_token_of(send.tokens), [list(send.blocks)]))

    def abandon_send(self, send: Send) -> None:
        self.wait_for_device()
        send.ended, send.kept = True, send.planned
        if not send.kept:
            self.release(send.blocks)
        self.endpoint.execute(commands.AbandonSend(send.request_id, send.transfer_id, send.kept))

    def _sent(self, request_id: str) -> None:
        send = self.sends[request_id]
        assert send.kept, "finished_sending for a request that was not kept"
        send.reported += 1
        assert send.reported == 1, "finished_sending twice"
        self.release(send.blocks)

    # ── consuming ──

    def start_receive(self, receive: Receive, peer: PeerAddress) -> None:
        self.receives[receive.request_id] = receive
        total = -(-len(receive.tokens) // self.block_size)
        receive.blocks = self.take(total)
        receive.local_tokens -= receive.local_tokens % self.block_size
        first = receive.local_tokens // self.block_size
        self.memory.write(receive.blocks, receive.tokens, range(receive.local_tokens), range(SLOTS))
        self.endpoint.execute(
            commands.BeginReceive(
                receive.request_id,
                receive.transfer_id,
                peer,
                len(receive.tokens),
                receive.local_tokens,
                token_hash(receive.tokens, None, None),
                [first],
                [receive.blocks[first:]],
                receive.when_idle,
            )
        )

    def _received(self, request_id: str, handoff: Handoff) -> None:
        receive = self.receives[request_id]
        assert not receive.over, "a receive ended twice"
        receive.finished = handoff
        assert handoff == Handoff(first_token_of(receive.tokens), len(receive.tokens))
        assert self.memory.is_right(receive.blocks, receive.tokens), "wrong bytes were accepted"
        self.release(receive.blocks)

    def _failed(self, request_id: str, failure: LoadFailure) -> None:
        receive = self.receives[request_id]
        assert not receive.over, "a receive ended twice"
        receive.failed = failure
        valid = min(failure.valid_tokens, len(receive.tokens))
        assert self.memory.is_right(receive.blocks, receive.tokens[:valid]), "wrong bytes were said to be right"
        receive.quarantined = set(failure.unsafe_blocks)
        assert receive.quarantined <= set(receive.blocks)
        assert not receive.quarantined & set(receive.blocks[: -(-valid // self.block_size)])
        self.release([block for block in receive.blocks if block not in receive.quarantined])
        receive.blocks = []

    def _released(self, blocks: frozenset[int]) -> None:
        for receive in self.receives.values():
            if receive.quarantined == blocks:
                receive.quarantined = set()
                self.release(list(blocks))
                return
        raise AssertionError(f"blocks left quarantine that were not in it: {sorted(blocks)}")

    def owns(self, block: int) -> bool:
        return block not in self.free


class World:
    def __init__(
        self, direction: Direction = Direction.PUSH, checksum_policy: ChecksumPolicy = ChecksumPolicy.ALL
    ) -> None:
        self.now = 1000.0
        self.network: list[tuple[str, msgspec.Struct]] = []
        self.closed_addresses: set[str] = set()
        self.cut_off: set[str] = set()  # addresses whose machines do not answer
        self.ended: set[ProcessIdentity] = set()
        self.forgotten: list[str] = []
        self.move_s: Callable[[], float] = lambda: SETTINGS.margin_s / 4
        self.stalled = False  # no posted move advances
        # A link's rate: what was posted first arrives first. None: each move takes `move_s`.
        self.bytes_per_s: Callable[[], float] | None = None
        self.ways_can_be_closed = True
        self.late_writes_are_refused = False
        self.same_machine = False
        # How much of its line a device does between two looks at it. None: all, at once.
        self.device_does: Callable[[], int] | None = None
        self.checksum_policy = checksum_policy
        self.corrupts: Callable[[], bool] = lambda: False  # whether the next write arrives with wrong bytes
        self.nodes: dict[str, Node] = {}
        self.direction = direction
        self.moves_can_be_taken_back = False
        self._decoder = msgspec.msgpack.Decoder(HandoffMessage)

    def add(
        self,
        name: str,
        epoch: int,
        skew: float = 0.0,
        cache: dict[str, object] | None = None,
        block_size: int = BLOCK_SIZE,
    ) -> Node:
        self.nodes[name] = Node(self, name, epoch, skew, self.direction, cache, block_size)
        return self.nodes[name]

    def kill(self, name: str, *, proven: bool = True) -> None:
        """Ends a process and the moves that it had posted. `proven`: whether its peers can prove that it has ended."""
        node = self.nodes.pop(name)
        self.closed_addresses.add(node.identity.endpoint)
        if proven:
            self.ended.add(node.process)

    # ── network ──

    def deliver(self, index: int = 0, *, keep: bool = False) -> None:
        """Delivers one message; `keep` leaves a copy of it in the network."""
        to, message = self.network[index] if keep else self.network.pop(index)
        node = self.nodes.get(to.removeprefix("tcp://"))
        if node is None or to in self.closed_addresses:
            return
        if node.frozen:
            self.network.append((to, message))
            return
        node.endpoint.receive(self._decoder.decode(msgspec.msgpack.encode(message)))

    def deliver_all(self) -> None:
        """Delivers all messages, and those that follow from them."""
        for _ in range(10_000):
            reachable = (
                index
                for index, (to, _) in enumerate(self.network)
                if not ((node := self.nodes.get(to.removeprefix("tcp://"))) and node.frozen)
            )
            if (first := next(reachable, None)) is None:
                return
            self.deliver(first)
            self.pump()
        raise AssertionError("messages without end")

    def listener_at(self, address: str) -> Listener:
        if address in self.closed_addresses:
            return Listener.REFUSES
        return Listener.DOES_NOT_ANSWER if address in self.cut_off else Listener.ACCEPTS

    def forget(self, endpoint: str) -> None:
        self.forgotten.append(endpoint)
        self.network = [(to, message) for to, message in self.network if to != endpoint]

    # ── memory ──

    def moves(self) -> list[Move]:
        return [
            move for node in self.nodes.values() for move in node.transport.moves.values() if move.state == "moving"
        ]

    def complete(self, move: Move, *, failed: bool = False) -> None:
        """Completes a handle: its bytes move, or only some of them if it failed."""
        peer = self.nodes.get(move.peer)
        pairs = list(zip(move.local_cells, move.remote_cells, strict=True))
        move.state = "failed" if failed else "done"
        if peer is None or (move.operation is Operation.WRITE and move.way not in peer.transport.ways):
            move.state = "failed"
            return
        if move.operation is Operation.WRITE and self.late_writes_are_refused:
            ours = [receive for receive in peer.receives.values() if not receive.over]
            if not any(set(move.remote) <= set(receive.blocks) for receive in ours):
                return
        for local, remote in pairs[: len(pairs) // 2] if failed else pairs:
            if move.operation is Operation.WRITE:
                assert peer.owns(remote // peer.memory.cells_per_block), (
                    "a write landed in a block that had been given back"
                )
                peer.memory.cells[remote] = move.node.memory.cells[local]
            else:
                assert move.node.owns(local // move.node.memory.cells_per_block), (
                    "a read landed in a block that had been given back"
                )
                move.node.memory.cells[local] = peer.memory.cells[remote]
        if self.corrupts():
            reader, cells = (
                (peer, move.remote_cells) if move.operation is Operation.WRITE else (move.node, move.local_cells)
            )
            reader.memory.cells[cells[len(cells) // 2]] = "a flipped bit"

    def pump(self) -> None:
        for node in self.nodes.values():
            if not node.frozen:
                for _ in range(50):
                    if node.endpoint.pump() is not Activity.DUE:
                        break

    def advance(self, seconds: float) -> None:
        """Advances the clock and the posted moves, unless the links are stalled."""
        until = self.now + seconds
        while self.now < until:
            step = min(until - self.now, SETTINGS.tick_s)
            if self.bytes_per_s is not None:
                self._flow(step * self.bytes_per_s())
            elif not self.stalled:
                for move in self.moves():
                    if self.now > move.done_at:
                        self.complete(move)
            self.pump()
            self.now += step
            for node in list(self.nodes.values()):
                if not node.frozen:
                    node.endpoint.tick()

    def _flow(self, num_bytes: float) -> None:
        """Moves up to `num_bytes` through each link."""
        left: dict[tuple[str, str], float] = {}
        for move in self.moves():
            link = (move.node.name, move.peer)
            budget = left.get(link, num_bytes)
            taken = min(budget, move.left)
            move.left -= taken
            left[link] = budget - taken
            if move.left <= 0:
                self.complete(move)

    def settle_messages(self, seconds: float) -> None:
        """Delivers all messages for this time; posted moves take their usual time."""
        until = self.now + seconds
        while self.now < until:
            self.deliver_all()
            self.advance(SETTINGS.tick_s)

    def settle(self, seconds: float) -> None:
        """Runs a healthy network for this time."""
        until = self.now + seconds
        while self.now < until:
            self.deliver_all()
            for move in self.moves():
                self.complete(move)
            self.pump()
            self.deliver_all()
            self.advance(SETTINGS.tick_s)
