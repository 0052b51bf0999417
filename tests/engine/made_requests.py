"""The engine's requests, from whatever a test names of what a client asked for and of the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tandem.engine.request import Request
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import SamplingParams

DEFAULTS = SamplingParams()


def made_request(request_id: str, prompt: Iterable[int], sampling: SamplingParams = DEFAULTS, **fields: Any) -> Request:
    asked = {name: fields.pop(name) for name in RequestFacts.__struct_fields__ if name in fields}
    return Request(request_id, RequestFacts(prompt_token_ids=list(prompt), sampling=sampling, **asked), **fields)
