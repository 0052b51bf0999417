"""Answers from other deployments, in place of an error here."""

from __future__ import annotations

from tandem.api.openai.served_model import ModelElsewhere, NotHere
from tandem.base.errors import TandemError
from tandem.router.http.exchange import HttpExchange
from tandem.router.http.services import Services
from tandem.router.other_models.other_models import OtherModels
from tandem.router.wings import RouterWing


class OtherDeployments(RouterWing):
    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._others = OtherModels(services.config)

    async def answer_instead(self, exchange: HttpExchange, error: TandemError) -> bool:
        if isinstance(error, ModelElsewhere):
            with self.services.kept.share(len(exchange.body), exchange.owner):
                await self._others.pass_on(exchange, error)
        elif isinstance(error, NotHere) and "{" in exchange.route:
            await self._others.find(exchange, error)
        else:
            return False
        return True

    async def close(self) -> None:
        await self._others.close()


WING = OtherDeployments
