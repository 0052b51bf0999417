"""Paths that clients of other servers ask for, or mistype: what a 404 says there, and the few that are answered."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path

from tandem.api.text.tokenizer import read_json
from tandem.router.http.exchange import HttpExchange, send_bytes, send_json
from tandem.router.http.page_figures import VERSION
from tandem.router.http.services import Services

_BATCHES = (
    "POST /v1/files and /v1/batches have a file of requests answered, unless this server was installed without batches"
)
_NEAR = 0.9  # alike, where 1 is the same
_TEXT_ONLY = "this server reads text and images, and answers in text"
_PROFILE = "`x-tandem-trace: 1` traces a request, and GET /traces/{id} shows where its time went"
_PAUSE = "an operator's POST /admin/pause and /admin/resume hold back new requests"
# What is there in place of other servers' paths. A path that begins with one of these gets its sentence.
INSTEAD: Mapping[str, str] = {
    "/pooling": "POST /v1/embeddings makes vectors of a model that makes some",
    "/classify": "there is no classification; POST /v1/score and /v1/rerank compare texts",
    "/v1/classify": "there is no classification; POST /v1/score and /v1/rerank compare texts",
    "/v2/embed": "POST /v1/embeddings makes vectors of a model that makes some",
    "/encode": "POST /v1/embeddings makes vectors of a model that makes some",
    "/generate": "POST /v1/completions generates, with its sampling fields in the body itself",
    "/inference/v1/generate": "POST /v1/completions takes token ids as `prompt`, and returns them with `return_token_ids`",
    "/v1/chat/completions/render": "POST /tokenize with `messages` renders a chat",
    "/v1/completions/render": "POST /tokenize shows a prompt's tokens",
    "/server_info": "GET /cluster shows every node, and /version this server's version",
    "/get_server_info": "GET /cluster shows every node, and /version this server's version",
    "/model_info": "GET /v1/models and /get_model_info say what is served",
    "/sleep": _PAUSE,
    "/wake_up": _PAUSE,
    "/is_sleeping": _PAUSE,
    "/pause": _PAUSE,
    "/resume": _PAUSE,
    "/start_profile": _PROFILE,
    "/stop_profile": _PROFILE,
    "/v1/chat/completions/batch": _BATCHES,
    "/v1/files": _BATCHES,
    "/v1/batches": _BATCHES,
    "/v1/messages/batches": _BATCHES,
    "/v1/conversations": "`previous_response_id` of POST /v1/responses continues a conversation",
    "/v1/moderations": "this server moderates nothing",
    "/v1/audio": _TEXT_ONLY,
    "/v1/images": _TEXT_ONLY,
}


def instead_of(path: str, known: Collection[str]) -> str | None:
    """Returns what is right in place of a path at which there is nothing, or None. `known`: this server's paths."""
    for other in (f"/v1{path}", path.replace("/v1/v1/", "/v1/"), path.rstrip("/"), f"/{path.lstrip('/')}"):
        if other != path and other in known:
            return f"did you mean {other}?"
    for theirs, sentence in INSTEAD.items():
        if path == theirs or path.startswith(f"{theirs}/"):
            return sentence
    near = difflib.get_close_matches(path, known, n=1, cutoff=_NEAR)
    return f"did you mean {near[0]}?" if near else None


async def home(services: Services, exchange: HttpExchange) -> None:
    """Sends a browser to the cluster's page, and tells a program what there is."""
    if b"text/html" in (exchange.header(b"accept") or b""):
        await send_bytes(exchange.send, b"", b"text/plain", status=307, headers=[(b"location", b"/ui")])
        return
    places = {"api": "/v1", "document": "/openapi.json", "try_it": "/docs", "page": "/ui", "health": "/health"}
    await send_json(exchange.send, {"server": "tandem", "version": VERSION, **places})


async def live(services: Services, exchange: HttpExchange) -> None:
    """Answers 200 as long as this process answers at all."""
    await send_json(exchange.send, {"status": "ok"})


async def model_info(services: Services, exchange: HttpExchange) -> None:
    """What SGLang's clients ask first. The model's name stands for the folders, which are this server's own affair."""
    model = services.model
    await send_json(
        exchange.send,
        {
            "model_path": model.names[0],
            "tokenizer_path": model.names[0],
            "is_generation": model.vectors is None or model.vectors.generates,
            "max_model_len": model.max_model_len,
        },
    )


async def tokenizer_info(services: Services, exchange: HttpExchange) -> None:
    """The model's tokenizer_config.json, with its chat template if it is in there. For operators, as with vLLM."""
    exchange.require_operator(services.keys)
    await send_json(exchange.send, read_json(Path(services.config.tokenizer_path) / "tokenizer_config.json"))
