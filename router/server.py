"""The whole router: started, given its members, drained, left or stopped. It needs no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import logging
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tandem.api.openai.served_model import ServedModel
from tandem.api.text.chat_template import ChatTemplate
from tandem.api.text.tokenizer import Tokenizer
from tandem.api.wings import ImageReader, image_reader
from tandem.base.errors import InternalError, Unavailable
from tandem.base.tasks import Tasks
from tandem.http_server.certificate import Certificate
from tandem.http_server.door import Door, Listener, take_listeners
from tandem.http_server.serving import HttpServer, Tally, is_at, listen_beside
from tandem.http_server.settings import ServerLimits, ServerTimeouts
from tandem.router.config import RouterConfig
from tandem.router.dispatch import Dispatcher
from tandem.router.engine_metrics import EngineCollector
from tandem.router.http.app import make_app
from tandem.router.http.body import BodyBudget, KeptMemory
from tandem.router.http.errors import error_body
from tandem.router.http.services import ClusterControl, Services
from tandem.router.keys import KeyRing, load_keys
from tandem.router.links import NodeLinks
from tandem.router.metrics import RouterMetrics
from tandem.router.node_metrics import LinkCollector, NodeCollector
from tandem.router.policy.choose import Chooser
from tandem.router.pool import NodePool
from tandem.router.wings import RouterWing, wing_types
from tandem.wire.endpoints import address_of, key_of, parse_endpoint, shown
from tandem.wire.listening import ListenerProbe
from tandem.wire.nodes import NodeInfo, PoolReport
from tandem.wire.sockets import admit

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
CERTIFICATE_LOOK_S = 2.0  # how often the certificate's files are checked for changes
# How long a router whose process was told to end waits for a successor. Without one, its address refuses
# connections.
SUCCESSOR_S = 15.0
# A router that succeeds another one accepts connections when its nodes are ready, or after this time. Until
# then only the router before it accepts.
ACCEPT_S = 30.0


class RouterServer:
    """start() → set_members() as often as the cluster changes → drain() or leave() → stop(). All on one event loop."""

    def __init__(self, config: RouterConfig, control: ClusterControl | None = None) -> None:
        self._config = config
        self._control = control
        self._services: Services | None = None
        self.wings: list[RouterWing] = []
        self.http: HttpServer | None = None
        self._probe = ListenerProbe()
        self._port: int | None = None
        self._door: Door | None = None
        self._listener: Listener | None = None
        self._former: list[Listener] = []  # sockets of earlier routers at other addresses
        self._accepts_by = 0.0  # when it accepts at the latest
        self.accepts = False  # whether it accepts clients' connections
        self.is_ending = False  # whether its process was told to end
        self._told_to_leave = asyncio.Event()
        self._draining: asyncio.Task[bool] | None = None
        self._leaving: asyncio.Task[bool] | None = None
        self._stopped = False

    @property
    def services(self) -> Services:
        if self._services is None:
            raise InternalError("RouterServer is used before start()")
        return self._services

    @property
    def base_url(self) -> str:
        if self._port is None:
            raise InternalError("RouterServer has no address before start()")
        scheme = "http" if self._config.tls_certificate is None else "https"
        return f"{scheme}://{address_of(self._config.host, self._port)}"

    @property
    def door(self) -> str:
        """The name of the door where another router of this machine gets the listening socket."""
        return self._door.name if self._door is not None else ""

    async def start(self, door: str = "") -> str:
        """Starts the router and returns its base URL. `door`: the door of the router that it succeeds, which
        may listen at another address. Raises ConfigurationError when the port is taken, before it loads
        anything."""
        config = self._config
        self._former = await asyncio.to_thread(take_listeners, door) if door else []
        taken = next((each for each in self._former if is_at(each[0], config.host, config.port)), None)
        self._former = [each for each in self._former if each is not taken]
        try:
            listener, tally = taken or (self._listen(), Tally())
        except BaseException:
            self._never_accept()
            raise
        try:
            self._port = listener.getsockname()[1]
            keys = load_keys(config.api_keys, config.api_keys_file)
            tokenizer = await asyncio.to_thread(Tokenizer.from_folder, config.tokenizer_path)
            template = await asyncio.to_thread(ChatTemplate.from_folder, config.tokenizer_path, config.chat_template)
            images = image_reader(config.tokenizer_path, tokenizer, config.limits)
            self._services = self._assemble(KeyRing(keys, time.monotonic), tokenizer, template, images)
            self.wings = [wing(self._services) for wing in wing_types()]
            self._listen_to_nodes()
            self._listener, self._accepts_by = ((listener, tally), time.monotonic() + (ACCEPT_S if door else 0.0))
            await self._serve(listener, tally)
        except BaseException:
            listener.close()
            tally.close()
            await self.stop()
            raise
        logger.info(
            "the router listens at %s for clients and at %s for nodes",
            self.base_url,
            shown(self._services.links.endpoint),
        )
        return self.base_url

    def _assemble(
        self, keys: KeyRing, tokenizer: Tokenizer, template: ChatTemplate | None, images: ImageReader | None
    ) -> Services:
        config, tasks = self._config, Tasks()
        metrics = RouterMetrics(config.model_name)
        clock = time.monotonic
        # The dispatcher and its pool call each other, so the pool looks the dispatcher up when it calls.
        pool = NodePool(
            config.model_name,
            config.heartbeat,
            clock,
            on_lost=lambda node, why: dispatcher.on_node_lost(node, why),
            on_change=lambda: dispatcher.on_pool_change(),
            tokenizer=_digest(Path(config.tokenizer_path) / "tokenizer.json"),
            listener=self._probe.look,
        )
        # Before any socket is opened: it may refuse the settings.
        model = ServedModel(
            config,
            tokenizer,
            template,
            pool.view.max_model_len,
            int(time.time()),
            pool.view.vectors,
            pool.view.adapters,
            images,
        )
        links = NodeLinks(config.inbox_host)
        chooser = Chooser(pool, config.policy, config.local_prefill, config.limits.cached_blocks)
        dispatcher = Dispatcher(config, links, pool, chooser, metrics, weight_of=keys.weight_of)
        _measure(metrics, dispatcher)
        metrics.registry.register(LinkCollector(pool, links, tasks, chooser.cached))
        metrics.node_registry.register(NodeCollector(pool))
        metrics.node_registry.register(EngineCollector(pool))
        services = Services(
            config=config,
            model=model,
            dispatcher=dispatcher,
            pool=pool,
            links=links,
            keys=keys,
            metrics=metrics,
            tasks=tasks,
            bodies=BodyBudget(config.limits, partial(metrics.refusals.inc, "bodies")),
            kept=KeptMemory(config.limits.kept_bytes, partial(metrics.refusals.inc, "memory")),
            chooser=chooser,
            control=self._control,
        )
        metrics.healthy.set_function(lambda: float(services.why_unhealthy() is None))
        return services

    def _listen_to_nodes(self) -> None:
        dispatcher, tracer = self.services.dispatcher, self.services.tracer
        self.services.links.listen(
            dispatcher.on_tokens,
            dispatcher.on_status,
            tracer.on_node_trace,
            tracer.on_clock,
            dispatcher.on_holding,
            dispatcher.followed.on_recalled,
            dispatcher.on_cache_news,
            lambda node, why: self.services.pool.suspect(node.node_id, node.epoch, why),
        )

    async def _serve(self, listener: socket.socket, tally: Tally) -> None:
        services = self.services
        limits, timeouts = self._config.limits, self._config.timeouts
        tls = self._config.tls_certificate, self._config.tls_key
        self.http = HttpServer(
            make_app(services, self.wings),
            ServerLimits(limits.header_bytes, limits.connections),
            ServerTimeouts(timeouts.header, timeouts.body, timeouts.keep_alive, timeouts.slow_reader),
            error_body,
            services.metrics.slow_readers_cut.inc,
            Certificate(tls[0], tls[1]) if tls[0] is not None and tls[1] is not None else None,
        )
        for wing in self.wings:
            await wing.start()
        self._door = Door(listener, tally, self._former)
        self._accept_if_time(self.http)
        services.tasks.keep("heartbeat", self._heartbeat)
        if self._config.tls_certificate is not None:
            services.tasks.keep("certificate", self._renew_certificate)

    def _accept_if_time(self, http: HttpServer) -> None:
        if self._listener is not None and (time.monotonic() >= self._accepts_by or not self.services.why_unhealthy()):
            self.accepts = True
            forget = self._door.forget_former if self._door is not None else lambda: None
            http.begin(*self._listener, self._former, forget)

    def _never_accept(self) -> None:
        """Gives up its sockets unless it accepts already: the router that they came from accepts."""
        if not self.accepts:
            for each in self._former if self._listener is None else [self._listener, *self._former]:
                for part in each:
                    part.close()
            self._listener, self._former = None, []

    def _listen(self) -> socket.socket:
        host, port = self._config.host, self._config.port
        return listen_beside([there for there, _ in self._former], host, port)

    async def _heartbeat(self) -> None:
        """Pings every node, and checks for silent nodes three times per ping interval."""
        services, interval = self.services, self._config.heartbeat.ping_interval
        while True:
            for member in services.pool.members:
                services.links.ping(member.info)
            services.kept.measure()
            services.dispatcher.recent.sample(services.dispatcher.running, services.dispatcher.queued)
            for _ in range(3):
                await asyncio.sleep(interval / 3)
                services.dispatcher.check_nodes()
                if self.http is not None and not self.accepts:
                    self._accept_if_time(self.http)

    async def _renew_certificate(self) -> None:
        while self.http is not None:
            await asyncio.sleep(CERTIFICATE_LOOK_S)
            self.http.look_at_certificate()

    def forget_prefixes(self, node_ids: Iterable[str]) -> None:
        """These nodes have emptied their caches."""
        for node_id in node_ids:
            self.services.dispatcher.forget_prompts(node_id)

    def set_siblings(self, desks: Mapping[str, str]) -> None:
        """Sets the desks of all router processes on this port by name, this one's included."""
        self.services.siblings.tell(desks)

    def set_members(
        self, infos: list[NodeInfo], paused: Iterable[str] = (), reports: Sequence[PoolReport] = ()
    ) -> None:
        """Sets the whole membership. A node that is missing from it is lost; one with a new epoch is a new
        node. `paused`: the names of pools and nodes that get no new requests. `reports`: what the controller
        knows of the pools."""
        services = self.services
        services.pool.reports = reports
        services.dispatcher.recent.pools_are(reports)
        services.pool.set_paused(paused)
        admit(key_of(info.request_endpoint) for info in infos)
        came, went = services.pool.set_members(infos)
        for info in went:
            logger.info("node %s left", info.node_id)
            services.dispatcher.on_node_left(info)
            services.tracer.on_node_left(info.node_id, info.epoch)
        for info in came:
            logger.info("node %s (%s, %s) joined", info.node_id, info.role, shown(info.request_endpoint))
            if _is_loopback(services.links.endpoint) and not _is_loopback(info.request_endpoint):
                logger.error(
                    "node %s is at %s and is told to answer at %s, which it cannot reach: "
                    "start the router on a Ray cluster, which knows its machine's address",
                    info.node_id, shown(info.request_endpoint), shown(services.links.endpoint),
                )  # fmt: skip
            services.dispatcher.on_node_joined(info)

    async def drain(self, timeout_s: float) -> bool:
        """Takes no new requests, and waits for those that run or are queued. After `timeout_s` it fails the
        rest and returns False. A second call waits for the first: nothing runs any more when that has failed
        the rest, and not because it was finished."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(timeout_s), name="drain")
        return await asyncio.shield(self._draining)

    async def _drain(self, timeout_s: float) -> bool:
        services = self.services
        services.draining = True
        deadline = time.monotonic() + timeout_s
        for wing in self.wings:
            await wing.ending()
        idle = await services.dispatcher.wait_idle(deadline)
        if not idle:
            services.dispatcher.fail_all(Unavailable("the router is shutting down"))
        return idle

    async def leave(self, timeout_s: float) -> bool:
        """Leaves the listening socket to another router: takes no new connections, and finishes what runs and
        what still arrives on open connections. After `timeout_s` it fails the rest and returns False. A
        second call waits for the first."""
        self._told_to_leave.set()
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(timeout_s), name="leave")
        return await asyncio.shield(self._leaving)

    @property
    def longest_s(self) -> float:
        """Within how many seconds every present request has ended."""
        return self._config.timeouts.total

    async def until_succeeded(self) -> None:
        """Waits, at most SUCCESSOR_S, until the controller asks it to leave because another router has its
        listening socket. It may have no controller."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._told_to_leave.wait(), SUCCESSOR_S)

    async def _leave(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        self._never_accept()
        if self._door is not None:
            self._door.close()
        for wing in self.wings:
            await wing.ending()
        is_quiet = self.http is None or await self.http.leave(deadline)
        # Background requests have no connection, so they are waited for apart.
        is_idle = await self.services.dispatcher.wait_idle(deadline)
        for wing in self.wings:
            await wing.leave()
        if not (is_quiet and is_idle):
            self.services.draining = True
            self.services.dispatcher.fail_all(Unavailable("the router is shutting down"))
        return is_quiet and is_idle

    async def stop(self) -> None:
        """Cancels what still runs, on its nodes too, and closes everything. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        services = self._services
        if services is not None:
            services.draining = True
            services.dispatcher.fail_all(Unavailable("the router is stopping"))
            await services.tasks.stop()
        self._never_accept()
        if self._door is not None:
            self._door.close()
        if self.http is not None:
            await self.http.end(STOP_TIMEOUT_S)
        if services is not None:
            await services.links.close()
            for wing in self.wings:
                await wing.close()
        self._probe.close()


def _measure(metrics: RouterMetrics, dispatcher: Dispatcher) -> None:
    metrics.running.set_function(lambda: dispatcher.running)
    metrics.waiting.set_function(lambda: dispatcher.queued)
    metrics.places.set_function(lambda: dispatcher.admission.capacity)
    metrics.places_held.set_function(lambda: dispatcher.admission.held)
    metrics.queue_limit.set(dispatcher.config.limits.queued)
    metrics.oldest_wait.set_function(dispatcher.admission.oldest_wait_s)


def _is_loopback(endpoint: str) -> bool:
    parsed = parse_endpoint(endpoint)
    return parsed is not None and ipaddress.ip_address(parsed.host).is_loopback


def _digest(file: Path) -> str:
    """The file's SHA-256, as nodes announce that of theirs; "" without a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
