"""Asks encoder nodes for the rows of the images in this node's requests, if their routers name some."""

from __future__ import annotations

from typing import Any

from tandem.engine.core import Engine
from tandem.engine.request import Request
from tandem.node.encoders.client import OVER_SOCKETS, ClientSurroundings, EncoderClient, RowsCame
from tandem.node.status import copied
from tandem.node.wings import PartContext, ServicePart
from tandem.wire.embeds import TYPES
from tandem.wire.requests import Submit


def make(context: PartContext, surroundings: ClientSurroundings = OVER_SOCKETS) -> ServicePart | None:
    engine = context.engine
    if not isinstance(engine, Engine) or engine.info.images is None or engine.info.dtype not in TYPES:
        return None
    return EncodersPart(context, engine, surroundings)


class EncodersPart(ServicePart):
    def __init__(self, context: PartContext, engine: Engine, surroundings: ClientSurroundings) -> None:
        config, info = context.config, engine.info
        self._scheduler = engine.scheduler
        self._in_step = context.in_step
        self._client = EncoderClient(
            config.host,
            config.node_id,
            model=info.content,
            dtype=info.dtype,
            width=info.image_row_size,
            patience_s=config.timeouts.encoder_s,
            deliver=self._deliver,
            clock=context.clock,
            surroundings=surroundings,
        )

    def _deliver(self, came: RowsCame) -> None:
        self._in_step(lambda: self._scheduler.rows_came(came.identifier, came.rows))

    def admitted(self, request: Request, submit: Submit, now: float) -> None:
        if submit.encoders:
            parts = self._scheduler.expect_rows(submit.request_id)
            self._client.ask_for(parts, submit.encoders, submit.images, submit.cache_salt)

    def before_step(self, now: float) -> None:
        self._client.look(now)

    def seconds_until_due(self, now: float) -> float | None:
        return self._client.seconds_until_due(now)

    def count(self, counters: dict[str, Any]) -> None:
        counters["encoder_fallbacks"] = copied(self._client.fallbacks)

    def stop(self) -> None:
        self._client.close()
