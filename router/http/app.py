"""The application: which path leads where."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.router.http.api_document import DocumentRoute, TryRoute
from tandem.router.http.gate import HttpGate, exchange_of
from tandem.router.http.generate_routes import CHAT, COMPLETIONS, MESSAGES, GenerateRoute
from tandem.router.http.response_desk import ResponseDesk
from tandem.router.http.responses_routes import CancelResponseRoute, ResponseRoute, ResponsesRoute
from tandem.router.http.services import Services
from tandem.router.http.status_routes import (
    ClusterRoute,
    HealthRoute,
    LoadRoute,
    MetricsRoute,
    ModelRoute,
    ModelsRoute,
    VersionRoute,
)
from tandem.router.http.text_routes import CountTokensRoute, DetokenizeRoute, TokenizeRoute
from tandem.router.http.trace_routes import TraceRoute, TracesRoute


class _RouteLabel:
    """Tells the exchange which route it took: metrics are labelled with routes, not with clients' paths."""

    def __init__(self, path: str, app: ASGIApp) -> None:
        self._path = path
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange_of(scope).route = self._path
        await self._app(scope, receive, send)


def _route(path: str, app: ASGIApp, *methods: str) -> Route:
    return Route(path, _RouteLabel(path, app), methods=list(methods))


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
    responses = ResponseDesk(services)
    routes = [
        _route("/v1/completions", GenerateRoute(COMPLETIONS, services), "POST"),
        _route("/v1/chat/completions", GenerateRoute(CHAT, services), "POST"),
        _route("/v1/messages", GenerateRoute(MESSAGES, services), "POST"),
        _route("/v1/messages/count_tokens", CountTokensRoute(services), "POST"),
        _route("/v1/responses", ResponsesRoute(services, responses), "POST"),
        _route("/v1/responses/{response_id}", ResponseRoute(responses), "GET", "DELETE"),
        _route("/v1/responses/{response_id}/cancel", CancelResponseRoute(responses), "POST"),
        _route("/v1/models", ModelsRoute(services), "GET"),
        _route("/v1/models/{model:path}", ModelRoute(services), "GET"),
        _route("/tokenize", TokenizeRoute(services), "POST"),
        _route("/detokenize", DetokenizeRoute(services), "POST"),
        _route("/health", HealthRoute(services), "GET"),
        _route("/ping", HealthRoute(services), "GET", "POST"),
        _route("/version", VersionRoute(), "GET"),
        _route("/load", LoadRoute(services), "GET"),
        _route("/metrics", MetricsRoute(services), "GET"),
        _route("/cluster", ClusterRoute(services), "GET"),
        _route("/traces", TracesRoute(services), "GET"),
        _route("/traces/{request_id}", TraceRoute(services), "GET"),
        _route("/openapi.json", DocumentRoute(services.keys.required), "GET"),
        _route("/docs", TryRoute(), "GET"),
    ]
    # Without Starlette's application around them: its layers turn errors into answers, which is what the gate is for.
    gate = HttpGate(_Routes(routes), services.config.limits, services.keys, services.metrics)
    return _with_cors(gate, services.config.cors_origins)
