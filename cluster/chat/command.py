"""`tandem chat`: a conversation with a running server, in the terminal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any

import httpx
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape

from tandem.base.errors import TandemError, Unavailable
from tandem.cluster.api_client import ApiClient, key_from_environment
from tandem.cluster.commands.options import add_server
from tandem.cluster.commands.router_url import choose_url

_HELP = "/quit leaves, /reset forgets the conversation, Ctrl-C stops a reply"

Message = dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message before the conversation")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="longest reply")
    # Lower than the API's 1.0, at which small models lose the thread.
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.3, help="0 always says the same (default 0.3)"
    )


def run(options: argparse.Namespace) -> int:
    with closing(ChatClient(choose_url(options.url), key_from_environment())) as client:
        sampling = {"temperature": options.temperature, "max_tokens": options.max_tokens}
        given = {name: value for name, value in sampling.items() if value is not None}
        return chat(client, Console(), options.system, given)


_MALFORMED = (ValueError, LookupError, TypeError, AttributeError)


class ChatClient:
    def __init__(self, url: str, key: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        # A long prompt takes a while to the first token; after that a stream does not pause for long.
        self._api = ApiClient(url, key, transport, httpx.Timeout(10.0, read=180.0))

    def model(self) -> str:
        """Returns the first model that the server lists."""
        response = self._api.get("/v1/models")
        try:
            return str(response.json()["data"][0]["id"])
        except _MALFORMED as error:
            raise Unavailable(
                f"{self._api.url} answers, but lists no models: is it an OpenAI-compatible server?"
            ) from error

    def reply(self, model: str, messages: list[Message], sampling: dict[str, Any]) -> Generator[str, None, None]:
        """Yields the answer piece by piece. Closing the generator cancels the request."""
        body = {"model": model, "messages": messages, "stream": True, **sampling}
        with self._api.streamed("POST", "/v1/chat/completions", json=body) as response:
            yield from _pieces(response.iter_lines())

    def close(self) -> None:
        self._api.close()


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    ended = False
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            ended = True
            break
        try:
            event = json.loads(data)
            failure = event["error"]["message"] if "error" in event else None
            pieces = [choice["delta"].get("content") or "" for choice in event.get("choices", ())]
        except _MALFORMED as error:
            raise Unavailable(
                f"the reply broke off: the server sent {data[:200]!r}, which is not part of a reply"
            ) from error
        if failure is not None:
            raise Unavailable(f"the reply broke off: {failure}")
        yield from pieces
    if not ended:
        raise Unavailable("the reply broke off: the server closed the stream")


def chat(
    client: ChatClient,
    console: Console,
    system: str | None = None,
    sampling: dict[str, Any] | None = None,
    read_line: Callable[[str], str] = input,
) -> int:
    """Runs until the end of input or /quit. Returns the exit status."""
    model = client.model()
    console.print(f"[bold]{escape(model)}[/]: {_HELP}", highlight=False)
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        try:
            line = read_line("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        match line:
            case "":
                continue
            case "/quit" | "/exit":
                return 0
            case "/reset":
                messages = list(opening)
                console.print("forgotten", style="dim")
                continue
            case "/help":
                console.print(_HELP, style="dim", highlight=False)
                continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _show_reply(client.reply(model, messages, sampling or {}), console)
        except TandemError as error:
            console.print(f"\n[red]{escape(str(error))}[/]", highlight=False)
            messages.pop()  # it has no answer, and two questions in a row would confuse the model
        else:
            messages.append({"role": "assistant", "content": answer})


class WrappedText:
    """Writes text as it comes, and begins a new line where a word would not fit. Without a width it writes the text as it is."""

    def __init__(self, write: Callable[[str], object], width: int | None) -> None:
        self._write = write
        self._width = width
        self._column = 0
        self._space = ""
        self._word = ""

    def add(self, text: str) -> None:
        if self._width is None:
            self._write(text)
            return
        for character in text:
            if character == "\n":
                self.end()
                self._write("\n")
                self._column = 0
            elif character.isspace():
                self._put_word()
                self._space += character
            else:
                if cell_len(character) > 1:  # Chinese and Japanese lines may break anywhere
                    self._put_word()
                self._word += character

    def end(self) -> None:
        """Writes what is held back: the last word may still grow."""
        self._put_word()
        self._space = ""

    def _put_word(self) -> None:
        if not self._word:
            return
        assert self._width is not None
        if self._column and self._column + cell_len(self._space + self._word) > self._width:
            self._write("\n")
            self._column, self._space = 0, ""
        self._write(self._space + self._word)
        self._column += cell_len(self._space + self._word)
        self._space = self._word = ""


def _show_reply(pieces: Generator[str, None, None], console: Console) -> str:
    said: list[str] = []
    shown = WrappedText(console.file.write, console.width if console.is_terminal else None)
    try:
        for piece in pieces:
            said.append(piece)
            shown.add(piece)
            console.file.flush()
        shown.end()
        console.print()
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim")
    finally:
        pieces.close()  # a reply that was stopped is cancelled on the server
    return "".join(said)
