"""`LLM`: a model in a Python program. Its methods and arguments have the names that vLLM's class of this name gave them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

import httpx
from rich.progress import track

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.cluster.api_client import ApiClient, key_from_environment
from tandem.cluster.offline.own_server import OwnServer
from tandem.cluster.offline.params import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    LlmSampling,
    RequestOutput,
)

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
T = TypeVar("T")

AT_ONCE = 64  # requests; the server's nodes put them into the same steps
TRIES_S = 120.0  # how long a request is sent again to a server that has no room or restarts
_BUSY = (429, 502, 503)


class LLM:
    """`LLM("smollm2")` serves the model on this machine until `close`, or until the program ends. `LLM(url=...)` asks a running
    server: `key`, or TANDEM_API_KEY, is its key. Further arguments are flags of `tandem serve`, with underscores:
    `LLM("Qwen/Qwen3-0.6B", tensor_parallel_size=2, max_model_len=8192)`; vLLM's commonest are among them."""

    def __init__(
        self, model: str | None = None, *, url: str | None = None, key: str | None = None, **settings: Any
    ) -> None:
        if url is not None and settings:
            raise ConfigurationError(
                f"LLM: {', '.join(sorted(settings))}: a server that runs already has its own settings; leave url or these out"
            )
        if url is None and model is None:
            raise ConfigurationError("LLM: name a model, such as LLM('smollm2'), or a server with url=")
        self._server = OwnServer(model or "", flags_of(settings)) if url is None else None
        self.url = self._server.url if self._server is not None else str(url)
        try:
            timeout = httpx.Timeout(10.0, read=3600.0, pool=None)
            self._api = ApiClient(self.url, key or key_from_environment(), timeout=timeout)
            served = [each["id"] for each in self._api.get("/v1/models").json()["data"]]
        except BaseException:  # no one could `close` it
            if self._server is not None:
                self._server.close()
            raise
        self.model = model if self._server is None and model is not None else served[0]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: LlmSampling | Sequence[LlmSampling] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes each prompt: a text, token ids, or `{"prompt": ...}` or `{"prompt_token_ids": ...}`. The outputs have the
        prompts' order."""
        every = [prompts] if _is_one_prompt(prompts) else list(prompts)
        fields = self._fields(len(every), sampling_params, priority)

        def ask(index: int) -> RequestOutput:
            prompt = _plain(every[index])  # type: ignore[arg-type]
            answer = self._post("/v1/completions", {**fields[index], "prompt": prompt})
            return _completed(answer, prompt if isinstance(prompt, str) else None)

        return self._all(ask, len(every), use_tqdm, "prompts")

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: LlmSampling | Sequence[LlmSampling] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several."""
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        every = [messages] if is_one else list(messages)
        fields = self._fields(len(every), sampling_params, priority)
        more = {"chat_template_kwargs": chat_template_kwargs, "tools": tools}
        shared = {name: value for name, value in more.items() if value is not None}

        def ask(index: int) -> RequestOutput:
            asked = _as_chat(fields[index]) | shared | {"messages": every[index]}
            return _chatted(self._post("/v1/chat/completions", asked))

        return self._all(ask, len(every), use_tqdm, "chats")

    def embed(self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True) -> list[EmbeddingRequestOutput]:
        """Makes a vector of each prompt, with a model that makes some."""
        every = [prompts] if _is_one_prompt(prompts) else list(prompts)

        def ask(index: int) -> EmbeddingRequestOutput:
            answer = self._post("/v1/embeddings", {"model": self.model, "input": _plain(every[index])})  # type: ignore[arg-type]
            return EmbeddingRequestOutput(str(index), EmbeddingOutput(answer["data"][0]["embedding"]))

        return self._all(ask, len(every), use_tqdm, "prompts")

    def _fields(
        self, count: int, params: LlmSampling | Sequence[LlmSampling] | None, priority: Sequence[int] | None
    ) -> list[dict[str, Any]]:
        """The fields of each request, besides its prompt."""
        for name, given in (("sampling_params", params), ("priority", priority)):
            if isinstance(given, Sequence) and len(given) != count:
                raise ConfigurationError(f"{name}: has {len(given)} entries for {count} prompts")
        made: list[dict[str, Any]] = []
        for index in range(count):
            one = params[index] if isinstance(params, Sequence) else params
            fields = {"max_tokens": 16} if one is None else one.fields()
            more = {} if priority is None else {"priority": priority[index]}
            made.append({"model": self.model, "return_token_ids": True, **fields, **more})
        return made

    def _all(self, ask: Callable[[int], T], count: int, use_tqdm: bool, what: str) -> list[T]:
        """Asks for all, AT_ONCE at a time. The first failure ends it: requests that have not begun are not sent."""
        failed = threading.Event()

        def guarded(index: int) -> T:
            if failed.is_set():
                raise Unavailable("another request failed")
            try:
                return ask(index)
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(min(AT_ONCE, max(1, count)), thread_name_prefix="LLM") as pool:
            futures = [pool.submit(guarded, index) for index in range(count)]
            shown: Iterable[Any] = (
                track(futures, description=what, transient=True) if use_tqdm and count > 1 else futures
            )
            try:
                for future in shown:
                    future.exception()
            except BaseException:  # Ctrl-C: leaving the pool waits for those that have begun
                failed.set()
                raise
        first = next(
            (error for each in futures if (error := each.exception()) is not None and not _is_aftermath(error)), None
        )
        if first is not None:
            raise first
        return [each.result() for each in futures]

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request, again while the server is full or restarts. Raises RequestError or Unavailable."""
        ends = time.monotonic() + TRIES_S
        for wait in _waits():
            try:
                response = self._api.http.post(path, json=body)
            except httpx.TransportError as error:
                if time.monotonic() > ends or (self._server is not None and not self._server.runs):
                    raise self._api.unreachable(error) from error
                time.sleep(wait)
                continue
            if response.is_success:
                answer: dict[str, Any] = response.json()
                return answer
            if response.status_code not in _BUSY or time.monotonic() > ends:
                raise self._api.refused(response)
            time.sleep(max(wait, _retry_after(response)))
        raise AssertionError

    def close(self) -> None:
        """Ends the server, if it was started for this. Idempotent."""
        self._api.close()
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Arguments as flags: `max_model_len=8192` is `--max-model-len 8192`, and True a flag without a value."""
    flags: list[str] = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is False:
            flags.append(f"--no-{flag[2:]}")
        elif value is not None:
            flags += [flag, os.fspath(value) if isinstance(value, os.PathLike) else str(value)]
    return flags


def _is_one_prompt(prompts: object) -> bool:
    if isinstance(prompts, str | Mapping):
        return True
    return isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)


def _plain(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt, Mapping):
        found = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if found is None or set(prompt) - {"prompt", "prompt_token_ids"}:
            raise ConfigurationError(
                f"a prompt must have prompt or prompt_token_ids and nothing else, not {', '.join(prompt)}"
            )
        return _plain(found)
    return prompt if isinstance(prompt, str) else list(prompt)


def _as_chat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A chat's log-probabilities are asked for in another way than a completion's."""
    made = dict(fields)
    if (count := made.pop("logprobs", None)) is not None:
        made |= {"logprobs": True, "top_logprobs": count}
    return made


def _completed(answer: Mapping[str, Any], prompt: str | None) -> RequestOutput:
    choices = answer["choices"]
    outputs = [
        CompletionOutput(
            each["index"],
            each["text"],
            each["token_ids"],
            each["finish_reason"],
            each.get("stop_reason"),
            each.get("logprobs"),
        )
        for each in choices
    ]
    return RequestOutput(
        answer["id"],
        prompt,
        choices[0]["prompt_token_ids"],
        outputs,
        _cached(answer),
        choices[0].get("prompt_logprobs"),
    )


def _chatted(answer: Mapping[str, Any]) -> RequestOutput:
    outputs = [
        CompletionOutput(
            each["index"],
            each["message"].get("content") or "",
            each["token_ids"],
            each["finish_reason"],
            each.get("stop_reason"),
            each.get("logprobs"),
            each["message"].get("tool_calls"),
        )
        for each in answer["choices"]
    ]
    return RequestOutput(
        answer["id"], None, answer["prompt_token_ids"], outputs, _cached(answer), answer.get("prompt_logprobs")
    )


def _cached(answer: Mapping[str, Any]) -> int | None:
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return cached if isinstance(cached, int) else None


def _is_aftermath(error: BaseException) -> bool:
    return isinstance(error, Unavailable) and str(error) == "another request failed"


def _waits() -> Iterator[float]:
    wait = 0.25
    while True:
        yield wait
        wait = min(2 * wait, 5.0)


def _retry_after(response: httpx.Response) -> float:
    said = response.headers.get("retry-after", "")
    return float(said) if said.isdigit() else 0.0
