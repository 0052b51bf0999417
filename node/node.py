"""A node of any role in its process, from start to stop.

`EngineNode` and the encoder node are its subclasses. The caller passes in how to open the channel to routers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from tandem.base.errors import Unavailable
from tandem.base.progress import Report
from tandem.engine.config import ModelConfig
from tandem.engine.model.runner import ModelRunner
from tandem.engine.scheduling.state import SchedulerStats
from tandem.node.config import NodeConfig
from tandem.node.lifecycle import NodeLifecycle
from tandem.node.routers import RouterLine
from tandem.node.status import gauges
from tandem.wire.nodes import NodeInfo, NodeState, Role, new_epoch
from tandem.wire.requests import NO_COUNTERS, NodeStatus, ToNode


class NodeChannel(RouterLine, Protocol):
    """The socket where routers reach this node, and the lines by which it answers. `wire.lines.NumberedChannel` implements it."""

    @property
    def endpoint(self) -> str: ...
    def listen(
        self, on_message: Callable[[ToNode], None], *, begun: Callable[[str], None], replaced: Callable[[str], None]
    ) -> None: ...
    def close(self) -> None: ...


class OpenChannel(Protocol):
    """Binds to the host's address. The arguments are those of `wire.lines.NumberedChannel`."""

    def __call__(self, host: str, epoch: int, *, name: str) -> NodeChannel: ...


class LoadSource(NamedTuple):
    """What a node starts with."""

    model: ModelConfig  # with the paths of this machine
    runner: ModelRunner | None  # a loaded model that another node has released
    progress: Report | None
    keepers: Sequence[str]  # endpoints of the rank keepers on the configuration's `others`


ServiceT = TypeVar("ServiceT", bound=NodeLifecycle)


class Node(Generic[ServiceT]):
    """`start` blocks while the model loads; other threads may call the other methods meanwhile."""

    def __init__(self, config: NodeConfig, role: Role, open_channel: OpenChannel) -> None:
        self.config = config
        self.role = role
        self.epoch = new_epoch()
        self._open_channel = open_channel
        self._channel: NodeChannel | None = None
        self._service: ServiceT | None = None  # None until the node serves

    def start(
        self,
        progress: Report | None = None,
        runner: ModelRunner | None = None,
        *,
        model_folder: str | None = None,
        adapters: Mapping[str, str] | None = None,
        draft_folder: str | None = None,
        keepers: Sequence[str] = (),
    ) -> NodeInfo:
        """Loads the model and begins to serve. With a `runner`, which another node of this process has released, it loads nothing.

        `model_folder`, `adapters` and `draft_folder` say where the model, each adapter and the draft model are on this machine, in the
        place of the configuration's paths. `keepers`: see `LoadSource`."""
        found = {
            "path": model_folder,
            "adapters": dict(adapters) if adapters is not None else None,
            "draft": draft_folder,
        }
        here = {name: value for name, value in found.items() if value is not None}
        model = msgspec.structs.replace(self.config.engine.model, **here)
        return self._start(LoadSource(model, runner, progress, keepers))

    def _start(self, loading: LoadSource) -> NodeInfo:
        raise NotImplementedError

    def _serve(self, make_service: Callable[[NodeChannel], ServiceT]) -> NodeChannel:
        """Opens the channel to routers, and serves them."""
        name = f"{self.config.node_id}-inbox"
        self._channel = channel = self._open_channel(self.config.host, self.epoch, name=name)
        service = make_service(channel)
        service.start()
        self._service = service
        channel.listen(service.receive, begun=service.line_begun, replaced=service.router_replaced)
        return channel

    def _serving(self) -> ServiceT:
        if self._service is None:
            raise Unavailable(f"{self.config.node_id} has not started")
        return self._service

    def status(self) -> NodeStatus:
        if self._service is not None:
            return self._service.status()
        return NodeStatus(
            self.config.node_id,
            self.role,
            self.epoch,
            NodeState.STARTING,
            transfers=0,
            step_age_s=0.0,
            counters=NO_COUNTERS,
            **gauges(SchedulerStats(), 0.0),
        )

    def routers_heard(self) -> list[str]:
        return self._service.routers_heard() if self._service is not None else []

    def drain(self, timeout_s: float) -> bool:
        return self._service.drain(timeout_s) if self._service is not None else True

    def reset_cache(self, timeout_s: float) -> bool:
        """As its service does. True for a node that has not started: its cache is empty."""
        return self._service.reset_cache(timeout_s) if self._service is not None else True

    def set_adapters(self, folders: Mapping[str, str], kept: Collection[str], timeout_s: float) -> dict[str, str]:
        """Serves the adapters in `folders` (by name) and the served ones named in `kept` to new requests. Returns the digests of all, by
        name. Raises ConfigurationError, and changes nothing, if an adapter cannot be served; Unavailable if the node has not started;
        DeadlineExceeded if its step takes longer than `timeout_s`: then the change is made after that step."""
        raise NotImplementedError

    def release(self) -> ModelRunner:
        """Stops the node and returns its loaded model, for the node that goes on with it. Call it only after a completed drain: a peer
        may still write into the blocks of a request that has not ended."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stops the threads and closes everything. Idempotent. Live work gets no answer: drain first."""
        if self._service is not None:
            self._service.stop()
        self._close()
        if self._channel is not None:
            self._channel.close()

    def _close(self) -> None:
        """Closes what the role has besides its service, before the channel is closed."""
