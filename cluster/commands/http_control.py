"""A running cluster through one of its routers, for commands with `--url`. Implements `cluster.admin.OperatedCluster`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import httpx
import msgspec

from tandem.base.errors import InternalError
from tandem.base.logs import ClusterLogs, LogsQuery
from tandem.base.settings import without_defaults
from tandem.cluster.admin import (
    AdaptersAction,
    ApplyAction,
    DrainAction,
    EvacuateAction,
    PauseAction,
    ResetCacheAction,
    ResumeAction,
    RoleAction,
    ScaleAction,
)
from tandem.cluster.api_client import ANSWER_S, ApiClient
from tandem.cluster.config import ClusterTimeouts, TandemConfig
from tandem.cluster.control import AppliedChange, ClusterView
from tandem.wire.nodes import Role

# How long a router waits for the controller's answer, and then some.
_DECIDE_S = 45.0

T = TypeVar("T")


class HttpControl:
    def __init__(self, url: str, key: str | None, transport: httpx.BaseTransport | None = None) -> None:
        self._api = ApiClient(url, key, transport)

    def close(self) -> None:
        self._api.close()

    async def view(self) -> ClusterView:
        return await self._act("view", None, ClusterView, _DECIDE_S)

    async def timeouts(self) -> ClusterTimeouts:
        return await self._act("timeouts", None, ClusterTimeouts, _DECIDE_S)

    async def scale(self, wanted: dict[Role, int]) -> list[str]:
        answer = await self._act("scale", ScaleAction(wanted), dict[str, list[str]], _DECIDE_S)
        return answer["changes"]

    async def drain_node(self, node_id: str, timeout_s: float) -> bool:
        asked = DrainAction(node_id, timeout_s)
        return (await self._act("drain", asked, dict[str, bool], timeout_s + _DECIDE_S))["finished"]

    async def evacuate(self, address: str, timeout_s: float) -> dict[str, bool]:
        asked = EvacuateAction(address, timeout_s)
        answer = await self._act("evacuate", asked, dict[str, dict[str, bool]], timeout_s + _DECIDE_S)
        return answer["finished"]

    async def change_role(self, node_id: str, role: Role, timeout_s: float) -> None:
        await self._act("role", RoleAction(node_id, role), dict[str, Any], timeout_s + _DECIDE_S)

    async def pause(self, names: list[str]) -> list[str]:
        return (await self._act("pause", PauseAction(names), dict[str, list[str]], _DECIDE_S))["paused"]

    async def resume(self, names: list[str]) -> list[str]:
        return (await self._act("resume", ResumeAction(names), dict[str, list[str]], _DECIDE_S))["paused"]

    async def reset_cache(self, names: list[str]) -> list[str]:
        asked = ResetCacheAction(names)
        return (await self._act("reset_prefix_cache", asked, dict[str, list[str]], _DECIDE_S))["reset"]

    async def adapters(
        self, load: Mapping[str, str], unload: Sequence[str], timeout_s: float
    ) -> dict[str, str]:
        asked = AdaptersAction(dict(load), list(unload))
        answer = await self._act("adapters", asked, dict[str, dict[str, str]], timeout_s + _DECIDE_S)
        return answer["adapters"]

    async def apply(self, config: TandemConfig, dry_run: bool) -> AppliedChange:
        return await self._act("apply", ApplyAction(config, dry_run), AppliedChange, _DECIDE_S)

    async def go_back(self) -> None:
        await self._act("go_back", None, dict[str, Any], _DECIDE_S)

    async def logs(self, query: LogsQuery) -> ClusterLogs:
        return await self._act("logs", query, ClusterLogs, _DECIDE_S)

    async def _act(self, action: str, asked: msgspec.Struct | None, kind: type[T], timeout_s: float) -> T:
        body = msgspec.json.encode(without_defaults(asked) if asked is not None else {})
        timeout = httpx.Timeout(ANSWER_S, read=timeout_s)
        answer = await asyncio.to_thread(self._api.post, f"/admin/{action}", body, timeout)
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.DecodeError as error:
            raise InternalError(
                f"{self._api.url}/admin/{action} did not answer like a Tandem router: {error}"
            ) from error
