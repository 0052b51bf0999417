"""The application: which path leads where."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.http.api_document import DocumentRoute, TryRoute
from router.http.gate import Gate, exchange_of
from router.http.generate_routes import CHAT, COMPLETIONS, GenerateRoute
from router.http.services import Services
from router.http.status_routes import ClusterRoute, HealthRoute, MetricsRoute, ModelRoute, ModelsRoute
from router.http.text_routes import DetokenizeRoute, TokenizeRoute
from router.http.trace_routes import TraceRoute, TracesRoute


class _Named:
    """Tells the exchange which route it took: metrics are labelled with routes, not with clients' paths."""

    def __init__(self, path: str, app: ASGIApp) -> None:
        self._path = path
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange_of(scope).route = self._path
        await self._app(scope, receive, send)


def _route(path: str, app: ASGIApp, *methods: str) -> BaseRoute:
    return Route(path, _Named(path, app), methods=list(methods))


def _cors(origins: tuple[str, ...]) -> list[Middleware]:
    """Before the gate: a browser asks for permission without showing its key."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-tandem-nodes", "x-tandem-decision", "retry-after"],
        )
    ]


async def _to_the_gate(request: Request, error: Exception) -> Response:
    raise error


def make_app(services: Services) -> ASGIApp:
    routes = [
        _route("/v1/completions", GenerateRoute(COMPLETIONS, services), "POST"),
        _route("/v1/chat/completions", GenerateRoute(CHAT, services), "POST"),
        _route("/v1/models", ModelsRoute(services), "GET"),
        _route("/v1/models/{model:path}", ModelRoute(services), "GET"),
        _route("/tokenize", TokenizeRoute(services), "POST"),
        _route("/detokenize", DetokenizeRoute(services), "POST"),
        _route("/health", HealthRoute(services), "GET"),
        _route("/metrics", MetricsRoute(services), "GET"),
        _route("/cluster", ClusterRoute(services), "GET"),
        _route("/traces", TracesRoute(services), "GET"),
        _route("/traces/{request_id}", TraceRoute(services), "GET"),
        _route("/openapi.json", DocumentRoute(services.keys.required), "GET"),
        _route("/docs", TryRoute(), "GET"),
    ]
    gate = Middleware(Gate, limits=services.config.limits, keys=services.keys, metrics=services.metrics)
    app = Starlette(
        routes=routes,
        middleware=[*_cors(services.config.cors_origins), gate],
        exception_handlers={HTTPException: _to_the_gate},
    )
    app.router.redirect_slashes = False
    return app
