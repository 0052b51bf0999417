"""The nodes and routers of a cluster, as they are announced, and what routers report about nodes."""

from __future__ import annotations

import enum
import hashlib
import secrets

import msgspec

from tandem.wire.pooling import VectorModel
from tandem.wire.versions import WIRE_VERSION

COMPUTED_BY = "+"  # in `NodeInfo.content`


class Role(enum.StrEnum):
    """Which halves of a request a node does. What else differs between nodes is in the package of each role's node."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"  # computes prompts and decodes; never sends KV away
    ENCODE = "encode"  # makes rows of images for nodes that read prompts; runs no requests

    @property
    def reads_prompts(self) -> bool:
        return self in (Role.PREFILL, Role.AGGREGATED)

    @property
    def writes_answers(self) -> bool:
        return self in (Role.DECODE, Role.AGGREGATED)

    @property
    def runs_requests(self) -> bool:
        return self.reads_prompts or self.writes_answers

    @property
    def hands_over(self) -> bool:
        """Whether the KV of its requests travels: it does one half, and another node the other."""
        return self.reads_prompts is not self.writes_answers


# The roles of nodes that run requests.
ENGINE_ROLES = tuple(role for role in Role if role.runs_requests)


class NodeState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # finishes its requests and takes no new ones
    FAILED = "failed"


class NodeInfo(msgspec.Struct, frozen=True, cache_hash=True):
    """A node as the controller announces it to routers. A restarted node has a new epoch."""

    node_id: str
    role: Role
    epoch: int
    # Where routers send Submit, Cancel and Ping. Its key is the node's in every connection.
    request_endpoint: str
    # Where other nodes send handoff messages, or images to encode; "" if there is no connector.
    peer_endpoint: str
    model: str
    max_model_len: int
    block_size: int
    # The digest of configuration, weights and tokenizer: a request runs on nodes of one content. Where the same bits are required,
    # COMPUTED_BY and the node's way of computing follow.
    content: str = ""
    tokenizer: str = ""  # the SHA-256 of its tokenizer.json, which routers compare with theirs
    # What a request's blocks hold: keys and values of its tokens, recurrent states (the same number of blocks,
    # however long the request is), or both.
    keeps_tokens: bool = True
    state_blocks: int = 0
    # Where other nodes ask for blocks of its tier in host memory; "" if they may not.
    tier_endpoint: str = ""
    mirrors: bool = False  # nodes copy the blocks of each other's running requests
    vectors: VectorModel | None = None  # None: its model makes no vectors
    pin_seconds: float = 0.0  # how long a turn keeps its KV there for its job's next turn; 0: not at all
    wire_version: int = WIRE_VERSION  # of the messages that it understands: wire.versions
    tensor_parallel: int = 1  # ranks that share each of its layers
    pipeline_parallel: int = 1  # stages that share its layers
    context_parallel: int = 1  # groups of ranks that share the tokens of its prompts
    start_s: float = 0.0  # from its launch until it was ready, by the controller's clock; 0: unknown

    @property
    def incarnation(self) -> str:
        """Names this start of the node. It is public: the epoch cannot be computed from it."""
        return hashlib.sha256(self.epoch.to_bytes(8, "big")).hexdigest()[:16]


class RouterInfo(msgspec.Struct, frozen=True):
    """A router as its process announces it to the controller."""

    url: str  # where clients reach it
    inbox_endpoint: str  # where nodes answer it; its key is the router's in every connection
    door: str = ""  # where another router of its machine gets its listening socket
    desk: str = ""  # where its siblings ask it


class RouterQueue(msgspec.Struct, frozen=True):
    """A router's line and state, for the controller, which decides from them how many nodes there are."""

    queued: int = 0  # sequences for which no node has room
    oldest_wait_s: float = 0.0  # how long ago the first of them came
    adapters: dict[str, str] = {}  # the adapters that requests may name: their digests, by name
    accepts: bool = False  # whether it accepts clients' connections
    is_ending: bool = False  # its process was told to end: another router must take its place
    answers: int = 0  # since it started
    errors: int = 0  # answers with a status from 500 on, except 503
    # By node id: why the node gets no new requests. Paused nodes are not named.
    out_of_view: dict[str, str] = {}


class PoolReport(msgspec.Struct, frozen=True):
    """A pool as the controller knows it, for the metrics and the page of routers, which only know nodes that serve."""

    role: Role
    wanted: int
    starting: int = 0  # nodes that have not served yet and are on their way
    waiting: int = 0  # nodes for which no machine has room
    down: dict[str, str] = {}  # by node id: why a node that has served does not serve now
    left_out: dict[str, str] = {}  # by node id: why a node is not started again until an operator asks for it


class NodeSighting(msgspec.Struct, frozen=True):
    """What a router knows of a node, for a controller that gets no answer from the node."""

    node_id: str
    epoch: int
    silent_s: float  # since the router last heard the node, or else since it was told of it
    state: NodeState | None = None  # the last that the node reported
    step_age_s: float = 0.0
    detail: str = ""


def new_epoch() -> int:
    """Returns a new, unguessable number. An epoch is a secret of the cluster: a message that names it is trusted."""
    return secrets.randbits(62)


class PeerAddress(msgspec.Struct, frozen=True):
    """The other side of a KV transfer: a node, its incarnation, and where it listens."""

    node_id: str
    epoch: int
    endpoint: str
