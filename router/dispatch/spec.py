"""What is asked for, once checked: one prompt, one answer."""

from __future__ import annotations

import msgspec

from tandem.router.tracing.trace import RequestTrace
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.images import MediaFeature
from tandem.wire.pooling import Pooling
from tandem.wire.sampling import SamplingParams


class KeptAnswer(msgspec.Struct, frozen=True):
    """Its answer is kept by the node that decodes it, for any router that asks for it by this id."""

    answer_id: str
    note: bytes  # what such a router needs to make the answer of the tokens


class SequenceSpec(msgspec.Struct, frozen=True):
    label: str  # the HTTP request's id, for logs
    prompt_token_ids: list[int]
    sampling: SamplingParams  # its seed is drawn: any node goes on exactly where another stopped
    deadline: float  # on the event loop's clock
    priority: int = 0
    cache_salt: str | None = None
    lora: str | None = None  # the adapter's identity: wire.adapters
    media: list[MediaFeature] = []  # where images stand in the prompt; or its `embeds`
    images: list[bytes] = []  # their files
    embeds: PromptEmbeds | None = None  # in the place of the whole prompt's tokens
    session: str | None = None
    job_id: str | None = None  # the agent's work that it is a turn of, unlike that of any other tenant
    is_last_step: bool = False  # of that job
    trace: RequestTrace | None = None
    arrived: float | None = None  # when the HTTP request came; None: now
    keep: KeptAnswer | None = None
    reads_ahead: bool = False  # the beginning of a prompt that still arrives: its one token is dropped
    pooling: Pooling | None = None  # a vector of the prompt is wanted, and no token
