"""Where a request's time went, which only Tandem can tell: the part of the handover, and a picture of one request."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import httpx

from tandem.base.errors import Unavailable
from tandem.cluster.saving import save_picture
from tandem.cluster.trace.account import handover
from tandem.cluster.trace.command import TraceClient
from tandem.cluster.trace.picture import draw_trace
from tandem.loadgen.api import Prompt

_A_REQUEST_S = 60.0
_ANSWER = 16


def measure_handovers(url: str, model: str, prompts: Sequence[Prompt], picture: Path) -> list[float]:
    """Returns for each prompt, sent alone, the milliseconds from the last forward pass of its prefill to the first one that decodes."""
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
