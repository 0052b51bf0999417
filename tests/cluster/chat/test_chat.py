"""A conversation in the terminal, against a server that a test plays."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console

from tandem.base.errors import ConfigurationError, RequestError, Unavailable
from tandem.cluster.api_client import key_from_environment
from tandem.cluster.chat.command import ChatClient, WrappedText, chat
from tandem.cluster.cli import main


def events(*contents: str, done: bool = True) -> str:
    lines = [json.dumps({"choices": [{"delta": {"content": content}}]}) for content in contents]
    return "".join(f"data: {line}\n\n" for line in [*lines, *(["[DONE]"] if done else [])])


class Server:
    """Answers in order; keeps what it was asked."""

    def __init__(self, *answers: httpx.Response) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.headers.append(request.headers)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        self.asked.append(json.loads(request.content))
        return self.answers.pop(0)

    def messages(self, turn: int) -> list[tuple[str, str]]:
        return [(message["role"], message["content"]) for message in self.asked[turn]["messages"]]


def typed(*lines: str | type[BaseException]) -> Callable[[str], str]:
    waiting: Iterator[str | type[BaseException]] = iter(lines)

    def read_line(prompt: str) -> str:
        line = next(waiting, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read_line


def converse(server: Callable[[httpx.Request], httpx.Response], *lines: Any, **options: Any) -> str:
    out = io.StringIO()
    client = ChatClient("http://tandem/v1/", options.pop("key", None), httpx.MockTransport(server))
    assert chat(client, Console(file=out, width=200), read_line=typed(*lines), **options) == 0
    client.close()
    return out.getvalue()


def ok(*contents: str, done: bool = True) -> httpx.Response:
    return httpx.Response(200, text=events(*contents, done=done))


def test_a_reply_is_shown_and_remembered() -> None:
    server = Server(ok("Hel", "lo"), ok("again"))
    shown = converse(server, "hi", "and now?")
    assert "Hello" in shown
    assert server.messages(1) == [("user", "hi"), ("assistant", "Hello"), ("user", "and now?")]
    assert server.asked[0]["stream"] is True
    assert server.asked[0]["model"] == "tiny"


def test_reset_forgets_all_but_the_system_message() -> None:
    server = Server(ok("a"), ok("b"))
    converse(server, "hi", "/reset", "fresh", system="be brief")
    assert server.messages(1) == [("system", "be brief"), ("user", "fresh")]


def test_sampling_and_key_are_passed_on() -> None:
    server = Server(ok("a"))
    converse(server, "hi", key="k3y", sampling={"max_tokens": 7, "temperature": 0.5})
    assert (server.asked[0]["max_tokens"], server.asked[0]["temperature"]) == (7, 0.5)
    assert server.headers[-1]["authorization"] == "Bearer k3y"
    with pytest.raises(ConfigurationError, match="TANDEM_API_KEY"):
        key_from_environment({"TANDEM_API_KEY": "schlüssel\n"})  # no header can carry it


@pytest.mark.parametrize("lines", [("", "  ", "/help", "/quit"), (KeyboardInterrupt,)])
def test_empty_lines_ask_nothing_and_quit_and_ctrl_c_leave(lines: tuple[Any, ...]) -> None:
    server = Server()
    assert "Traceback" not in converse(server, *lines, "never asked")
    assert server.asked == []


def test_ctrl_c_stops_a_reply_and_the_conversation_goes_on() -> None:
    class Interrupted(httpx.SyncByteStream):
        closed = False

        def __iter__(self) -> Iterator[bytes]:
            yield events("Once upon", done=False).encode()
            raise KeyboardInterrupt

        def close(self) -> None:
            Interrupted.closed = True

    server = Server(httpx.Response(200, stream=Interrupted()), ok("yes"))
    shown = converse(server, "a story", "still there?")
    assert "(stopped)" in shown
    assert Interrupted.closed, "the server is told that the reader is gone"
    assert server.messages(1)[1] == ("assistant", "Once upon")


def test_an_error_is_shown_and_the_question_is_not_remembered() -> None:
    error = {"error": {"message": "no node is ready"}}
    server = Server(httpx.Response(503, json=error), ok("fine"))
    shown = converse(server, "first", "second")
    assert "503: no node is ready" in shown
    assert server.messages(1) == [("user", "second")]


def test_an_error_in_the_middle_of_a_stream_is_shown_and_so_is_one_that_just_ends() -> None:
    body = events("half", done=False) + 'data: {"error": {"message": "node lost"}}\n\n'
    assert "broke off: node lost" in converse(Server(httpx.Response(200, text=body)), "hi")
    assert "closed the stream" in converse(Server(ok("half", done=False)), "hi")


def test_a_server_that_is_not_there_or_of_another_kind_or_asks_for_a_key_is_said_with_what_to_do() -> None:
    def no_key(request: httpx.Request) -> httpx.Response:
        return httpx.Response(401, json={"error": {"message": "no key"}})

    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    with pytest.raises(RequestError, match=r"http://tandem answered 401: no key .*TANDEM_API_KEY"):
        converse(no_key, "hi")
    with pytest.raises(Unavailable, match=r"http://tandem does not answer.*tandem serve.*--url"):
        converse(away, "hi")
    with pytest.raises(ConfigurationError, match=r"'http://a:port' is no URL .*Invalid port"):
        ChatClient("http://a:port")
    for answer in (httpx.Response(200, text="<html>"), httpx.Response(200, json=[]), httpx.Response(200, json={})):
        with pytest.raises(Unavailable, match="OpenAI-compatible"):
            converse(lambda request, answer=answer: answer)


@pytest.mark.parametrize("data", ["<html>", "5", '{"choices": [5]}', '{"error": "no"}'])
def test_a_reply_of_another_kind_is_an_error_and_the_conversation_goes_on(data: str) -> None:
    server = Server(httpx.Response(200, text=f"data: {data}\n\n"), httpx.Response(200, text=events("fine")))
    assert "broke off" in converse(server, "hello", "and now?")
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        (["The qu", "ick brown", " fox"], ["The quick", "brown fox"]),
        (["one\n\n  two three"], ["one", "", "  two", "three"]),
        (["a word that", "isfartoolongforaline yes"], ["a word", "thatisfartoolongforaline", "yes"]),
        (["你好你好你好你好"], ["你好你好你", "好你好"]),
    ],
)
def test_lines_are_broken_between_words(pieces: list[str], lines: list[str]) -> None:
    out = io.StringIO()
    text = WrappedText(out.write, 10)
    for piece in pieces:
        text.add(piece)
    text.end()
    assert out.getvalue().split("\n") == lines


def test_without_a_terminal_a_reply_is_what_the_server_sent() -> None:
    server = Server(ok("one  two\n", " three "))
    assert "one  two\n three \n" in converse(server, "hi")


def test_the_command_says_that_no_server_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == 1
    assert "does not answer" in capsys.readouterr().err
