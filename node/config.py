"""One node's configuration. The cluster builds it and sends it to the node's process as msgspec bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from tandem.base.logs import LogsConfig
from tandem.base.settings import AtLeastOne, Seconds, about, fixed
from tandem.engine.config import EngineConfig
from tandem.kvtransfer.config import TransferConfig
from tandem.wire.nodes import Role


class NodeTimeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a node waits for other processes."""

    status_period_s: Annotated[
        Seconds, fixed("between a node's reports of itself to routers, which decide by them")
    ] = 0.25
    router_silence_s: Annotated[
        Seconds,
        fixed(
            "after so long without a router's messages a node gives up its requests; a router sends one every half second"
        ),
    ] = 10.0
    drain_s: Annotated[Seconds, about("for the requests of a node that drains to finish")] = 60.0
    rank_silence_s: Annotated[
        Seconds, fixed("a node of several ranks ends when one of them has not run, or not taken a step, for this long")
    ] = 2.0
    grammar_s: Annotated[
        Seconds, fixed("for one answer's grammar to be compiled; one that takes longer would hold up others'")
    ] = 10.0
    encoder_s: Annotated[
        Seconds, fixed("for an encoder node's rows of an image; then the node that reads the prompt encodes it itself")
    ] = 5.0


class AnswersConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on background answers, which the node that decodes them keeps."""

    kept_bytes: Annotated[
        AtLeastOne,
        fixed(
            "bytes of background answers that one node keeps; the oldest make room. While so many are being made, further ones are refused"
        ),
    ] = 64 << 20
    kept_s: Annotated[
        Seconds,
        fixed("seconds after its end for which any router finds a background answer, as long as OpenAI keeps one"),
    ] = 600.0


class OtherMachine(msgspec.Struct, frozen=True):
    """A machine, besides rank 0's, that runs some of a node's ranks."""

    host: str  # its address
    cores: list[int] = []  # as `NodeConfig.cores`
    device: str = "auto"  # the device of the first rank there


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node_id: str
    role: Role
    host: str = "127.0.0.1"  # the address where routers and peers reach this node
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig | None = None  # None: this node neither sends nor receives KV
    timeouts: NodeTimeouts = NodeTimeouts()
    answers: AnswersConfig = AnswersConfig()
    logs: LogsConfig = LogsConfig()
    tensor_parallel: AtLeastOne = 1  # ranks per stage: each computes a part of every layer of the stage
    pipeline_parallel: AtLeastOne = 1  # stages: each computes some of the layers
    # Groups of `tensor_parallel` ranks, each with the whole model: each computes some of a prompt's tokens
    context_parallel: AtLeastOne = 1
    # The environment of the node's process, set before it loads a library. It stands here so that a change of it makes another
    # configuration, which a controller notices.
    env: dict[str, str] = {}
    # The cores that the computing threads are bound to. Empty: any core. A CPU quota (control group) overrides this.
    cores: list[int] = []
    # The machines besides rank 0's; each runs as many ranks as rank 0's machine.
    others: list[OtherMachine] = []

    @property
    def machines(self) -> int:
        return 1 + len(self.others)

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel


def refused_with_ranks(engine: EngineConfig, stages: int, contexts: int) -> Iterator[str]:
    """Yields each setting that a node with several ranks does not support, as a phrase that follows "but"."""
    if contexts > 1 and stages > 1:
        yield "each of its ranks has only some of the layers, and context_parallel shares tokens among ranks that have all: set one of the two to 1"
    if contexts > 1 and engine.model.hidden_states_folder:
        yield "model.hidden_states_folder asks for tokens that other ranks compute: leave it out"
    if stages > 1 and engine.model.hidden_states_folder:
        yield "model.hidden_states_folder asks for layers that other stages compute: leave it out"
    if engine.scheduler.max_loras:
        yield "scheduler.max_loras asks for adapters, whose matrices are not cut: set it to 0"
    if engine.model.draft:
        yield "model.draft would be computed by one rank alone: leave it out"


def refused_with_caches_apart(config: NodeConfig) -> Iterator[str]:
    """Yields each setting that would copy rank 0's KV only, and so cannot serve where each rank keeps its heads in its own memory,
    as on GPUs."""
    for name in ("remote", "mirror"):
        if getattr(config.engine.cache, name):
            yield f"each rank keeps its KV on a GPU of its own, and cache.{name} would copy one rank's: leave it out"
