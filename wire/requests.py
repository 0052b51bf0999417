"""Router -> node and node -> router.

A router binds one Inbox and names it as `reply_to`. A node answers every router there, with one TokenBatch per
engine step for all of that router's requests. A router pings each node about twice a second. A node sends its
NodeStatus to every router that pinged it lately, and aborts the requests of a router that fell silent. All of these
travel on numbered lines (`wire.lines`), so no loss goes unnoticed.
"""

from __future__ import annotations

import enum
import os
import re
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import msgspec

from tandem.base.errors import WireError
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.images import MediaFeature
from tandem.wire.nodes import NodeState, PeerAddress, Role
from tandem.wire.pooling import Pooling
from tandem.wire.sampling import FinishReason, SamplingParams, TokenLogprobs
from tandem.wire.step_costs import StepCosts
from tandem.wire.tracing import ClockReading, NodeTrace

# Every request needs several ids, and the system's randomness costs a system call, so one call draws many.
_DRAWN_BYTES = 4096
_ID_DIGITS = re.compile(".{32}")
_drawn: list[str] = []
forget_drawn_ids = _drawn.clear
os.register_at_fork(after_in_child=forget_drawn_ids)


def new_id() -> str:
    """Returns 32 hexadecimal digits, unguessable and never the same twice. Any thread may call this."""
    while True:
        try:
            return _drawn.pop()
        except IndexError:
            _drawn.extend(_ID_DIGITS.findall(os.urandom(_DRAWN_BYTES).hex()))


class TransferRole(enum.StrEnum):
    PRODUCE = "produce"  # compute the prompt here, and send its KV to the peer
    CONSUME = "consume"  # the peer computes the prompt: wait for its KV


class KVTransferParams(msgspec.Struct, frozen=True):
    """This node's part in one KV transfer. The router makes it, and never accepts one from a client."""

    transfer_id: str  # unguessable; the same on both nodes
    role: TransferRole
    peer: PeerAddress


class CachePeers(msgspec.Struct, frozen=True):
    """Nodes whose tiers in host memory may hold this request's KV, by their `tier_endpoint`. The router names them."""

    # Likely has more of the prompt than the node that reads it: copy from there.
    source: PeerAddress | None = None
    mirror: PeerAddress | None = None  # copies the request's blocks, to continue it if this node dies


class KeepAnswer(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The node that decodes the request keeps its tokens for any router that asks for `answer_id`. If the router that
    submitted it ends, the request goes on."""

    answer_id: str  # unguessable
    attempt: int  # if an answer was submitted several times, the highest attempt counts
    note: bytes  # what another router needs to make the answer from the tokens; the node does not read it


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a client asked for: the same in every attempt and at every node. Routers, nodes and engines hold it as it is, so a
    new fact is named here and where it is used."""

    prompt_token_ids: list[int]
    sampling: SamplingParams  # with a drawn seed: any node continues exactly where another stopped
    priority: int = 0  # lower runs first, under the priority policy
    cache_salt: str | None = None
    lora: str | None = None  # the adapter's identity: wire.adapters
    media: list[MediaFeature] = []  # where images, or the rows of `embeds`, stand in the prompt, in order
    images: list[bytes] = []  # the images' files
    pooling: Pooling | None = None  # the client wants a vector of the prompt, and no token
    # The agent's job of which this request is a turn; no other tenant's job has this id.
    job_id: str | None = None
    is_last_step: bool = False  # the job has no further turn
    embeds: PromptEmbeds | None = None  # rows in place of all tokens of the prompt
    # It computes only in steps in which no other request could, and gives its blocks to any other: a line of a batch.
    when_idle: bool = False
    skip_reading_prefix_cache: bool = False  # every token of the prompt is computed, whatever is cached


class Submit(RequestFacts, frozen=True, tag="submit", omit_defaults=True, forbid_unknown_fields=True):
    """Start a request. With `transfer`, both nodes get a Submit at the same time, with the same request id."""

    request_id: str
    reply_to: str
    timeout_s: float  # how much of the request's time is left; a duration, because clocks differ
    output_token_ids: list[int] = []  # the tokens that the request brings when it moves here from a lost node
    transfer: KVTransferParams | None = None
    trace: bool = False  # send a NodeTrace when the request is over
    keep: KeepAnswer | None = None
    cache_peers: CachePeers | None = None
    # For each image the encoder node that has or makes its rows. Empty: this node encodes the images.
    encoders: list[PeerAddress] = []


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Forget these requests, whatever their phase. Unknown ids are no error, because the requests may have ended."""

    reply_to: str
    request_ids: list[str]


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """The router is alive. Answer with a NodeStatus, and if `asked_at` is set with a ClockReading, too."""

    reply_to: str
    asked_at: float | None = None  # on the router's monotonic clock


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Answer with Holding: the router has waited long for some of its requests."""

    reply_to: str


class Recall(msgspec.Struct, frozen=True, tag="recall"):
    """Answer with Recalled: does this node keep the answer?"""

    reply_to: str
    answer_id: str


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """Send the kept answer's tokens from index `after` on, and those to come, as chunks of `request_id`. A router
    may send this again. A Cancel of `request_id` ends it."""

    reply_to: str
    request_id: str
    answer_id: str
    after: int


class ListCache(msgspec.Struct, frozen=True, tag="list_cache"):
    """The router lacks some of the news: answer with CacheNews from number 0 on."""

    reply_to: str


class TurnEnded(msgspec.Struct, frozen=True, tag="turn_ended"):
    """The answer of a job's turn is complete. Sent to the nodes that had it, for their guess when the next turn
    comes."""

    reply_to: str
    request_id: str
    job_id: str
    called: list[str] | None  # names of the tools that it calls; None: this router reads no calls


class EndAnswer(msgspec.Struct, frozen=True, tag="end_answer"):
    """The kept answer is over, because it failed for good or was cancelled: if it is still being made, end it with `error`. An
    attempt that its router gave up gets this end, too. `forget`: keep it no longer."""

    reply_to: str
    answer_id: str
    forget: bool
    error: WireError


ToNode = Submit | Cancel | Ping | Ask | Recall | Follow | EndAnswer | ListCache | TurnEnded


class TokenChunk(msgspec.Struct, omit_defaults=True, gc=False):
    """New output tokens of one request, its end, or both. The scheduler makes it, and the same struct goes to the
    router.

    `start` is the index of its first token in the request's output. Both nodes report the first token (the prefill node
    because it sampled it, the decode node because it began from it). So a receiver drops tokens that it has, by index,
    and the loss of either report loses nothing.
    """

    request_id: str
    start: int
    token_ids: list[int]
    finish: FinishReason | None = None
    stop_token: int | None = None  # the stop token that ended it, with finish=stop
    error: WireError | None = None  # with finish=error
    logprobs: list[TokenLogprobs] | None = None  # one per token id
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, on the first chunk
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache; once, on the first chunk
    queue_s: float = 0.0  # on the first chunk: from the request's arrival at the node to its first step
    preemptions: int = 0  # with the end: how often the request lost its blocks and waited again
    vector: bytes | None = None  # the answer to `Submit.pooling`: float32, little-endian

    @staticmethod
    def failed(request_id: str, start: int, error: WireError) -> TokenChunk:
        """Ends the request with an error after `start` tokens."""
        return TokenChunk(request_id, start, [], FinishReason.ERROR, error=error)


class TokenBatch(msgspec.Struct, frozen=True, tag="tokens"):
    node_id: str
    epoch: int
    chunks: list[TokenChunk]


# The buckets of `NodeCounters.step_tokens`, which are vLLM's.
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
WAIT_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 20.0)


class WaitHistogram(msgspec.Struct, frozen=True):
    """How often something took how long: `counts[i]` times at most WAIT_BOUNDS_S[i], and the last of them longer."""

    total_s: float = 0.0
    counts: tuple[int, ...] = (0,) * (len(WAIT_BOUNDS_S) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def plus(self, seconds: float) -> WaitHistogram:
        index = bisect_left(WAIT_BOUNDS_S, seconds)
        counts = (*self.counts[:index], self.counts[index] + 1, *self.counts[index + 1 :])
        return WaitHistogram(self.total_s + seconds, counts)


class TierStatus(msgspec.Struct, frozen=True):
    """A tier of the node's KV cache: how full it is, and its totals since the node's epoch began."""

    name: str
    used_bytes: int
    total_bytes: int
    asked_tokens: int  # prompt tokens not found on the device, and looked for here
    found_tokens: int  # those of them that were found here
    loaded_bytes: int
    stored_bytes: int
    evicted_bytes: int
    loaded_tokens: int = 0
    loading_seconds: float = 0.0  # how long requests waited for `loaded_tokens`, together
    fetched_bytes: int = 0  # copied from other nodes' tiers, because that took less than computing
    mirrored_bytes: int = 0  # copied from nodes whose mirror this one is
    given_up: int = 0  # copies that failed, as on a full disk, or were not done in their time
    left_out: str = ""  # why the tier is not used for now, because it hangs or is slow


class _EmptyTable(dict[str, Any]):
    """An empty table. Routers keep a thousand statuses, so all of them share this one instead of a dozen empty tables
    each."""

    __slots__ = ()


EMPTY_TABLE: Mapping[str, Any] = _EmptyTable()


class NodeCounters(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Totals since the node's epoch began. They only grow; but for `step_costs`, which comes with them. Those that are zero are not
    sent."""

    requests_started: int = 0
    requests_admitted: int = 0
    queue_seconds: float = 0.0  # from arrival to the first step, for all admitted requests together
    requests_finished: Mapping[str, int] = EMPTY_TABLE  # by finish reason
    prompt_tokens_computed: int = 0  # tokens of prompts that went through the model here
    prompt_tokens_cached: int = 0  # tokens of prompts found in the local prefix cache
    prompt_tokens_received: int = 0  # tokens of prompts whose KV came from a peer
    prompt_tokens_loaded: int = 0  # tokens of prompts whose KV came from a tier of this node's cache
    prompt_tokens_looked_up: int = 0  # tokens of prompts that were looked up in the local prefix cache
    prompt_tokens_asked: int = 0  # those not found there, and looked for at a peer or in a tier
    loads_failed: int = 0  # requests whose KV did not come from outside as promised
    output_tokens: int = 0
    preemptions: int = 0
    encoder_tokens: int = 0  # tokens of images that the vision tower made here
    encoder_tokens_reused: int = 0  # tokens of images that prompts found already made
    encoder_tokens_received: int = 0  # tokens of images that an encoder node made for a prompt here
    encoder_tokens_sent: int = 0  # an encoder node's: sent to nodes that read prompts
    # Images that this node encoded because no rows came, by reason.
    encoder_fallbacks: Mapping[str, int] = EMPTY_TABLE
    pins_made: int = 0  # turns that kept their blocks for their job's next turn
    pins_met: int = 0  # pins whose next turn came in time and began with the same tokens
    pins_ended: Mapping[str, int] = EMPTY_TABLE  # ends of pins, by reason
    blocks_evicted: int = 0  # of the prefix cache, for other tokens
    # A sample of the evicted blocks: how many, and how long they had been cached, and unused, all together.
    evictions_timed: int = 0
    evicted_after_seconds: float = 0.0
    evicted_idle_seconds: float = 0.0
    # A sample of the unused blocks that a request found: how many, and how long they had been unused, all together.
    reuses_timed: int = 0
    reused_after_seconds: float = 0.0
    steps: int = 0
    step_seconds: float = 0.0
    # Steps that computed no prompt, and how long the model needed for them; without what ran because nothing else did.
    decode_steps: int = 0
    decode_seconds: float = 0.0
    idle_steps: int = 0  # of all steps, what ran because nothing else did, such as the lines of batches
    idle_seconds: float = 0.0
    idle_tokens_read: int = 0
    idle_tokens_written: int = 0
    # How many steps computed how many tokens: up to each of STEP_TOKEN_BOUNDS, and more in the last.
    step_tokens: tuple[int, ...] = ()
    tokens_scheduled: int = 0  # in all steps together
    model_flops: float = 0.0  # floating-point operations of the model, by estimate; 0: it is not known
    model_bytes: float = 0.0  # that its steps read and wrote of weights and KV, by estimate
    malformed_frames: int = 0
    line_gaps: int = 0  # how often messages of a router were missing and requested again
    transfer_bytes_sent: int = 0
    transfer_bytes_received: int = 0
    transfer_blocks_sent: int = 0
    transfer_blocks_received: int = 0
    # By outcome: "sent", "received", or why it ended otherwise.
    transfers_finished: Mapping[str, int] = EMPTY_TABLE
    leases_expired: int = 0
    transfer_descriptors_sent: int = 0  # runs of bytes that were moved
    # Sent bytes that had arrived before the prompt's last forward pass ended.
    transfer_bytes_overlapped: int = 0
    transfer_refusals: Mapping[str, int] = EMPTY_TABLE  # messages of peers that were not acted on, by reason
    transfer_blocks_freed: Mapping[str, int] = EMPTY_TABLE  # blocks kept for a transfer, by what freed them
    transfer_blocks_checked: int = 0  # received blocks whose checksums were right
    # By the node that sent them: received blocks with a wrong checksum, or with other values when computed again.
    wrong_kv: Mapping[str, int] = EMPTY_TABLE
    # By stage (handshake, register, receive, first_byte, last_byte, handover): how long transfers waited.
    transfer_wait_seconds: Mapping[str, WaitHistogram] = EMPTY_TABLE
    grammar_tokens_forced: int = 0  # tokens of answers that a grammar forced, and that took no step of their own
    speculative_steps: int = 0  # steps in which a request had drafts
    speculative_drafted: int = 0
    speculative_accepted: int = 0
    speculative_accepted_at: tuple[int, ...] = ()  # accepted tokens by their position in the draft
    kv_checks: int = 0  # received prompts that were computed again in idle time, to compare their KV
    model_errors: int = 0  # requests that ended because the model computed something that is not a number
    client_errors: int = 0  # of those that finished with "error": refused for what their client sent, or out of time
    step_costs: StepCosts | None = None  # None: this node learns none, or has made no step

    @property
    def reading(self) -> tuple[float, int]:
        """The seconds of steps, and the tokens of prompts that they computed, without what ran because nothing else did."""
        return self.step_seconds - self.idle_seconds, self.prompt_tokens_computed - self.idle_tokens_read

    def in_full(self) -> dict[str, Any]:
        """Returns all counters as JSON, zero or not."""
        plain: dict[str, Any] = msgspec.to_builtins(msgspec.structs.asdict(self))
        return plain


NO_COUNTERS = NodeCounters()


class SickDevice(msgspec.Struct, frozen=True):
    """A device of a node that must not compute any more."""

    device: str
    why: str


class NodeMemory(msgspec.Struct, frozen=True):
    """What a process on CPUs has of its machine's memory, in bytes."""

    weights: int
    shared: bool  # all nodes of the machine map one file of them, so they are in memory once
    kv: int  # the part of the KV cache that is in memory; the rest takes none until it is used
    own: int  # everything else, with the code of libraries


class NodeStatus(msgspec.Struct, frozen=True, tag="status", gc=False, omit_defaults=True):
    """A node's state, sent a few times a second. `step_age_s` shows an engine that hangs."""

    node_id: str
    role: Role
    epoch: int
    state: NodeState
    free_blocks: int
    total_blocks: int
    running: int
    waiting: int
    waiting_tokens: int  # prompt tokens of queued and running requests that are not computed yet
    transfers: int  # under way
    held_blocks: int  # blocks of ended requests that wait until their transfer is confirmed
    step_age_s: float  # since the engine last completed a step or was idle
    # None in three of four reports to routers, which keep the last ones that came.
    counters: NodeCounters | None
    detail: str = ""  # why the node failed
    loading: int = 0  # waiting requests whose prompt's KV is on its way
    cached_blocks: int = 0  # blocks in which a prefix can be found, in use or free
    held_requests: int = 0  # ended requests whose blocks wait for their transfer
    # Blocks that the requests here are expected to take beyond those that they have. With `free_blocks` this shows
    # how much room there is.
    wanted_blocks: int = 0
    oldest_wait_s: float = 0.0  # how long ago the first of the waiting requests came whose KV is not on its way
    quarantined_blocks: int = 0  # blocks of failed transfers to which a peer may still write
    pinned_requests: int = 0  # ended turns that keep their blocks for their job's next turn
    pinned_blocks: int = 0  # their blocks in no other use: given up if a request could not run otherwise
    idle_blocks: int = 0  # of what runs when nothing else does: given up for any other request
    tiers: tuple[TierStatus, ...] = ()
    # Prefill nodes from which this node takes nothing for a while, because their KV arrived wrong here.
    left_out: tuple[str, ...] = ()
    # The LoRA adapters that the node serves: their digests, by name.
    adapters: Mapping[str, str] = EMPTY_TABLE
    # The age of this status. It lacks requests submitted since then, because the node reads them between two steps.
    age_s: float = 0.0
    # What the node still has of the adapters that these replaced: digests by name, the newest first.
    replaced_adapters: Mapping[str, tuple[str, ...]] = EMPTY_TABLE
    slower: str = ""  # why the node computes more slowly than it could on its machine
    sick: tuple[SickDevice, ...] = ()
    memory: NodeMemory | None = None  # None: it is not known, as on GPUs

    @property
    def totals(self) -> NodeCounters:
        """The counters; all zero in a status without."""
        return self.counters or NO_COUNTERS

    @property
    def room_blocks(self) -> int:
        """Blocks that a new request can have: pinned blocks are given up for it."""
        return self.free_blocks + self.pinned_blocks


class Holding(msgspec.Struct, frozen=True, tag="holding"):
    """All requests of one router that a node holds, each with the number of output tokens that it has reported.

    Sent when messages may have been lost for good, and to answer an Ask. `line` and `number` name the router's last
    message on which the node has acted. A request that was submitted at or before it, and is not listed, has ended here
    or never arrived.
    """

    node_id: str
    epoch: int
    line: int
    number: int
    requests: dict[str, int]


class Recalled(msgspec.Struct, frozen=True, tag="recalled"):
    """The answer to a Recall."""

    node_id: str
    epoch: int
    answer_id: str
    keep: KeepAnswer | None = None  # None: the node does not keep the answer
    broken: bool = False  # it is incomplete here: it failed, was cancelled, or its router gave this attempt up


class CacheChange(msgspec.Struct, frozen=True, array_like=True):
    medium: str
    is_stored: bool  # False: removed
    hashes: bytes  # as `block_hashes` makes them, eight bytes each, little-endian


class CacheNews(msgspec.Struct, frozen=True, tag="cache_news"):
    """What the node's prefix cache holds, and then its changes. Number 0 begins a list of everything, which replaces
    all earlier news. Each further message has the next number."""

    node_id: str
    epoch: int
    number: int
    changes: list[CacheChange]


ToRouter = TokenBatch | NodeStatus | NodeTrace | ClockReading | Holding | Recalled | CacheNews
