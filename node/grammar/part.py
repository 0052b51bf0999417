"""Requests whose grammar is not compiled yet wait for it, and fail alone if it cannot be."""

from __future__ import annotations

from collections.abc import Callable

from tandem.base.errors import TandemError
from tandem.engine.core import Engine
from tandem.engine.model.runner import Grammars
from tandem.engine.request import Request, RequestStatus
from tandem.engine.structured.pending import PendingGrammars
from tandem.node.wings import PartContext, ServicePart
from tandem.wire.requests import Submit


def make(context: PartContext) -> ServicePart | None:
    engine = context.engine
    if not isinstance(engine, Engine) or engine.runner.grammars is None:
        return None
    return GrammarPart(context, engine.scheduler.wake, engine.runner.grammars)


class GrammarPart(ServicePart):
    def __init__(self, context: PartContext, wake: Callable[[str], object], grammars: Grammars) -> None:
        self._context = context
        self._wake = wake
        self._grammars = grammars
        self._desk: PendingGrammars | None = None  # made for the first request with a grammar

    def prepare(self, request: Request) -> None:
        if (grammar := request.facts.sampling.grammar) is None:
            return
        if self._desk is None:
            self._desk = PendingGrammars(self._grammars, self._context.config.timeouts.grammar_s)
        request.grammar = self._grammars.prepared(grammar)
        if request.grammar is None:
            request.status = RequestStatus.WAITING_FOR_GRAMMAR

    def admitted(self, request: Request, submit: Submit, now: float) -> None:
        grammar = request.facts.sampling.grammar
        if self._desk is None or grammar is None or request.status is not RequestStatus.WAITING_FOR_GRAMMAR:
            return
        # A router's salts begin with what is the key's own.
        tenant = (request.cache_salt or "").partition("/")[0]

        def tell(error: TandemError | None) -> None:
            self._context.in_step(lambda: self._ready(request, error))

        self._desk.begin(request.request_id, grammar, tell, now, tenant)

    def forget(self, request_id: str) -> None:
        if self._desk is not None:
            self._desk.forget(request_id)

    def before_step(self, now: float) -> None:
        for request_id, error in self._desk.overdue(now) if self._desk is not None else ():
            self._context.fail(request_id, error)

    def seconds_until_due(self, now: float) -> float | None:
        return self._desk.seconds_until_due(now) if self._desk is not None else None

    def stop(self) -> None:
        if self._desk is not None:
            self._desk.close()

    def _ready(self, request: Request, error: TandemError | None) -> None:
        request_id = request.request_id
        if self._desk is None or not self._desk.forget(request_id):
            return  # the request has ended, or was overdue
        if error is not None:
            self._context.fail(request_id, error)
            return
        request.grammar = self._grammars.prepared(request.facts.sampling.grammar or "")
        self._wake(request_id)
