"""One configuration, running on this machine: the model found, every part launched, and the address that answers."""

from __future__ import annotations

import logging

import httpx
import msgspec

from cluster.clock import Clock
from cluster.config import TandemConfig
from cluster.controller import Controller
from cluster.events import Events
from cluster.launcher import Launcher
from cluster.local_hosts import ThisMachine
from cluster.model_store import Model
from cluster.placement import Machine, place_nodes
from cluster.state import MemoryStore
from wire.errors import DeadlineExceeded

logger = logging.getLogger(__name__)

LOCAL_HOST = "127.0.0.1"  # where routers and nodes of one machine reach each other
_HEALTH_WAIT_S = 30.0
_HEALTH_PERIOD_S = 0.05


def with_model(config: TandemConfig, model: Model) -> TandemConfig:
    """The configuration with what follows from the model filled in."""
    replace = msgspec.structs.replace
    name = config.model.served_name or model.served_name
    return replace(
        config,
        model=replace(config.model, path=model.path, served_name=name),
        router=replace(config.router, tokenizer_path=model.path, model_name=name),
    )


class Deployment:
    """Made inside a running event loop. `stop` may be called at any time after that, and must be."""

    def __init__(self, config: TandemConfig, machine: Machine, launcher: Launcher, events: Events) -> None:
        self.config = config
        self._events = events
        place_nodes(config, machine)  # raises ConfigurationError when they do not fit
        hosts = ThisMachine(machine, LOCAL_HOST)
        self.controller = Controller(config, hosts, launcher, MemoryStore(), events)

    @property
    def url(self) -> str:
        return self.controller.url

    @property
    def model_name(self) -> str:
        return self.config.router.model_name

    async def start(self) -> None:
        """Returns when a request that is sent now is answered."""
        await self.controller.start()
        await self._first_health()

    async def _first_health(self) -> None:
        """The router is up and the nodes are up; this waits until it has heard of them."""
        clock = Clock()
        deadline = clock.now() + _HEALTH_WAIT_S
        last = "no answer"
        async with httpx.AsyncClient(timeout=_HEALTH_WAIT_S, trust_env=False) as client:
            while clock.now() < deadline:
                try:
                    response = await client.get(f"{self.url}/health")
                    if response.status_code == httpx.codes.OK:
                        return
                    last = f"{response.status_code} {response.text}"
                except httpx.HTTPError as error:
                    last = str(error)
                await clock.sleep(_HEALTH_PERIOD_S)
        raise DeadlineExceeded(f"everything has started, but {self.url}/health does not say so: {last}")

    async def drain(self) -> bool:
        return await self.controller.drain()

    async def stop(self) -> None:
        await self.controller.stop()
