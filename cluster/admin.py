"""What operators may do to a running cluster, as JSON. One table serves both ways in: a router's `/admin`, which commands with `--url`
call, and the commands that reach the controller through Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from tandem.base.errors import ConfigurationError, InvalidRequest, RequestError
from tandem.base.logs import ClusterLogs, LogsQuery
from tandem.base.settings import LONGEST_S
from tandem.cluster.config import ClusterTimeouts, NodeCount, TandemConfig
from tandem.cluster.control import DRAIN_S, AppliedChange, ClusterView
from tandem.wire.nodes import Role

# For actions that make nodes load. The controller ends a process without progress (`timeouts.start_s`); this limit is for a lost answer.
LOADING_S = 24 * 3600.0


class UnknownAction(RequestError):
    code = "not_found"
    http_status = 404


class OperatedCluster(Protocol):
    """A running cluster as commands use it, through Ray or through a router. Methods raise errors of `base.errors` only; they are
    documented in `cluster.control.Control`."""

    async def view(self) -> ClusterView: ...
    async def timeouts(self) -> ClusterTimeouts: ...
    async def scale(self, wanted: dict[Role, int]) -> list[str]: ...
    async def drain_node(self, node_id: str, timeout_s: float) -> bool: ...
    async def evacuate(self, address: str, timeout_s: float) -> dict[str, bool]: ...
    async def change_role(self, node_id: str, role: Role, timeout_s: float) -> None: ...
    async def pause(self, names: list[str]) -> list[str]: ...
    async def resume(self, names: list[str]) -> list[str]: ...
    async def reset_cache(self, names: list[str]) -> list[str]: ...
    async def adapters(
        self, load: Mapping[str, str], unload: Sequence[str], timeout_s: float
    ) -> dict[str, str]: ...
    async def apply(self, config: TandemConfig, dry_run: bool) -> AppliedChange: ...
    async def go_back(self) -> None: ...
    async def logs(self, query: LogsQuery) -> ClusterLogs: ...


class ViewAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Returns the controller's view of the cluster."""

    async def act(self, cluster: OperatedCluster) -> Any:
        return await cluster.view()


class TimeoutsAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Returns the cluster's time-outs."""

    async def act(self, cluster: OperatedCluster) -> Any:
        return await cluster.timeouts()


class ScaleAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pools: dict[Role, NodeCount]

    async def act(self, cluster: OperatedCluster) -> Any:
        return {"changes": await cluster.scale(self.pools)}


class DrainAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: str
    timeout_s: Annotated[float, Meta(ge=0, le=LONGEST_S)] = DRAIN_S

    async def act(self, cluster: OperatedCluster) -> Any:
        return {"finished": await cluster.drain_node(self.node, self.timeout_s)}


class EvacuateAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machine: str
    timeout_s: Annotated[float, Meta(ge=0, le=LONGEST_S)] = DRAIN_S

    async def act(self, cluster: OperatedCluster) -> Any:
        return {"finished": await cluster.evacuate(self.machine, self.timeout_s)}


class RoleAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: str
    role: Role

    async def act(self, cluster: OperatedCluster) -> Any:
        await cluster.change_role(self.node, self.role, LOADING_S)
        return {"node": self.node, "role": self.role}


class PauseAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`names` are pools and nodes; none means all pools."""

    names: list[str] = []

    async def act(self, cluster: OperatedCluster) -> Any:
        return {"paused": await cluster.pause(self.names)}


class ResumeAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    names: list[str] = []

    async def act(self, cluster: OperatedCluster) -> Any:
        return {"paused": await cluster.resume(self.names)}


class ResetCacheAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    names: list[str] = []

    async def act(self, cluster: OperatedCluster) -> Any:
        return {"reset": await cluster.reset_cache(self.names)}


class AdaptersAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Loads and unloads LoRA adapters. `load` maps names to locations: a folder's absolute path, or owner/name on the hub. Without either
    it returns the adapters that are loaded."""

    load: dict[str, str] = {}
    unload: list[str] = []

    async def act(self, cluster: OperatedCluster) -> Any:
        return {"adapters": await cluster.adapters(self.load, self.unload, LOADING_S)}


class ApplyAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`config` has every setting that is not the default, as tandem.yaml does, and the settings that follow from the model."""

    config: TandemConfig
    dry_run: bool = False

    async def act(self, cluster: OperatedCluster) -> Any:
        return await cluster.apply(self.config, self.dry_run)


class GoBackAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Takes back the rollout that is under way."""

    async def act(self, cluster: OperatedCluster) -> Any:
        await cluster.go_back()
        return {}


class LogsAction(LogsQuery, frozen=True, forbid_unknown_fields=True):
    """Returns log lines that the processes still keep."""

    async def act(self, cluster: OperatedCluster) -> Any:
        return await cluster.logs(LogsQuery(self.names, self.after, self.last))


AdminAction = (
    ViewAction
    | TimeoutsAction
    | ScaleAction
    | DrainAction
    | EvacuateAction
    | RoleAction
    | PauseAction
    | ResumeAction
    | ResetCacheAction
    | AdaptersAction
    | ApplyAction
    | GoBackAction
    | LogsAction
)

ACTIONS: dict[str, type[AdminAction]] = {
    "view": ViewAction,
    "timeouts": TimeoutsAction,
    "scale": ScaleAction,
    "drain": DrainAction,
    "evacuate": EvacuateAction,
    "role": RoleAction,
    "pause": PauseAction,
    "resume": ResumeAction,
    "reset_prefix_cache": ResetCacheAction,
    "adapters": AdaptersAction,
    "apply": ApplyAction,
    "go_back": GoBackAction,
    "logs": LogsAction,
}


async def act(cluster: OperatedCluster, action: str, body: bytes) -> bytes:
    """Carries out one action, JSON in and out. What the cluster refuses as a configuration error is an InvalidRequest here."""
    if action not in ACTIONS:
        raise UnknownAction(f"there is no action {action[:100]!r}: it must be one of {', '.join(ACTIONS)}")
    try:
        asked = msgspec.json.decode(body or b"{}", type=ACTIONS[action])
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{action}: {error}") from error
    try:
        return msgspec.json.encode(await asked.act(cluster))
    except ConfigurationError as error:
        raise InvalidRequest(str(error)) from error
