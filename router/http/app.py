"""The application: which path leads to which handler."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from tandem.base.errors import TandemError
from tandem.router.http import admin_routes, api_document, other_paths, status_routes, text_routes
from tandem.router.http.exchange import HttpExchange
from tandem.router.http.gate import HttpGate, HttpRoute, HttpRoutes
from tandem.router.http.generate_routes import CHAT, COMPLETIONS, generate
from tandem.router.http.other_paths import instead_of
from tandem.router.http.rendering import SharedRendering
from tandem.router.http.services import Services
from tandem.router.wings import RouteRow, RouterWing


async def _answer_instead(wings: Sequence[RouterWing], exchange: HttpExchange, error: TandemError) -> bool:
    for wing in wings:
        if await wing.answer_instead(exchange, error):
            return True
    return False


def _with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """Outside the gate, because a browser's preflight request carries no key."""
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
            "x-tandem-receipt",
            "x-tandem-quote",
            "retry-after",
        ],
    )


def make_app(services: Services, wings: Sequence[RouterWing]) -> ASGIApp:
    metrics = SharedRendering(partial(status_routes.render_metrics, services))
    table: list[RouteRow] = [
        ("/v1/completions", partial(generate, COMPLETIONS), ["POST"]),
        ("/v1/chat/completions", partial(generate, CHAT), ["POST"]),
        ("/v1/models", status_routes.models, ["GET"]),
        ("/v1/models/{model:path}", status_routes.model, ["GET"]),
        ("/tokenize", text_routes.tokenize, ["POST"]),
        ("/detokenize", text_routes.detokenize, ["POST"]),
        ("/health", status_routes.health, ["GET"]),
        ("/healthz", status_routes.health, ["GET"]),
        ("/live", other_paths.live, ["GET"]),
        ("/ping", status_routes.health, ["GET", "POST"]),
        ("/version", status_routes.version, ["GET"]),
        ("/load", status_routes.load, ["GET"]),
        ("/metrics", partial(status_routes.metrics, metrics), ["GET"]),
        ("/cluster", status_routes.cluster, ["GET"]),
        ("/admin/{action}", admin_routes.admin, ["POST"]),
        ("/reset_prefix_cache", admin_routes.reset_cache, ["POST"]),
        ("/flush_cache", admin_routes.reset_cache, ["POST"]),
        ("/v1/load_lora_adapter", admin_routes.load_adapter, ["POST"]),
        ("/v1/unload_lora_adapter", admin_routes.unload_adapter, ["POST"]),
        ("/openapi.json", api_document.document, ["GET"]),
        ("/docs", api_document.try_page, ["GET"]),
        ("/get_model_info", other_paths.model_info, ["GET"]),
        ("/tokenizer_info", other_paths.tokenizer_info, ["GET"]),
        ("/", other_paths.home, ["GET"]),
        ("/ui", status_routes.page, ["GET"]),
        ("/ui/state", status_routes.state, ["GET"]),
        ("/ui/decisions", status_routes.decisions, ["GET"]),
        *(row for wing in wings for row in wing.routes()),
    ]
    services.handlers = {path: handler for path, handler, methods in table if "POST" in methods}
    services.error_forms = [wing.error_form for wing in wings if wing.error_form is not None]
    instead = partial(_answer_instead, wings)
    routes = [
        Route(path, HttpRoute(path, partial(handler, services), instead), methods=methods)
        for path, handler, methods in table
    ]
    right = partial(instead_of, known=frozenset(path for path, *_ in table))
    # Without Starlette's application around the routes: its layers turn errors into answers, which the gate
    # does here.
    gate = HttpGate(HttpRoutes(routes), services, right)
    return _with_cors(gate, services.config.cors_origins)
