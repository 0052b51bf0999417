"""One configuration, running: the controller, and the URL of its routers."""

from __future__ import annotations

import contextlib

import httpx

from tandem.base.errors import DeadlineExceeded
from tandem.cluster.orders import Control
from tandem.cluster.pools.controller import Controller
from tandem.cluster.tasks import Clock

_VIEW_WAIT_S = 30.0
_HEALTH_WAIT_S = 30.0
_HEALTH_PERIOD_S = 0.05


class Deployment(Controller):
    """A controller that has started when its routers answer. Its owner may call `stop` at any time, and must call it once."""

    @property
    def control(self) -> Control:
        return self

    @property
    def model_name(self) -> str:
        return self._config.router.model_name

    async def start(self) -> None:
        """Returns when a request that is sent now is answered and can reach every node that serves."""
        await super().start()
        await self._until_it_answers()

    async def recovered(self) -> None:
        """Returns when the deployment answers, after `start` has failed."""
        while True:
            await super().recovered()
            with contextlib.suppress(DeadlineExceeded):
                return await self._until_it_answers()

    async def _until_it_answers(self) -> None:
        """Routers and nodes have started. Waits until every router hears every node, then until /health answers 200."""
        await self.until_in_view(_VIEW_WAIT_S)
        await self._first_health()

    async def _first_health(self) -> None:
        clock = Clock()
        deadline = clock.now() + _HEALTH_WAIT_S
        last = "no answer"
        # Certificates are not verified: Ray told us the address, and a certificate may name another host.
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
        raise DeadlineExceeded(
            f"everything has started, but {self.url}/health did not answer 200 within {_HEALTH_WAIT_S:.0f} s: {last}"
        )
