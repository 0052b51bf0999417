"""Who is in the cluster."""

from __future__ import annotations

import enum
import hashlib
import secrets

import msgspec

from tandem.wire.pooling import VectorModel
from tandem.wire.versions import WIRE_VERSION


class Role(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"  # does both; never sends KV away
    ENCODE = "encode"  # makes rows of images for the nodes that read prompts, and runs no requests

    @property
    def writes_answers(self) -> bool:
        return self in (Role.DECODE, Role.AGGREGATED)


# Of nodes that run requests.
ENGINE_ROLES = (Role.PREFILL, Role.DECODE, Role.AGGREGATED)


class NodeState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    FAILED = "failed"


class NodeInfo(msgspec.Struct, frozen=True, cache_hash=True):
    """A node as the controller announces it to the routers. A restarted node has a new epoch."""

    node_id: str
    role: Role
    epoch: int
    request_endpoint: (
        str  # where routers send Submit, Cancel and Ping; its key is the node's in every connection
    )
    peer_endpoint: (
        str  # where other nodes send handoff messages, or images to encode; "" when there is no connector
    )
    model: str
    max_model_len: int
    block_size: int
    content: str = (
        ""  # the digest of its configuration, weights and tokenizer: a request runs on nodes of one content
    )
    tokenizer: str = ""  # the SHA-256 of its tokenizer.json, which routers compare with theirs
    # What a request's blocks hold: its tokens' keys and values, recurrent states (so many blocks, however long it is), or both.
    keeps_tokens: bool = True
    state_blocks: int = 0
    tier_endpoint: str = (
        ""  # where other nodes ask for what its tier in host memory has; "" when they may not
    )
    mirrors: bool = False  # nodes copy the blocks of each other's running requests
    vectors: VectorModel | None = None  # None: its model makes none
    pin_seconds: float = 0.0  # for so long a turn keeps its KV there for its job's next turn; 0: it does not
    wire_version: int = WIRE_VERSION  # of the messages that it speaks: wire.versions
    tensor_parallel: int = 1  # ranks that share each of its layers
    pipeline_parallel: int = 1  # stages that share its layers
    start_s: float = 0.0  # from its launch until it was ready, by the controller's clock; 0: not known

    @property
    def incarnation(self) -> str:
        """Tells one start of the node from another. Public, and the epoch does not follow from it."""
        return hashlib.sha256(self.epoch.to_bytes(8, "big")).hexdigest()[:16]


class RouterInfo(msgspec.Struct, frozen=True):
    """A router as its process announces it to the controller."""

    url: str  # where clients reach it
    inbox_endpoint: str  # where nodes answer it; its key is the router's in every connection
    door: str = ""  # where another router of its machine gets its listening socket
    desk: str = ""  # where the others on its port ask it what it knows


class RouterQueue(msgspec.Struct, frozen=True):
    """What a router has in line, for the controller, which decides how many nodes there are; and what it serves."""

    queued: int = 0  # sequences that no node has room for
    oldest_wait_s: float = 0.0  # of these, how long ago the first came
    adapters: dict[str, str] = {}  # that requests may name: their digests, by name
    accepts: bool = False  # connections of clients
    is_ending: bool = False  # its process was told to end: another one must take its place
    answers: int = 0  # since it started
    errors: int = 0  # of these, with a status from 500 on, but for 503
    out_of_view: dict[str, str] = {}  # why nodes get no new requests, by their ids; paused ones are not named


class NodeSighting(msgspec.Struct, frozen=True):
    """What a router knows of a node, for a controller that the node does not answer."""

    node_id: str
    epoch: int
    silent_s: float  # since the router heard it, or, if it never did, was told of it
    state: NodeState | None = None  # as the node said last
    step_age_s: float = 0.0
    detail: str = ""


def new_epoch() -> int:
    """Unguessable and, for all purposes here, never the same twice. A secret of the cluster: what names it is believed."""
    return secrets.randbits(62)


class PeerAddress(msgspec.Struct, frozen=True):
    """The other side of a KV transfer: which node, which incarnation of it, and where it listens."""

    node_id: str
    epoch: int
    endpoint: str
