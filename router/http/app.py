"""The application: which path leads where."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.router.http import (
    admin_routes,
    api_document,
    realtime_routes,
    responses_routes,
    status_routes,
    text_routes,
    ui_routes,
    vector_routes,
)
from tandem.router.http.exchange import HttpExchange, HttpGate, exchange_of
from tandem.router.http.generate_routes import CHAT, COMPLETIONS, MESSAGES, generate
from tandem.router.http.response_desk import ResponseDesk
from tandem.router.http.services import Services
from tandem.router.openai.served_model import ModelElsewhere
from tandem.router.responses.response_store import ResponseNotFound

Handler = Callable[[Services, HttpExchange], Awaitable[None]]


class _Endpoint:
    """A route's function as an ASGI application. The exchange learns the route: metrics are labelled with it, not with clients' paths."""

    def __init__(self, path: str, handler: Handler, services: Services) -> None:
        self._path = path
        self._handler = handler
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        exchange.route = self._path
        try:
            await self._handler(self._services, exchange)
        except ModelElsewhere as there:
            with self._services.kept.share(len(exchange.body)):
                await self._services.others.pass_on(exchange, there)
        except ResponseNotFound as missing:
            if "{response_id}" not in self._path:
                raise
            await self._services.others.find(exchange, missing)


class _Routes:
    """A path without parameters is looked up; Starlette tries one route after the other for the rest."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._exact = {
            (route.path, method): route.app
            for route in routes
            for method in route.methods or ()
            if "{" not in route.path
        }
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._exact.get((scope["path"], scope["method"]), self._router)
        await app(scope, receive, send)


def _with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """Before the gate: a browser asks for permission without showing its key."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[
            "x-request-id",
            "x-tandem-nodes",
            "x-tandem-decision",
            "x-tandem-ignored-fields",
            "retry-after",
        ],
    )


def make_app(services: Services) -> ASGIApp:
    desk = ResponseDesk(services)
    table: list[tuple[str, Handler, list[str]]] = [
        ("/v1/completions", partial(generate, COMPLETIONS), ["POST"]),
        ("/v1/chat/completions", partial(generate, CHAT), ["POST"]),
        ("/v1/embeddings", vector_routes.embeddings, ["POST"]),
        ("/v1/score", vector_routes.score, ["POST"]),
        ("/v1/rerank", vector_routes.rerank, ["POST"]),
        ("/v1/messages", partial(generate, MESSAGES), ["POST"]),
        ("/v1/messages/count_tokens", text_routes.count_tokens, ["POST"]),
        ("/v1/responses", partial(responses_routes.create_response, desk), ["POST"]),
        ("/v1/responses/{response_id}", partial(responses_routes.one_response, desk), ["GET", "DELETE"]),
        ("/v1/responses/{response_id}/cancel", partial(responses_routes.cancel_response, desk), ["POST"]),
        ("/v1/realtime", realtime_routes.realtime, ["GET"]),
        ("/v1/models", status_routes.models, ["GET"]),
        ("/v1/models/{model:path}", status_routes.model, ["GET"]),
        ("/tokenize", text_routes.tokenize, ["POST"]),
        ("/detokenize", text_routes.detokenize, ["POST"]),
        ("/health", status_routes.health, ["GET"]),
        ("/ping", status_routes.health, ["GET", "POST"]),
        ("/version", status_routes.version, ["GET"]),
        ("/load", status_routes.load, ["GET"]),
        ("/metrics", status_routes.metrics, ["GET"]),
        ("/cluster", status_routes.cluster, ["GET"]),
        ("/admin/{action}", admin_routes.admin, ["POST"]),
        ("/v1/load_lora_adapter", admin_routes.load_adapter, ["POST"]),
        ("/v1/unload_lora_adapter", admin_routes.unload_adapter, ["POST"]),
        ("/traces", status_routes.traces, ["GET"]),
        ("/traces/{request_id}", status_routes.trace, ["GET"]),
        ("/openapi.json", api_document.document, ["GET"]),
        ("/docs", api_document.try_page, ["GET"]),
        ("/ui", ui_routes.page, ["GET"]),
        ("/ui/state", ui_routes.state, ["GET"]),
    ]
    routes = [
        Route(path, _Endpoint(path, handler, services), methods=methods) for path, handler, methods in table
    ]
    # Without Starlette's application around them: its layers turn errors into answers, which is what the gate is for.
    gate = HttpGate(_Routes(routes), services.keys, services.metrics)
    return _with_cors(gate, services.config.cors_origins)
