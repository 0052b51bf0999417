"""Sends traces to OpenTelemetry's collector. A collector that is slow or away costs traces, never requests."""

from __future__ import annotations

import asyncio
import logging

import httpx
import msgspec

from tandem.router.config import TracingConfig
from tandem.router.metrics import RouterMetrics
from tandem.router.tracing.otlp import export_request
from tandem.router.tracing.record import TraceRecord

logger = logging.getLogger(__name__)

QUEUED = 256
AT_ONCE = 32
TIMEOUT_S = 10.0
ATTEMPTS = 4
FIRST_PAUSE_S = 0.5  # doubles
CLOSE_WITHIN_S = 2.0
# What the protocol calls retryable.
_LATER = frozenset({429, 502, 503, 504})


class _Refused(Exception):
    """The collector will not take it, however often it is asked."""


class OtlpExporter:
    """`run` is to be supervised; `offer` never waits."""

    def __init__(
        self,
        config: TracingConfig,
        metrics: RouterMetrics,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._transport = transport
        base = config.otlp_endpoint.rstrip("/")
        self._url = base if base.endswith("/v1/traces") else f"{base}/v1/traces"
        self._queue: asyncio.Queue[TraceRecord] = asyncio.Queue(QUEUED)
        self._complained = False

    def offer(self, record: TraceRecord) -> None:
        try:
            self._queue.put_nowait(record)
        except asyncio.QueueFull:
            self._metrics.traces_dropped.labels(reason="queue_full").inc()

    async def run(self) -> None:
        async with httpx.AsyncClient(
            transport=self._transport, timeout=TIMEOUT_S, trust_env=False, headers=self._config.otlp_headers
        ) as client:
            while True:
                records = [await self._queue.get()]
                while len(records) < AT_ONCE and not self._queue.empty():
                    records.append(self._queue.get_nowait())
                try:
                    await self._deliver(client, records)
                finally:
                    for _ in records:
                        self._queue.task_done()

    async def _deliver(self, client: httpx.AsyncClient, records: list[TraceRecord]) -> None:
        body = msgspec.json.encode(export_request(records, self._config.service_name))
        why = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                await self._post(client, body)
            except _Refused as error:
                self._drop(len(records), "refused", str(error))
                return
            except httpx.HTTPError as error:
                why = f"{type(error).__name__}: {error}"
                continue
            self._metrics.traces_exported.inc(len(records))
            self._complained = False
            return
        self._drop(len(records), "unreachable", why)

    async def _post(self, client: httpx.AsyncClient, body: bytes) -> None:
        response = await client.post(self._url, content=body, headers={"content-type": "application/json"})
        if response.status_code in _LATER:
            response.raise_for_status()
        if not response.is_success:
            raise _Refused(f"{response.status_code} {response.text[:200]}")

    def _drop(self, count: int, reason: str, why: str) -> None:
        self._metrics.traces_dropped.labels(reason=reason).inc(count)
        if not self._complained:  # once, until something arrives again: a collector may be away for days
            self._complained = True
            logger.warning("%s takes no traces: %s", self._url, why)

    async def close(self) -> None:
        """What is queued may still leave, for a moment. `run` must still be running."""
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                await self._queue.join()
        except TimeoutError:
            self._metrics.traces_dropped.labels(reason="shutdown").inc(self._queue.qsize())
