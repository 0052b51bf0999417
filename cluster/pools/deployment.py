"""One configuration, running: every part launched, and the address that answers."""

from __future__ import annotations

import contextlib
import logging

import httpx

from tandem.cluster.config import TandemConfig
from tandem.cluster.control import Control
from tandem.cluster.events import Events
from tandem.cluster.launcher import FixModel, Hosts, Launcher, StateStore, as_it_is
from tandem.cluster.pools.controller import Controller
from tandem.cluster.tasks import Clock
from tandem.wire.errors import DeadlineExceeded

logger = logging.getLogger(__name__)

_VIEW_WAIT_S = 30.0
_HEALTH_WAIT_S = 30.0
_HEALTH_PERIOD_S = 0.05


class Deployment:
    """Made inside a running event loop. `stop` may be called at any time after that, and must be."""

    def __init__(
        self,
        config: TandemConfig,
        hosts: Hosts,
        launcher: Launcher,
        store: StateStore,
        events: Events,
        fix_model: FixModel = as_it_is,
    ) -> None:
        self.config = config
        self.controller = Controller(config, hosts, launcher, store, events, fix_model=fix_model)

    @property
    def control(self) -> Control:
        return self.controller

    @property
    def url(self) -> str:
        return self.controller.url

    @property
    def model_name(self) -> str:
        return self.config.router.model_name

    async def start(self) -> None:
        """Returns when a request that is sent now is answered, and goes to any of the nodes that serve."""
        await self.controller.start()
        await self._until_it_answers()

    async def recovered(self) -> None:
        """Returns when it answers after all, although `start` failed."""
        while True:
            await self.controller.recovered()
            with contextlib.suppress(DeadlineExceeded):
                return await self._until_it_answers()

    async def failed(self) -> str:
        """Returns when the deployment is not mended any more, with the reason."""
        return await self.controller.failed()

    async def _until_it_answers(self) -> None:
        """Routers are up and nodes are up; this waits until each of them has heard the others."""
        await self.controller.until_in_view(_VIEW_WAIT_S)
        await self._first_health()

    async def _first_health(self) -> None:
        clock = Clock()
        deadline = clock.now() + _HEALTH_WAIT_S
        last = "no answer"
        # Whether it answers, not who it is: Ray said where it listens, and its certificate may be made for another name.
        async with httpx.AsyncClient(timeout=_HEALTH_WAIT_S, trust_env=False, verify=False) as client:
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
