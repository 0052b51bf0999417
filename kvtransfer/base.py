"""The connector contract: who plans a KV transfer, who moves the bytes, who owns a block, and until when.

A connector has two halves. The scheduler half plans and never touches a tensor; the worker half moves bytes
and never blocks the engine's step. The engine calls both from its one step thread, in this order per step:

    scheduler half                                   worker half
    on_new_request
    get_num_new_matched_tokens ┐ while the step
    update_state_after_alloc   ┘ is scheduled
    build_connector_meta  ─────── metadata ────────▶ bind_connector_metadata
                                                     handle_preemptions
                                                     start_load_kv
                                                     (forward pass: wait_for_layer_load, save_kv_layer)
                                                     wait_for_save
    update_connector_output ◀──── output ─────────── get_finished
    request_finished (for each request that ended in this step)

A step may have nothing to compute; the worker half is driven all the same, so that plans go out and
completions come in. When something happens between steps (a block run arrived, a peer was lost), the
connector calls `ConnectorContext.wake`, and the engine steps.

An engine that plans ahead has begun the next step, up to `wait_for_save`, when it asks `get_finished` about this one
and books it. But when `start_load_kv` begins a load, no step that was planned before is still under way: what a
peer writes from there on, nothing else does.

**Two kinds of load.** A *handoff* brings the KV of all of a request's tokens and the token after them: one transfer between two
nodes, once in a request's life. A *cached* load brings a part of a prefix that a connector has kept, and no token: one of the
request's tokens is left to compute. A connector is asked whenever a request is to be admitted without blocks, so again after
each preemption and each failed load, and answers 0 when it has nothing (more) for it. It is not asked about a request whose
blocks others took after its load: that has to run first.

**Who owns a block.** A block belongs to its request until the request ends. Then:

- *Producer*: `request_finished` returns True to keep the request's blocks: the connector still sends them.
  The engine frees them when the request's id appears in `finished_sending`. A connector puts each id that it
  kept there exactly once, when its last byte has left and been confirmed, when the lease ended, when the
  transfer was cancelled, or when the peer died; never while a handle that reads them is in flight. A request whose
  transfer ends before its prompt is computed is named in `unwanted_sending`: the engine ends it, and computes no more.
- *Consumer*: the blocks of a request in WAITING_FOR_REMOTE_KVS may be written by a peer at any moment. The
  engine reuses none of them before the id appears in `finished_recving` or `failed_recving`. A connector puts
  it in exactly one of the two, exactly once, and only when nothing can write to the blocks any more. That holds
  for a request that was aborted while it waited, too: `request_finished` then returns True, the connector tells
  the peer, and the id appears in `failed_recving` when the peer has confirmed or is known to be dead.
- *Quarantine*: a load may fail while a peer can still write to some of its blocks. `LoadFailure.unsafe_blocks` names
  them. The engine takes them from the request at once, so that the request can go on with others, and uses none of
  them for anything before `released_blocks` names it. A connector names each exactly once, when nothing can write to
  it any more.
- *Cache*: a connector that copies blocks elsewhere reads them while their request runs. When the request ends,
  `request_finished` returns True until the copies have ended, and `finished_sending` names it then. When the request
  is preempted its blocks are free at once: `handle_preemptions` waits for the copies that read them.
- *Reads*: what a running request gives up (a checkpoint of its states, blocks that its window has left) is free at once as
  well. A connector that copies it names the blocks in its metadata's `reads`: nothing else uses them before `ended_reads`
  does, once for each time.

**What a cache must forget.** Everything, when `reset_cache` says so: new weights came, or a block's content turned out wrong.
What was computed from that cannot be told by its hash. A block hash names the tokens up to the block's end
and everything else that decides its KV (adapter, media, salt), but not the model: what outlives a process, or is
shared by several, must be filed under the model's content and the blocks' layout too, and its nodes share one `cache.hash_seed`.
"""

from __future__ import annotations

import abc
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from tandem.kvtransfer.config import TierConfig, TransferConfig
from tandem.kvtransfer.memory import HeadShare as HeadShare
from tandem.kvtransfer.memory import KVCacheMemory as KVCacheMemory
from tandem.kvtransfer.memory import LayerShare as LayerShare
from tandem.kvtransfer.memory import flat_bytes as flat_bytes
from tandem.kvtransfer.memory import longest_word as longest_word
from tandem.wire.kv_events import KVEvent
from tandem.wire.requests import CachePeers, KVTransferParams, TierStatus, WaitHistogram
from tandem.wire.tracing import TransferRecord, TransferTrace


class TransferRequest(Protocol):
    """What a connector may see of a request. The engine's Request satisfies it."""

    @property
    def request_id(self) -> str: ...
    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt, then output. A request that moved here from a lost node arrives with output tokens already."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def output_token_ids(self) -> Sequence[int]: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def lora(self) -> str | None: ...
    @property
    def transfer(self) -> KVTransferParams | None: ...
    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One for each full block of tokens, chained. To be read, not changed. Empty without prefix caching."""
        ...

    @property
    def cache_peers(self) -> CachePeers | None: ...

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """All of it has to be computed here: nothing is to be loaded from a cache."""
        ...


class ScheduledStep(Protocol):
    """What a connector may see of a step when it builds its metadata."""

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """request id -> tokens computed in this step."""
        ...

    @property
    def total_num_scheduled_tokens(self) -> int: ...
    @property
    def preempted_req_ids(self) -> set[str]: ...

    def new_block_ids(self, request_id: str) -> Sequence[Sequence[int]]:
        """Blocks that a request already running got in this step, per group; empty lists when none."""
        ...


BlockIds = Sequence[Sequence[int]]
"""A request's block table: for each KV cache group, the ids of its blocks in prompt order."""


class BlockTables(Protocol):
    """The block tables of all requests that have blocks, as they are now. To be asked while the scheduler calls."""

    def block_ids(self, request_id: str) -> BlockIds: ...


class BlockGroup(Protocol):
    """Layers that share a block table."""

    @property
    def block_size(self) -> int: ...
    @property
    def keeps_every_token(self) -> bool: ...
    @property
    def window(self) -> int | None:
        """How many tokens a sliding window reads, counting the one that reads, or how long a chunk is; None where all are read."""
        ...

    def first_read(self, position: int) -> int:
        """The first token that the one at `position` reads; below 0 where a window reaches back further than there are tokens."""
        ...

    @property
    def blocks_per_request(self) -> int:
        """Above 0 where recurrent states are kept: a table is so many blocks, and holds what follows from all tokens so far."""
        ...


NULL_BLOCK_ID = 0
"""Stands in a block table where a block is not kept (a sliding window has moved on). It is never read or written."""


def count_blocks(table: BlockIds) -> int:
    return sum(block != NULL_BLOCK_ID for ids in table for block in ids)


class ConnectorMetadata:
    """What the scheduler half tells the worker half about one step. Each connector has its own subclass."""

    @property
    def reads(self) -> Sequence[int]:
        """Blocks that are in use now, and are read from here on: see the module's docstring."""
        return ()


class WorkerMetadata:
    """What the worker half tells the scheduler half about one step, beyond what the engine must know."""


class Handoff(msgspec.Struct, frozen=True):
    """A load that has arrived and is right."""

    first_token: (
        int | None
    )  # the token at position `num_tokens`, sampled by the producer; None: a cached load
    num_tokens: int  # tokens whose KV is now here, local prefix included


class LoadFailure(msgspec.Struct, frozen=True):
    """A load that will not complete. The first `valid_tokens` of the request's tokens are right all the same.

    A peer may still write to `unsafe_blocks`: see the module's docstring on quarantine. They hold nothing of the
    first `valid_tokens`.
    """

    reason: str
    valid_tokens: int = 0
    unsafe_blocks: frozenset[int] = frozenset()
    cached: bool = False  # of a cached load: what is missing is computed, whatever `transfer.on_failure` says


class ConnectorOutput(msgspec.Struct):
    """What happened to transfers since the last step. An id appears at most once in `finished_sending` over a request's
    life, and once in one of `finished_recving` and `failed_recving` for each load."""

    finished_sending: set[str] = msgspec.field(default_factory=set)
    finished_recving: dict[str, Handoff] = msgspec.field(default_factory=dict)
    failed_recving: dict[str, LoadFailure] = msgspec.field(default_factory=dict)
    invalid_block_ids: set[int] = msgspec.field(default_factory=set)
    released_blocks: set[int] = msgspec.field(default_factory=set)  # out of quarantine
    ended_reads: list[int] = msgspec.field(default_factory=list)  # see the module's docstring
    # Requests of a producer whose consumer no longer wants their KV: what is not computed yet need not be.
    unwanted_sending: set[str] = msgspec.field(default_factory=set)
    # For the connector's own scheduler half, which may add to this output what follows from it.
    worker_metadata: WorkerMetadata | None = None

    @property
    def is_empty(self) -> bool:
        return not (
            self.finished_sending
            or self.finished_recving
            or self.failed_recving
            or self.invalid_block_ids
            or self.released_blocks
            or self.ended_reads
            or self.unwanted_sending
        )


class TransferStats(msgspec.Struct):
    """Totals since start. The worker half keeps them; the node reports them."""

    bytes_sent: int = 0
    bytes_received: int = 0
    blocks_sent: int = 0
    descriptors_sent: int = 0  # runs of bytes that the transport was asked to move
    blocks_received: int = 0
    outcomes: dict[str, int] = msgspec.field(default_factory=dict)
    leases_expired: int = 0
    malformed_frames: int = 0
    in_progress: int = 0  # a gauge: transfers under way now, on either side
    quarantined_blocks: int = 0  # a gauge: see the module's docstring
    bytes_overlapped: int = 0  # of bytes_sent: complete before the prompt's last forward pass was
    refused: dict[str, int] = msgspec.field(default_factory=dict)  # messages not acted on, by reason
    blocks_checked: int = 0  # of those received: their checksums were right
    wrong_kv: dict[str, int] = msgspec.field(
        default_factory=dict
    )  # whose were wrong, by the peer that sent them
    left_out: list[str] = msgspec.field(
        default_factory=list
    )  # those of them with which no transfer is begun for a while
    # A producer's blocks that became free, by what freed them: see `protocol.statistics.Freed`.
    blocks_freed: dict[str, int] = msgspec.field(default_factory=dict)
    recent: list[TransferRecord] = msgspec.field(default_factory=list)  # the newest at the end, a few dozen
    waits: dict[str, WaitHistogram] = msgspec.field(
        default_factory=dict
    )  # by stage: see TransferRecord.waits
    tiers: list[TierStatus] = msgspec.field(default_factory=list)


class ConnectorContext(msgspec.Struct, frozen=True):
    """What a connector is given when it is made."""

    node_id: str
    epoch: int
    host: str  # the address to bind side channels to
    block_size: int
    config: TransferConfig
    wake: Callable[[], None]  # thread-safe: asks the engine to step soon
    state_blocks: int = 0  # see KVCacheMemory
    has_peers: bool = True  # False: an aggregated node, which takes part in no transfer
    tiers: Sequence[TierConfig] = ()
    groups: Sequence[BlockGroup] = ()
    remote: bool = False  # the tier in host memory reads from those of other nodes, which may read from it
    mirror: bool = False  # and what running requests fill is copied to another node's
    # To each of the node's other ranks, in order, where every rank keeps its heads in memory of its own: what moves them there
    # is told by this. A connector that takes them closes them.
    rank_lines: Sequence[socket.socket] = ()
    tier_lines: Sequence[socket.socket] = ()  # the same for what copies it to tiers


class SchedulerConnector(abc.ABC):
    """The half that plans. Called by the scheduler, from the step thread, at these points and no other."""

    def bind_block_tables(self, tables: BlockTables) -> None:
        """Once, before the first request."""

    def on_new_request(self, request: TransferRequest) -> None:
        """The scheduler has accepted the request. Nothing is allocated yet."""

    @abc.abstractmethod
    def get_num_new_matched_tokens(
        self, request: TransferRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond the `num_computed_tokens` found locally can come from outside.

        (None, _) asks to be asked again in a later step. (n, True) means that they arrive while other steps run:
        the request waits in WAITING_FOR_REMOTE_KVS. (n, False) means that they are there when the step runs. A load
        that is no handoff leaves at least one token to compute.
        """

    @abc.abstractmethod
    def update_state_after_alloc(
        self, request: TransferRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """The request has blocks now; `num_external_tokens` of its tokens were claimed by this connector.

        After a load that arrives later it is called again, with 0, when the request is admitted. The request's
        `num_computed_tokens` are those that need no computing: found here and, once admitted, loaded. On a producer this is where its blocks are paired with the destination's: the transfer plan.
        """

    def wants_checkpoints(self, request: TransferRequest) -> bool:
        """Whether states are to be copied while the request answers, too, for another node that may have to go on with it. Asked when it is
        about to run."""
        return False

    def checkpoint_kept(
        self, request: TransferRequest, num_tokens: int, block_ids: Sequence[int], *, passing: bool = False
    ) -> None:
        """The step that is planned copies the request's recurrent states, as they are after its first `num_tokens` tokens, to these
        blocks before it computes anything: a checkpoint. They are in the order of the request's table of states, and are
        free when the step is booked, unless `reads` of its metadata names them. `passing`: one of those that were wanted."""

    @abc.abstractmethod
    def build_connector_meta(self, step: ScheduledStep) -> ConnectorMetadata:
        """Everything that the worker half must know of this step. Must not change `step`."""

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """What the worker half reported; called before the scheduler acts on it. May add to it."""

    def request_finished(self, request: TransferRequest, block_ids: BlockIds) -> bool:
        """The request has ended, its blocks are still its own. True keeps them: see the module's docstring."""
        return False

    def has_pending_work(self) -> bool:
        """True while there are plans that no metadata has carried yet: the engine steps again at once."""
        return False

    def step_took(self, num_prompt_tokens: int, seconds: float) -> None:
        """The model needed so long for a step that computed tokens of prompts."""

    def note_events(self) -> None:
        """From now on events are kept to be taken. Before the first request, if at all."""

    def take_events(self) -> Iterable[KVEvent]:
        """What appeared in its tiers and vanished from them since the last call."""
        return ()

    def reset_cache(self) -> None:
        """Nothing that was kept so far may be loaded any more, nor what is being stored or loaded now."""


class WorkerConnector(abc.ABC):
    """The half that moves bytes. Called by the engine, from the step thread; nothing here may wait."""

    @property
    def peer_endpoint(self) -> str:
        """Where other nodes reach this connector; "" when they need not."""
        return ""

    @property
    def tier_endpoint(self) -> str:
        """Where other nodes ask for what a tier of this one has; "" when they may not."""
        return ""

    @property
    def hands_over_states(self) -> bool:
        """Whether it brings the blocks of recurrent states, as they are after the last token that it brings. Without that a model
        that keeps some is not served in pools of two roles."""
        return False

    @property
    def layerwise(self) -> bool:
        """True to be called inside the forward pass, layer by layer; it costs the pass a call per layer."""
        return False

    @abc.abstractmethod
    def register_kv_caches(self, memory: KVCacheMemory) -> None:
        """Once, before the first step."""

    @abc.abstractmethod
    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None: ...

    def handle_preemptions(self) -> None:
        """Blocks of preempted requests may be overwritten in this step: what is read from them after this does not
        count as their KV. A connector that cannot tell afterwards waits here until nothing reads them any more;
        it is the one place where a connector may wait, and briefly."""

    def start_load_kv(self) -> None:
        """The step begins: set loads in motion."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Layer `layer` is about to be read. Only synchronous loads wait here."""

    def save_kv_layer(self, layer: int) -> None:
        """Layer `layer` of the step's tokens has been written."""

    def wait_for_save(self) -> None:
        """The forward pass is over: all layers of the step's tokens have been written."""

    @abc.abstractmethod
    def get_finished(self, finished_req_ids: set[str]) -> ConnectorOutput:
        """What completed since the last call. `finished_req_ids` ended in the scheduler since the last step."""

    def stats(self) -> TransferStats:
        """A snapshot; may be called from any thread."""
        return TransferStats()

    def trace_of(self, request_id: str) -> TransferTrace | None:
        """What became of its transfer, and where the time went: asked once at most, when the transfer is over, from
        the step thread. It may never be asked for, so what is kept for it has a bound."""
        return None

    def shutdown(self) -> None:
        """Stop every thread, close every socket, give back every registration. Idempotent."""


class ConnectorFactory(Protocol):
    """What a connector's module exports and the registry names."""

    def __call__(self, context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]: ...
