"""What the handlers work with, and whether a new request would be refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from prometheus_client.registry import Collector

from tandem.api.openai.served_model import ServedModel
from tandem.base.tasks import Tasks
from tandem.router.config import RouterConfig
from tandem.router.dispatch import Dispatcher
from tandem.router.http.body import BodyBudget, KeptMemory
from tandem.router.http.errors import RouterDraining
from tandem.router.http.exchange import ErrorForm, HttpExchange
from tandem.router.http.hosts import is_loopback
from tandem.router.keys import KeyRing
from tandem.router.links import NodeLinks
from tandem.router.metrics import RouterMetrics
from tandem.router.page_state import PageState
from tandem.router.policy.choose import Chooser
from tandem.router.pool import NodePool
from tandem.router.promises import AnswerSigner, FirstTokenQuoter
from tandem.router.siblings import Siblings
from tandem.router.tracer import RequestTracer


class ClusterControl(Protocol):
    """The connection to the controller of the router's cluster."""

    async def act(self, action: str, body: bytes) -> bytes:
        """Does an action. Body and result are JSON. Raises errors of `base.errors`, also for an unknown
        action."""


async def _own_page(own: PageState) -> PageState:
    return own


async def _own_figures() -> Collector | None:
    return None


@dataclasses.dataclass
class Services:
    """The parts of the router that the handlers use."""

    config: RouterConfig
    model: ServedModel
    dispatcher: Dispatcher
    pool: NodePool
    links: NodeLinks
    keys: KeyRing
    metrics: RouterMetrics
    chooser: Chooser
    tasks: Tasks
    bodies: BodyBudget
    kept: KeptMemory
    tracer: RequestTracer = dataclasses.field(default_factory=RequestTracer)
    signer: AnswerSigner = dataclasses.field(default_factory=AnswerSigner)
    quoter: FirstTokenQuoter = dataclasses.field(default_factory=FirstTokenQuoter)
    # The other processes on the port. The page and the metrics are of all of them: `all_figures` returns None
    # when this process's own are all.
    siblings: Siblings = dataclasses.field(default_factory=Siblings)
    add_pages: Callable[[PageState], Awaitable[PageState]] = _own_page
    all_figures: Callable[[], Awaitable[Collector | None]] = _own_figures
    # By path: what answers requests that are posted there.
    handlers: Mapping[str, Callable[[Services, HttpExchange], Awaitable[None]]] = dataclasses.field(
        default_factory=dict
    )
    # How errors are written, by the beginning of a path, where an API has its own way.
    error_forms: Sequence[tuple[str, ErrorForm]] = ()
    control: ClusterControl | None = None  # None when the router belongs to no cluster
    draining: bool = False

    @property
    def tells_decisions(self) -> bool:
        """Whether the controller's decisions are shown: to operators, and without keys to this machine's users."""
        return self.control is not None and (self.keys.required or is_loopback(self.config.host))

    def refuse_when_draining(self) -> None:
        if self.draining:
            raise RouterDraining("this router is shutting down and takes no new requests")

    def why_unhealthy(self) -> str | None:
        """Returns why a new request would be refused, or None."""
        if self.draining:
            return "the router is draining"
        if self.tasks.down:
            return "; ".join(f"task {name} died: {why}" for name, why in sorted(self.tasks.down.items()))
        if not self.pool.view.decode_count:
            return self.dispatcher.why_unavailable()
        return None
