"""Router -> node and node -> router.

A router binds one Inbox and names it as `reply_to`; a node answers every router there, one TokenBatch per
engine step for all of that router's requests. A router pings each node twice a second or so; a node sends its
NodeStatus to every router that pinged it lately, and aborts the requests of one that fell silent. All of these
travel on numbered lines (`wire.lines`), so none is lost in silence.

When they speak of caches they call a prompt's blocks by one hash for each block and everything before it, the same in every process of a
cluster (`block_hashes`). A node's cache has hashes of its own, which other processes cannot foretell. These are for routing alone: routers
make them of prompts, nodes of the blocks that they cache, and a wrong match costs time and no answer.
"""

from __future__ import annotations

import enum
import os
import re
import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import msgspec
import xxhash

from tandem.wire.embeds import PromptEmbeds
from tandem.wire.errors import WireError
from tandem.wire.images import MediaFeature
from tandem.wire.nodes import NodeState, PeerAddress, Role
from tandem.wire.pooling import Pooling
from tandem.wire.sampling import FinishReason, SamplingParams, TokenLogprobs
from tandem.wire.tracing import ClockReading, NodeTrace

# Every request needs several ids, and the system's randomness is a call of the kernel: so many are drawn at once.
_DRAWN_BYTES = 4096
_ID_DIGITS = re.compile(".{32}")
_drawn: list[str] = []
os.register_at_fork(after_in_child=_drawn.clear)


def new_id() -> str:
    """32 hexadecimal digits that are not to be guessed, and never the same twice. From any thread."""
    while True:
        try:
            return _drawn.pop()
        except IndexError:
            _drawn.extend(_ID_DIGITS.findall(os.urandom(_DRAWN_BYTES).hex()))


class TransferRole(enum.StrEnum):
    PRODUCE = "produce"  # compute the prompt here, send its KV to the peer
    CONSUME = "consume"  # the peer computes the prompt; wait for its KV


class KVTransferParams(msgspec.Struct, frozen=True):
    """This node's part in one KV transfer. Made by the router, never accepted from a client."""

    transfer_id: str  # unguessable; the same on both nodes
    role: TransferRole
    peer: PeerAddress


class CachePeers(msgspec.Struct, frozen=True):
    """Nodes whose tiers in host memory have to do with a request's KV, by their `tier_endpoint`. Named by the router."""

    source: PeerAddress | None = None  # likely has more of the prompt than the node that reads it
    mirror: PeerAddress | None = None  # copies the request's blocks, to go on with it when this node dies


class KeepAnswer(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The node that decodes the request keeps its tokens, for any router that asks for them by `answer_id`. The end of the router
    that submitted it does not end it."""

    answer_id: str  # unguessable
    attempt: int  # of an answer that was submitted several times the highest counts
    note: bytes  # what another router needs to make the answer of the tokens; the node does not read it


class Submit(msgspec.Struct, frozen=True, tag="submit", omit_defaults=True, forbid_unknown_fields=True):
    """Start a request. With `transfer` both nodes get one, at the same time, under the same request id."""

    request_id: str
    reply_to: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    timeout_s: float  # what is left of the request's deadline; a duration, because clocks disagree
    output_token_ids: list[int] = []  # tokens it already has, when it moves here from a lost node
    transfer: KVTransferParams | None = None
    priority: int = 0  # lower runs first, under the priority policy
    cache_salt: str | None = None
    lora: str | None = None  # its adapter's identity: wire.adapters
    media: list[MediaFeature] = []  # where images stand in the prompt, in order; or its `embeds`
    images: list[bytes] = []  # their files
    trace: bool = False  # send a NodeTrace when it is over
    keep: KeepAnswer | None = None
    cache_peers: CachePeers | None = None
    pooling: Pooling | None = None  # a vector of the prompt is wanted, and no token
    job_id: str | None = None  # the agent's work that it is a turn of, unlike that of any other tenant
    is_last_step: bool = False  # of that job: no further turn follows
    embeds: PromptEmbeds | None = None  # in the place of the whole prompt's tokens
    encoders: list[
        PeerAddress
    ] = []  # for each image the encoder node that has its rows, or makes them; none: this node does


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Forget these requests in whatever phase they are. Unknown ids are not an error: they may have ended."""

    reply_to: str
    request_ids: list[str]


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """The router is alive; answer with a NodeStatus, and to `asked_at` with a ClockReading too."""

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
    """Send the kept answer's tokens from index `after` on, and those that follow, as chunks of `request_id`. May be sent again; a Cancel
    of that id ends it."""

    reply_to: str
    request_id: str
    answer_id: str
    after: int


class ListCache(msgspec.Struct, frozen=True, tag="list_cache"):
    """Answer with CacheNews from number 0 on: some of it is missing."""

    reply_to: str


class TurnEnded(msgspec.Struct, frozen=True, tag="turn_ended"):
    """The answer of a job's turn is whole. To the nodes that had it, so that they know whether the next turn comes soon."""

    reply_to: str
    request_id: str
    job_id: str
    called: list[str] | None  # the tools, by name; None: this router reads no calls


class EndAnswer(msgspec.Struct, frozen=True, tag="end_answer"):
    """The kept answer is no longer wanted: if it is being made it ends as cancelled. `forget`: it is not kept either."""

    reply_to: str
    answer_id: str
    forget: bool


ToNode = Submit | Cancel | Ping | Ask | Recall | Follow | EndAnswer | ListCache | TurnEnded


class TokenChunk(msgspec.Struct, omit_defaults=True, gc=False):
    """New output tokens of one request, an end, or both. The scheduler makes it, and the same struct goes to the router.

    `start` is the index of the first of them in the request's output. Both nodes report the first token
    (the prefill node because it sampled it, the decode node because it began from it), so a receiver drops
    what it already has by index, and the loss of either report loses nothing.
    """

    request_id: str
    start: int
    token_ids: list[int]
    finish: FinishReason | None = None
    stop_token: int | None = None  # which stop token ended it, with finish=stop
    error: WireError | None = None  # with finish=error
    logprobs: list[TokenLogprobs] | None = None  # one per token id
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, on the first chunk
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache; once, on the first chunk
    queue_s: float = 0.0  # on the first chunk: from its arrival at the node to its first step
    preemptions: int = 0  # with the end: how often it lost its blocks and went back in line
    vector: bytes | None = None  # what was asked for with `Submit.pooling`: float32, the lowest byte first

    @staticmethod
    def failed(request_id: str, start: int, error: WireError) -> TokenChunk:
        """An error's end, after `start` tokens."""
        return TokenChunk(request_id, start, [], FinishReason.ERROR, error=error)


class TokenBatch(msgspec.Struct, frozen=True, tag="tokens"):
    node_id: str
    epoch: int
    chunks: list[TokenChunk]


# A step's tokens, in vLLM's buckets.
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
WAIT_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 20.0)


class WaitHistogram(msgspec.Struct, frozen=True):
    """How long something took, each time: `counts[i]` took at most WAIT_BOUNDS_S[i], the last of them longer."""

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
    """A tier of the KV cache beyond the device's: how full it is, and what it has done since the node's epoch began."""

    name: str
    used_bytes: int
    total_bytes: int
    asked_tokens: int  # of prompts, not found on the device
    found_tokens: int  # of these, found here
    loaded_bytes: int
    stored_bytes: int
    evicted_bytes: int
    loaded_tokens: int = 0
    loading_seconds: float = 0.0  # that requests waited for these
    fetched_bytes: int = 0  # copied from other nodes' tiers, where that cost less than computing
    mirrored_bytes: int = 0  # copied from a node whose mirror this one is


class NodeCounters(msgspec.Struct, frozen=True, gc=False):
    """Totals since the node's epoch began. Only ever grow."""

    requests_started: int = 0
    requests_admitted: int = 0
    queue_seconds: float = 0.0  # of those that were admitted: from arrival to the first step, together
    requests_finished: dict[str, int] = {}  # by finish reason
    prompt_tokens_computed: int = 0  # tokens of prompts that went through the model here
    prompt_tokens_cached: int = 0  # tokens of prompts found in the local prefix cache
    prompt_tokens_received: int = 0  # tokens of prompts whose KV came from a peer
    prompt_tokens_loaded: int = 0  # tokens of prompts whose KV came from a tier of this node's cache
    prompt_tokens_looked_up: int = 0  # tokens of prompts that were looked for in the local prefix cache
    prompt_tokens_asked: int = 0  # of these not found: looked for at a peer or in a tier
    loads_failed: int = 0  # requests whose KV from outside did not come as it was promised
    output_tokens: int = 0
    preemptions: int = 0
    encoder_tokens: int = 0  # tokens of images that the vision tower made here
    encoder_tokens_reused: int = 0  # that prompts found made already
    encoder_tokens_received: int = 0  # that an encoder node made for a prompt here
    encoder_tokens_sent: int = 0  # of an encoder node: to nodes that read prompts
    encoder_fallbacks: dict[str, int] = {}  # images that this node encoded because no rows came, by why
    pins_made: int = 0  # turns that kept their blocks for their job's next turn
    pins_met: int = 0  # of these: the next turn came in time, and began as they did
    pins_ended: dict[str, int] = {}  # by why
    blocks_evicted: int = 0  # of the prefix cache, for other tokens
    evictions_timed: int = 0  # a share of these, and how long they were cached, and in no use, together
    evicted_after_seconds: float = 0.0
    evicted_idle_seconds: float = 0.0
    reuses_timed: int = 0  # of a share of the blocks: a request found one that was in no use, and for how long it had not been
    reused_after_seconds: float = 0.0
    steps: int = 0
    step_seconds: float = 0.0
    step_tokens: list[int] = []  # steps by how many tokens they computed: STEP_TOKEN_BOUNDS, the last longer
    tokens_scheduled: int = 0  # in all steps together
    malformed_frames: int = 0
    line_gaps: int = 0  # times that messages of a router were missing and asked for again
    transfer_bytes_sent: int = 0
    transfer_bytes_received: int = 0
    transfer_blocks_sent: int = 0
    transfer_blocks_received: int = 0
    transfers_finished: dict[str, int] = {}  # by outcome: "sent", "received", or why it ended otherwise
    leases_expired: int = 0
    transfer_descriptors_sent: int = 0  # runs of bytes that were moved
    transfer_bytes_overlapped: int = 0  # of those sent: complete before the prompt's last forward pass was
    transfer_refusals: dict[str, int] = {}  # messages of peers that were not acted on, by reason
    transfer_blocks_freed: dict[str, int] = {}  # blocks kept for a transfer, by what freed them
    transfer_blocks_checked: int = 0  # of those received: their checksums were right
    # Received blocks by the node that sent them: their checksum was wrong, or computing them again gave other values.
    wrong_kv: dict[str, int] = {}
    # By stage (handshake, register, receive, first_byte, last_byte, handover): how long transfers waited.
    transfer_wait_seconds: dict[str, WaitHistogram] = {}
    speculative_steps: int = 0  # in which a request had drafts
    speculative_drafted: int = 0
    speculative_accepted: int = 0
    speculative_accepted_at: list[int] = []  # of these, by their position in the draft
    kv_checks: int = 0  # received prompts that were computed again in idle time, to compare their KV
    model_errors: int = 0  # requests ended because the model computed something that is no number


class NodeStatus(msgspec.Struct, frozen=True, tag="status", gc=False):
    """A node's own account of itself, a few times a second. `step_age_s` betrays a wedged engine."""

    node_id: str
    role: Role
    epoch: int
    state: NodeState
    free_blocks: int
    total_blocks: int
    running: int
    waiting: int
    waiting_tokens: int  # prompt tokens not yet computed of everything queued and running
    transfers: int  # under way
    held_blocks: int  # of finished requests, until their transfer is confirmed
    step_age_s: float  # since the engine last completed a step or found itself idle
    counters: NodeCounters
    detail: str = ""  # why, when failed
    loading: int = 0  # of those that wait: their prompt's KV is on its way
    cached_blocks: int = 0  # that a prefix can be found in, in use or free
    held_requests: int = 0  # that have ended, and whose blocks wait for their transfer
    # Blocks that the requests here are expected to take beyond those that they have. With `free_blocks` it says how much room there is.
    wanted_blocks: int = 0
    oldest_wait_s: float = 0.0  # of the requests that wait: how long ago the first of them came
    quarantined_blocks: int = 0  # of failed transfers: a peer may still write to them
    pinned_requests: int = 0  # that have ended, and keep their blocks for their job's next turn
    pinned_blocks: int = 0  # of these, in no other use: they give way when a request could not run otherwise
    tiers: list[TierStatus] = []  # of its cache, beyond the device's blocks
    left_out: list[
        str
    ] = []  # prefill nodes from which nothing is taken for a while: their KV arrived wrong here
    adapters: dict[str, str] = {}  # the LoRA adapters that it has: their digests, by name
    age_s: float = 0.0  # what was submitted since then is not in it: requests are read between two steps

    @property
    def room_blocks(self) -> int:
        """Those that a request can have: what is pinned gives way."""
        return self.free_blocks + self.pinned_blocks


class Holding(msgspec.Struct, frozen=True, tag="holding"):
    """All requests of one router that a node holds, each with the number of output tokens that it has reported.

    Sent when messages may have been lost for good, and to an Ask. A request that was submitted at or before `line` and `number`, the
    router's last message that the node had acted on, and that is not listed, has ended here or never arrived.
    """

    node_id: str
    epoch: int
    line: int
    number: int
    requests: dict[str, int]


class Recalled(msgspec.Struct, frozen=True, tag="recalled"):
    """To a Recall."""

    node_id: str
    epoch: int
    answer_id: str
    keep: KeepAnswer | None = None  # None: it is not here
    broken: bool = False  # it ended before its end: cancelled, or failed


class CacheChange(msgspec.Struct, frozen=True, array_like=True):
    medium: str
    is_stored: bool  # False: removed
    hashes: bytes  # as `block_hashes` makes them, eight bytes each, little-endian


class CacheNews(msgspec.Struct, frozen=True, tag="cache_news"):
    """What the node's prefix cache holds, and then what changes. With number 0 begins a list of everything, which takes the place of all
    that was told before; each further message has the next number."""

    node_id: str
    epoch: int
    number: int
    changes: list[CacheChange]


ToRouter = TokenBatch | NodeStatus | NodeTrace | ClockReading | Holding | Recalled | CacheNews

_TOKEN_BYTES = 4


def root_hash(salt: str | None, lora: str | None = None) -> int:
    """Before the first block: what besides tokens makes all of a prompt's KV another."""
    if salt is None and lora is None:
        return 0
    return xxhash.xxh3_64_intdigest(repr((salt, lora)).encode("utf-8", "surrogatepass"))


def beside_media(parent: int, keys: Sequence[str]) -> int:
    """What stands for the block before one that images lie in. `keys`: as its events name them."""
    return root_hash(repr((parent, list(keys))))


def hashes_with_media(
    token_ids: Sequence[int], block_size: int, parent: int, media: Sequence[MediaFeature]
) -> list[int]:
    """As `block_hashes`, of a prompt with images, or of rows in the place of tokens."""
    hashes: list[int] = []
    ends = [each.offset + each.length for each in media]
    begins = [each.offset for each in media]
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        end = start + block_size
        keys = [
            f"media:{each.identifier}:{each.offset}"
            for each in media[bisect_right(ends, start) : bisect_left(begins, end)]
        ]
        hashes += block_hashes(
            token_ids[start:end], block_size, beside_media(parent, keys) if keys else parent
        )
        parent = hashes[-1]
    return hashes


def block_hashes(token_ids: Sequence[int], block_size: int, parent: int) -> list[int]:
    """One for each full block. `parent`: that of the block before them, or the root."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    block, digest = struct.Struct(f"{_TOKEN_BYTES * block_size}s"), xxhash.xxh3_64_intdigest
    full = len(packed) - len(packed) % block_size
    return [parent := digest(content, parent) for (content,) in block.iter_unpack(packed[:full])]
