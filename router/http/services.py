"""What the routes work with."""

from __future__ import annotations

import dataclasses

from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.http.body_budget import BodyBudget
from router.keys import KeyRing
from router.links import NodeLinks
from router.metrics import RouterMetrics
from router.openai.plan import ServedModel
from router.pool import Pool
from router.supervision import Supervisor
from router.tracing.export import OtlpExporter
from router.tracing.traces import Traces


@dataclasses.dataclass
class Services:
    config: RouterConfig
    model: ServedModel
    dispatcher: Dispatcher
    pool: Pool
    links: NodeLinks
    keys: KeyRing
    metrics: RouterMetrics
    supervisor: Supervisor
    bodies: BodyBudget
    traces: Traces
    exporter: OtlpExporter | None
    draining: bool = False

    def why_unhealthy(self) -> str | None:
        """Why a new request would be refused, or None."""
        if self.draining:
            return "the router is draining"
        if self.supervisor.failed:
            return "; ".join(
                f"task {name} died: {why}" for name, why in sorted(self.supervisor.failed.items())
            )
        if not self.pool.snapshot().decode:
            return self.dispatcher.why_unavailable()
        return None
