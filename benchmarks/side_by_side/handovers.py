"""Tandem alone can say where a request's time went: what of it the handover takes, and a picture of one request."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import httpx

from tandem.cluster.saving import save_picture
from tandem.cluster.trace.account import handover
from tandem.cluster.trace.command import TraceClient
from tandem.cluster.trace.picture import draw_trace
from tandem.loadgen.api import Prompt
from tandem.wire.errors import Unavailable

_A_REQUEST_S = 60.0
_ANSWER = 16


def measure_handovers(url: str, model: str, prompts: Sequence[Prompt], picture: Path) -> list[float]:
    """Milliseconds from the prompt's last forward pass to the first that decodes, of each prompt, asked in peace."""
    client = TraceClient(url, None)
    found: list[float] = []
    try:
        for prompt in prompts:
            name = f"handover-{secrets.token_hex(8)}"
            body = {"model": model, "prompt": prompt, "max_tokens": _ANSWER, "ignore_eos": True}
            headers = {"x-tandem-trace": "1", "x-request-id": name}
            try:
                httpx.post(
                    f"{url}/v1/completions", json=body, headers=headers, timeout=_A_REQUEST_S, trust_env=False
                ).raise_for_status()
            except httpx.HTTPError as error:
                raise Unavailable(f"a traced request is not answered: {error}") from error
            record = client.find(name)
            items = handover(record)
            if items:
                found.append(sum(item.seconds for item in items) * 1e3)
            if prompt is prompts[-1]:
                save_picture(draw_trace(record), picture)
    finally:
        client.close()
    if not found:
        raise Unavailable("no traced request was handed over: a prompt of this length is not sent away")
    return found
