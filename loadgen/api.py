"""The part of the OpenAI API that the load generator uses."""

from __future__ import annotations

import asyncio
import enum
import time
from pathlib import Path

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.loadgen.answers import AnswerParser
from tandem.loadgen.connections import NO_HEADERS, HttpClient
from tandem.loadgen.timeline import RequestFailure, Timeline

Prompt = str | tuple[int, ...]
Message = dict[str, str]

MODELS_TIMEOUT_S = 30.0


class ListedModel(msgspec.Struct, frozen=True):
    id: str
    root: str | None = None  # the folder that the server loaded, if it tells

    @property
    def tokenizer_folder(self) -> Path | None:
        folder = Path(self.root) if self.root else None
        return folder if folder is not None and (folder / "tokenizer.json").is_file() else None


class Api:
    def __init__(self, http: HttpClient, shape: RequestShape) -> None:
        self._http = http
        self._shape = shape

    @property
    def is_chat(self) -> bool:
        return self._shape.endpoint is ApiEndpoint.CHAT

    async def ask(self, prompt: Prompt | list[Message], timeline: Timeline) -> None:
        """Sends the request and completes the timeline. Never raises for a failed request: the timeline holds the failure."""
        body = self._body(prompt, timeline.max_tokens)
        reader = AnswerParser(timeline)
        headers = {"x-request-id": timeline.trace, "x-tandem-trace": "1"} if timeline.trace else NO_HEADERS
        timeline.sent_at = time.perf_counter()
        try:
            async with asyncio.timeout(self._shape.timeout_s):
                await self._http.exchange("POST", self._shape.endpoint.path, body, reader, headers)
            reader.finish()
        except RequestFailure as failure:
            timeline.failure = failure
        except TimeoutError:
            timeline.failure = RequestFailure("timeout", f"not answered within {self._shape.timeout_s:g} s")
        timeline.ended_at = time.perf_counter()

    def _body(self, prompt: Prompt | list[Message], max_tokens: int) -> bytes:
        fields: dict[str, object] = {
            "model": self._shape.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_chat:
            fields["messages"] = prompt
            fields["max_completion_tokens"] = max_tokens
        else:
            fields["prompt"] = prompt
            fields["max_tokens"] = max_tokens
        if self._shape.ignore_eos:
            fields["ignore_eos"] = True
        if self._shape.temperature is not None:
            fields["temperature"] = self._shape.temperature
        return msgspec.json.encode(fields)


class _CollectedAnswer:
    def __init__(self) -> None:
        self.status = 0
        self.content = b""

    def begin(self, status: int) -> None:
        self.status = status

    def body(self, now: float, data: bytes) -> None:
        self.content += data


class _ModelList(msgspec.Struct):
    data: list[ListedModel]


async def served_models(http: HttpClient) -> list[ListedModel]:
    """Returns the models that the server lists. Raises ConfigurationError when it does not: then the operator must name one."""
    answer = _CollectedAnswer()
    try:
        async with asyncio.timeout(MODELS_TIMEOUT_S):
            await http.exchange("GET", "/v1/models", b"", answer)
        if answer.status == 401:
            raise ConfigurationError(f"{http.authority} asks for a key: set TANDEM_API_KEY or OPENAI_API_KEY")
        if answer.status != 200:
            raise ConfigurationError(
                f"{http.authority}/v1/models answered {answer.status}: name the model with --model"
            )
        return msgspec.json.decode(answer.content, type=_ModelList).data
    except RequestFailure as failure:
        raise ConfigurationError(
            f"{http.authority} does not answer ({failure}): name another server with --url"
        ) from failure
    except TimeoutError as error:
        raise ConfigurationError(
            f"{http.authority} did not answer within {MODELS_TIMEOUT_S:g} s: name another server with --url"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigurationError(
            f"{http.authority}/v1/models is not a list of models: name the model with --model"
        ) from error


class ApiEndpoint(enum.StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/completions" if self is ApiEndpoint.COMPLETIONS else "/v1/chat/completions"


class RequestShape(msgspec.Struct, frozen=True):
    model: str
    endpoint: ApiEndpoint = ApiEndpoint.COMPLETIONS
    ignore_eos: bool = True  # so that an answer has exactly the tokens asked for
    temperature: float | None = None  # None: the server's default
    timeout_s: float = 600.0
