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

A step may have nothing to compute. The engine drives the worker half all the same, so that plans go out and
completions come in. When something happens between steps (blocks arrived, a peer was lost), the connector calls
`ConnectorContext.wake`, and the engine steps.

An engine that plans ahead has begun the next step, up to `wait_for_save`, when it asks `get_finished` about this one
and books it. But when `start_load_kv` begins a load, no step that was planned before is still running, so from there
on nothing but the peer writes to the load's blocks.

**Two kinds of load.** A *handoff* brings the KV of all of a request's tokens and the token after them: one transfer
between two nodes, once in a request's life. A *cached* load brings a part of a prefix that a connector has kept, and no
token: it leaves at least one of the request's tokens to compute. The scheduler asks a connector whenever it is about to
admit a request that has no blocks, so again after each preemption and each failed load. The connector answers 0 when it
has nothing (more) for the request. The scheduler does not ask about a waiting request whose loaded blocks another
request took, before it has run; nor about one that was preempted too often.

**Who owns a block.** A block belongs to its request until the request ends. Then:

- *Producer*: `request_finished` returns True to keep the request's blocks, because the connector still sends them.
  The engine frees them when the request's id appears in `finished_sending`. A connector puts each id that it kept
  there exactly once: when the last byte has left and was confirmed, when the lease ended, when the transfer was
  cancelled, or when the peer died; never while a handle that reads the blocks is in flight. If a transfer ends before
  its prompt is computed, the connector names the request in `unwanted_sending`, and the engine ends it.
- *Consumer*: a peer may write to the blocks of a request in WAITING_FOR_REMOTE_KVS at any moment. The engine reuses
  none of them before the id appears in `finished_recving` or `failed_recving`. A connector puts it in exactly one of
  the two, exactly once, and only when nothing can write to the blocks any more. That holds for a request that was
  aborted while it waited, too: `request_finished` then returns True, the connector tells the peer, and puts the id in
  `failed_recving` when the peer has confirmed or is known to be dead.
- *Quarantine*: a load may fail while a peer can still write to some of its blocks. `LoadFailure.unsafe_blocks` names
  them. The engine takes them from the request at once, so that the request can go on with others, and uses none of
  them for anything before `released_blocks` names it. A connector names each exactly once, when nothing can write to
  it any more.
- *Cache*: a connector that copies blocks elsewhere reads them while their request runs. When the request ends,
  `request_finished` returns True if copies are still running, and `finished_sending` names the request when they have
  ended. When the request is preempted, its blocks are free at once, but for those that `blocks_given_up` names.
- *Reads*: blocks that a running request gives up (a checkpoint of its states, blocks that its window has left) are free
  at once, too. A connector that copies them names them in its metadata's `reads`. The engine then uses them for nothing
  else before `ended_reads` names them, once for each time that `reads` or `blocks_given_up` did.

**What a cache must forget.** `reset_cache` means that a connector must forget all KV that it keeps: new weights came,
or a block's content turned out wrong, and a hash cannot tell which other blocks were computed from that one. A block
hash names the tokens up to the block's end and everything else that decides its KV (adapter, media, salt), but not the
model. `forget_after` says the same of the blocks of one request, whose hashes name the input that is at fault. So a cache that outlives its process, or that several processes share, must file blocks under the model's content
and the blocks' layout as well, and all its nodes must have the same `cache.hash_seed`.
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
from tandem.kvtransfer.sources import NodeSources
from tandem.wire.images import MediaFeature
from tandem.wire.kv_events import KVEvent
from tandem.wire.nodes import PeerAddress
from tandem.wire.requests import CachePeers, KVTransferParams, TierStatus, WaitHistogram
from tandem.wire.tracing import TransferRecord, TransferTrace


class TransferRequest(Protocol):
    """What a connector may see of a request. The engine's Request satisfies it."""

    @property
    def request_id(self) -> str: ...
    @property
    def all_token_ids(self) -> Sequence[int]:
        """The prompt, then the output. A request that moved here from a lost node arrives with output tokens."""

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
    def media(self) -> Sequence[MediaFeature]:
        """The placeholders among the tokens, in order: parts of images, or rows in place of embeddings."""

    @property
    def transfer(self) -> KVTransferParams | None: ...
    @property
    def when_idle(self) -> bool:
        """Whether it runs when nothing else does: its KV moves when no other request's has to."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The chained hash of each full block of tokens. Callers must not change it. Empty without prefix caching."""

    @property
    def cache_peers(self) -> CachePeers | None: ...

    @property
    def is_distrusted(self) -> bool:
        """True if its KV is of an earlier generation of the cache: store none of it."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """True if every token must be computed here: the connector must load nothing from a cache."""


class ScheduledStep(Protocol):
    """What a connector may see of a step when it builds its metadata."""

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """Maps each request id to the number of tokens that this step computes."""

    @property
    def total_num_scheduled_tokens(self) -> int: ...
    @property
    def preempted_req_ids(self) -> set[str]: ...

    def new_block_ids(self, request_id: str) -> Sequence[Sequence[int]]:
        """The blocks, per group, that this step gave to a request which was already running; empty lists when none."""


BlockIds = Sequence[Sequence[int]]
"""A request's block table: for each KV cache group, the ids of its blocks in prompt order."""


class BlockTables(Protocol):
    """The current block tables of all requests that have blocks. Only for use during the scheduler's calls."""

    def block_ids(self, request_id: str) -> BlockIds: ...


class BlockGroup(Protocol):
    """Layers that share a block table."""

    @property
    def block_size(self) -> int: ...
    @property
    def keeps_every_token(self) -> bool: ...
    @property
    def window(self) -> int | None:
        """The number of tokens that a sliding window reads, the reading token included, or a chunk's length; None
        where attention reads every token."""

    def first_read(self, position: int) -> int:
        """The first token that the token at `position` reads; below 0 if the window is longer than the prefix."""

    @property
    def blocks_per_request(self) -> int:
        """Above 0 for a group that keeps recurrent states: its table has this many blocks, and they hold the states
        after all tokens so far."""


NULL_BLOCK_ID = 0
"""Stands in a block table where a block is not kept (a sliding window has moved on). It is never read or written."""


def count_blocks(table: BlockIds) -> int:
    return sum(block != NULL_BLOCK_ID for ids in table for block in ids)


class ConnectorMetadata:
    """What the scheduler half tells the worker half about one step. Each connector has its own subclass."""

    @property
    def reads(self) -> Sequence[int]:
        """Blocks that are in use now and that the connector begins to read: *Reads* in the module's docstring."""
        return ()


class WorkerMetadata:
    """What the worker half tells the scheduler half about one step, beyond what the engine must know."""


class Handoff(msgspec.Struct, frozen=True):
    """A load that has arrived and was verified."""

    # The token at position `num_tokens`, which the producer has sampled; None for a cached load.
    first_token: int | None
    num_tokens: int  # tokens whose KV is in the request's blocks now, the local prefix included


class LoadFailure(msgspec.Struct, frozen=True):
    """A load that will not complete. The KV of the request's first `valid_tokens` tokens is right all the same.

    A peer may still write to `unsafe_blocks`: *Quarantine* in the module's docstring. They hold no KV of the first
    `valid_tokens` tokens.
    """

    reason: str
    valid_tokens: int = 0
    unsafe_blocks: frozenset[int] = frozenset()
    # A cached load failed: the engine computes what is missing, whatever `transfer.on_failure` says.
    cached: bool = False


class ConnectorOutput(msgspec.Struct):
    """What happened to transfers since the last step. In a request's life, its id appears at most once in
    `finished_sending`, and for each load once in either `finished_recving` or `failed_recving`."""

    finished_sending: set[str] = msgspec.field(default_factory=set)
    finished_recving: dict[str, Handoff] = msgspec.field(default_factory=dict)
    failed_recving: dict[str, LoadFailure] = msgspec.field(default_factory=dict)
    # Blocks whose KV turned out wrong after requests had begun to use it. The connectors here check KV before they report it;
    # this is for one that loads block by block while its request runs.
    invalid_block_ids: set[int] = msgspec.field(default_factory=set)
    released_blocks: set[int] = msgspec.field(default_factory=set)  # blocks that leave quarantine
    ended_reads: list[int] = msgspec.field(default_factory=list)  # *Reads* in the module's docstring
    # Requests of a producer whose consumer no longer wants their KV: the engine need not compute the rest.
    unwanted_sending: set[str] = msgspec.field(default_factory=set)
    # KV that was copied or received from a peer may be wrong: why. The engine begins a new generation of its cache.
    distrusted: str = ""
    # For the connector's own scheduler half, which may add consequences to this output.
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
            or self.distrusted
        )


class TierRoom(msgspec.Struct, frozen=True, array_like=True):
    """How full a tier is, in blocks of the device. A tier that others share has no total."""

    name: str
    cached_blocks: int
    total_blocks: int


class TransferStats(msgspec.Struct):
    """Totals since start. The worker half keeps them; the node reports them."""

    bytes_sent: int = 0
    bytes_received: int = 0
    blocks_sent: int = 0
    descriptors_sent: int = 0  # runs of bytes that the connector asked the transport to move
    blocks_received: int = 0
    outcomes: dict[str, int] = msgspec.field(default_factory=dict)
    leases_expired: int = 0
    malformed_frames: int = 0
    in_progress: int = 0  # a gauge: transfers under way now, on either side
    quarantined_blocks: int = 0  # a gauge: *Quarantine* in the module's docstring
    # The part of `bytes_sent` that had arrived before the prompt's last forward pass ended.
    bytes_overlapped: int = 0
    refused: dict[str, int] = msgspec.field(default_factory=dict)  # messages not acted on, by reason
    blocks_checked: int = 0  # received blocks whose checksums were right
    # Failed checksum comparisons, by the peer that sent the bytes.
    wrong_kv: dict[str, int] = msgspec.field(default_factory=dict)
    # Peers that sent wrong KV so often that this node begins no transfer with them for a while.
    left_out: list[str] = msgspec.field(default_factory=list)
    # A producer's blocks that became free, by what freed them: see `protocol.side.ReleaseReason`.
    blocks_freed: dict[str, int] = msgspec.field(default_factory=dict)
    recent: list[TransferRecord] = msgspec.field(default_factory=list)  # the newest at the end, a few dozen
    # By stage: see TransferRecord.waits.
    waits: dict[str, WaitHistogram] = msgspec.field(default_factory=dict)
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
    # The tier in host memory reads blocks from other nodes' tiers in host memory, and these read from it.
    remote: bool = False
    mirror: bool = False  # another node's tier also gets copies of the blocks that running requests fill
    # One socket to each of the node's other ranks, in rank order, where every rank keeps its heads in its own
    # memory; to every rank, where the cache is elsewhere (see KVCacheMemory). The connector sends moves over them to the
    # ranks that carry them out. A connector that takes them closes them.
    rank_lines: Sequence[socket.socket] = ()
    tier_lines: Sequence[socket.socket] = ()  # the same, for copies between a rank's memory and its tiers
    sources: NodeSources = msgspec.field(default_factory=NodeSources)
    # The ports of the RDMA devices nearest to the memory of the KV cache, such as mlx5_3:1. Empty: there is no choice.
    near: Sequence[str] = ()


class SchedulerConnector(abc.ABC):
    """The half that plans. The scheduler calls it from the step thread, at these points and no others."""

    def bind_block_tables(self, tables: BlockTables) -> None:
        """Called once, before the first request."""

    def on_new_request(self, request: TransferRequest) -> None:
        """The scheduler has accepted the request. Nothing is allocated yet."""

    @abc.abstractmethod
    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many tokens beyond the `num_computed_tokens` found locally the connector can bring.

        (None, _): ask again in a later step. (n, True): the tokens arrive while other steps run, and the request waits
        in WAITING_FOR_REMOTE_KVS. (n, False): the tokens are there when the step runs. A load that is no handoff leaves
        at least one token to compute.
        """

    @abc.abstractmethod
    def update_state_after_alloc(self, request: TransferRequest, block_ids: BlockIds, num_external_tokens: int) -> None:
        """The request has blocks now; this connector has promised `num_external_tokens` of its tokens.

        After a load that arrives later, the scheduler calls this again, with 0, when it admits the request. The
        request's `num_computed_tokens` need no computing: they were found here or, once the request is admitted, were
        loaded. On a producer this call pairs the request's blocks with the destination's: the transfer plan.
        """

    def wants_checkpoints(self, request: TransferRequest) -> bool:
        """Whether steps shall copy the request's recurrent states while it answers, too, for another node that may have
        to continue it. Asked when the request is about to run."""
        return False

    def checkpoint_kept(
        self, request: TransferRequest, num_tokens: int, block_ids: Sequence[int], *, passing: bool = False
    ) -> None:
        """The planned step copies the request's recurrent states to these blocks, a checkpoint, before it computes
        anything. They are the states after the first `num_tokens` tokens, in the order of the request's table of
        states. The blocks are free when the step is booked, unless the metadata's `reads` names them. `passing`: the
        checkpoint was made because `wants_checkpoints` asked for it."""

    @abc.abstractmethod
    def build_connector_meta(self, step: ScheduledStep) -> ConnectorMetadata:
        """Returns everything that the worker half must know of this step. Must not change `step`."""

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """`output` is the worker half's report. Called before the scheduler acts on it; may add to it."""

    def blocks_given_up(self, request_id: str) -> Sequence[int]:
        """The request is about to lose blocks, and goes on later. Returns those that copies still read: *Reads* in the
        module's docstring."""
        return ()

    def request_finished(self, request: TransferRequest, block_ids: BlockIds) -> bool:
        """The request has ended and still owns its blocks. Returns True to keep them: see the module's docstring."""
        return False

    def has_pending_work(self) -> bool:
        """True while no metadata has carried some of the plans yet: the engine then steps again at once."""
        return False

    def step_took(self, num_prompt_tokens: int, seconds: float) -> None:
        """The model took `seconds` for a step that computed `num_prompt_tokens` tokens of prompts."""

    def note_events(self) -> None:
        """Begin to keep events for `take_events`. Called before the first request, if at all."""

    def take_events(self) -> Iterable[KVEvent]:
        """Returns which blocks appeared in the connector's tiers and vanished from them since the last call."""
        return ()

    def tier_rooms(self) -> Sequence[TierRoom]:
        """How full the connector's tiers are, the nearest first."""
        return ()

    def found_wrong(self, peer: PeerAddress) -> None:
        """KV that came from this peer is wrong, though it arrived as it was sent. Counts against the peer, and tells it."""

    def forget_after(self, request: TransferRequest, num_tokens: int) -> None:
        """The KV of all but the request's first `num_tokens` tokens is wrong, or may be. It will be computed again or never. Load
        none of it that was kept, for any request, and let no peer use what was sent of it. The request may have ended;
        ignore one that is not known."""

    def call_back(self, request: TransferRequest) -> None:
        """Another request needs the blocks that this one, for which no one waits, left with the connector. Give its transfer up unless
        the peer is ready for it; `finished_sending` names the request as always."""

    def reset_cache(self) -> None:
        """From now on load no KV that was kept so far, nor any that is being stored or loaded now."""

    @property
    def has_forgotten(self) -> bool:
        """Whether nothing that `reset_cache` and `forget_after` were called for would be found again if the process ended now."""
        return True


class WorkerConnector(abc.ABC):
    """The half that moves bytes. The engine calls it from the step thread, so no method may wait."""

    @property
    def peer_endpoint(self) -> str:
        """The address at which other nodes reach this connector; "" when they need not."""
        return ""

    @property
    def tier_endpoint(self) -> str:
        """The address at which other nodes ask for blocks of this node's tier; "" when they may not."""
        return ""

    @property
    def hands_over_states(self) -> bool:
        """Whether the connector brings recurrent states, as they are after the last token that it brings. If it does
        not, a model with recurrent states cannot be served by prefill and decode nodes."""
        return False

    @property
    def layerwise(self) -> bool:
        """True to have the forward pass call `wait_for_layer_load` and `save_kv_layer`, once per layer."""
        return False

    @abc.abstractmethod
    def register_kv_caches(self, memory: KVCacheMemory) -> None:
        """Called once, before the first step."""

    @abc.abstractmethod
    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None: ...

    def handle_preemptions(self) -> None:
        """This step may overwrite blocks of preempted requests, so bytes read from them after this call do not count
        as their KV."""

    def start_load_kv(self) -> None:
        """The step begins: begin the loads."""

    def wait_for_layer_load(self, layer: int) -> None:
        """The forward pass is about to read layer `layer`. Only synchronous loads wait here. The connectors here load before their
        request is scheduled; every forward pass calls this for those that load a layer while the one before computes."""

    def save_kv_layer(self, layer: int) -> None:
        """The forward pass has written layer `layer` of the step's tokens."""

    def wait_for_save(self) -> None:
        """The forward pass is over: it has written all layers of the step's tokens."""

    @abc.abstractmethod
    def get_finished(self, finished_req_ids: set[str]) -> ConnectorOutput:
        """Returns what completed since the last call. `finished_req_ids`: requests that the scheduler ended since the
        last step."""

    def stats(self) -> TransferStats:
        """A snapshot. Any thread may call this."""
        return TransferStats()

    def trace_of(self, request_id: str) -> TransferTrace | None:
        """Returns how the request's transfer ended and where its time went, or None. The engine asks at most once,
        from the step thread, when the transfer is over. It may never ask, so a connector keeps few traces."""
        return None

    def shutdown(self) -> None:
        """Stop every thread, close every socket, give back every registration. Idempotent."""


class ConnectorFactory(Protocol):
    """The callable that a connector's module exports and the registry names."""

    def __call__(self, context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]: ...
