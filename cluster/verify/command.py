"""`tandem verify`: asks two servers the same requests, or one for an answer again, and compares bit by bit."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import Future, as_completed
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import httpx
import msgspec
from rich.console import Console

from tandem.base.errors import ConfigurationError, TandemError, Unavailable
from tandem.base.flags import adder
from tandem.base.own_thread import in_own_thread
from tandem.base.settings import LONGEST_S
from tandem.cluster.api_client import ANSWER_S, ApiClient, key_from_environment
from tandem.cluster.commands.output import add_output, print_found
from tandem.cluster.verify.comparison import AnswerDifference, ComparedChoice, choices_of, first_difference
from tandem.cluster.verify.questions import Question, built_in, of_file
from tandem.router.receipts.receipt import Receipt, read_receipt

_HEADER = "x-tandem-receipt"


class Remade(msgspec.Struct, frozen=True):
    same: bool
    tokens: int
    first: int  # where the answers part: a token from here
    last: int  # to here
    before: Receipt
    now: Receipt

    def __str__(self) -> str:
        if self.same:
            return f"same bits: {self.tokens} tokens, made again{self._computed()}"
        where = f"token {self.first}" if self.first == self.last else f"tokens {self.first} to {self.last}"
        return f"other bits: the answers part at {where} of {self.tokens}{self._computed()}"

    def _computed(self) -> str:
        said = [
            f"{name} was {before} and is {now}"
            for name, before, now in (
                ("the model's content", self.before.content, self.now.content),
                ("the version", self.before.tandem, self.now.tandem),
            )
            if before != now
        ]
        return "".join(f"; {each}" for each in said)


def remake(server: ApiClient, file: Path, request: Path, seconds: float) -> Remade:
    """Raises a TandemError for a receipt that the server's cluster did not sign, or that is of another request."""
    text = _read(file).decode("ascii", "replace").strip()
    before = read_receipt(text)
    try:
        body: Any = msgspec.json.decode(_read(request))
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{request} is no JSON ({error}): it must be the body of the request") from error
    if not isinstance(body, dict):
        raise ConfigurationError(f"{request} must be the body of the request, an object")
    # The router has drawn a seed if the request had none.
    seed = before.seed if body.get("seed") is None else body["seed"]
    again = msgspec.json.encode({**body, "stream": False, "seed": seed})
    timeout = httpx.Timeout(ANSWER_S, read=seconds)
    answer = server.post(before.path, again, timeout, {_HEADER: text})
    now = read_receipt(answer.headers.get(_HEADER, ""))
    difference = before.answer.parts_from(now.answer)
    first, last = (difference[0], difference[-1]) if difference is not None else (0, 0)
    return Remade(difference is None, before.answer.tokens, first, last, before, now)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from error


_SAME, _OTHER, _NOT_SAID = 0, 1, 2
_MOST_AT_ONCE = 256


class Verdict(msgspec.Struct, frozen=True):
    same: bool
    requests: int
    tokens: int  # of the first server's answers, and log-probabilities
    differences: list[AnswerDifference]  # one of each request whose answers differ, in their order

    def __str__(self) -> str:
        asked = f"{self.requests} requests, {self.tokens} tokens with their log-probabilities"
        if self.same:
            return f"same bits: {asked}"
        return f"other bits in {len(self.differences)} of {asked}. The first: {self.differences[0]}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE",
        help="requests, one JSON object a line, each with a prompt or messages (default: a built-in set); with --request a receipt",
    )  # fmt: skip
    parser.add_argument(
        "--url", action="append", default=[], metavar="URL",
        help="a server; twice, to compare two, or one with itself",
    )  # fmt: skip
    add = adder(parser)
    add(
        "--request",
        "BODY",
        Path,
        "FILE is the receipt of the answer to this request, which is made again at one server",
    )
    add("--at-once", "N", 4, "requests at once at each server: they are each other's company (%(default)s)")
    add("--max-tokens", "N", 32, "of each answer of the built-in set (%(default)s)")
    add("--timeout", "S", 300.0, "seconds for one answer (%(default)g)")
    add_output(parser)
    parser.set_defaults(failed=_NOT_SAID)


def run(options: argparse.Namespace) -> int:
    """Returns 0 for the same bits, 1 if answers differ."""
    verdict = _compare(options) if options.request is None else _remake(options)
    print_found(options, verdict, lambda: print(verdict))
    return _SAME if verdict.same else _OTHER


def _remake(options: argparse.Namespace) -> Remade:
    if options.file is None or len(options.url) != 1:
        raise ConfigurationError(
            "--request needs a receipt and one server: tandem verify RECEIPT --request BODY --url URL"
        )
    _check_numbers(options)
    server = _client(options.url[0])
    try:
        return remake(server, options.file, options.request, options.timeout)
    finally:
        server.close()


def _compare(options: argparse.Namespace) -> Verdict:
    if len(options.url) != 2:
        raise ConfigurationError(
            f"--url must be given twice, for the two servers to compare, not {len(options.url)} times"
        )
    _check_numbers(options)
    servers = [_client(url) for url in options.url]
    try:
        contexts = [_context(server) for server in servers]
        context = min((each for each in contexts if each is not None), default=None)
        questions = built_in(context, options.max_tokens) if options.file is None else of_file(options.file)
        one, other = _ask_all(servers, questions, options)
    finally:
        for server in servers:
            server.close()
    found = (first_difference(each.name, *both) for each, *both in zip(questions, one, other, strict=True))
    differences = [difference for difference in found if difference is not None]
    tokens = sum(len(choice.tokens) for answer in one for choice in answer)
    return Verdict(not differences, len(questions), tokens, differences)


def _check_numbers(options: argparse.Namespace) -> None:
    if not 1 <= options.at_once <= _MOST_AT_ONCE:
        raise ConfigurationError(f"--at-once must be from 1 to {_MOST_AT_ONCE}, not {options.at_once}")
    if options.max_tokens < 1:
        raise ConfigurationError(f"--max-tokens must be at least 1, not {options.max_tokens}")
    if not 0 < options.timeout <= LONGEST_S:
        raise ConfigurationError(f"--timeout must be from 0 to {LONGEST_S:g} seconds, not {options.timeout:g}")


def _client(url: str) -> ApiClient:
    return ApiClient(url, key_from_environment())


def _context(server: ApiClient) -> int | None:
    """Also finds out that the server answers, before many requests wait for it."""
    try:
        answer: Any = server.get("/v1/models").json()
        length = answer["data"][0].get("max_model_len")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigurationError(f"{server.url} does not list its models as a Tandem server does") from None
    return length if isinstance(length, int) else None


_Answer = list[ComparedChoice]


def _ask_all(
    servers: Sequence[ApiClient], questions: Sequence[Question], options: argparse.Namespace
) -> list[list[_Answer]]:
    """Returns each server's answers. Both are asked at the same time. Ctrl-C and the first failure wait for no other answer."""
    timeout = httpx.Timeout(ANSWER_S, read=options.timeout)
    asked: list[list[Future[_Answer]]] = [[Future() for _ in questions] for _ in servers]
    for server, answers in zip(servers, asked, strict=True):
        line: SimpleQueue[tuple[Question, Future[_Answer]]] = SimpleQueue()
        for pair in zip(questions, answers, strict=True):
            line.put(pair)
        for _ in range(min(options.at_once, len(questions))):
            in_own_thread("verify", partial(_ask_next_ones, server, line, timeout))
    everything = [answer for of_server in asked for answer in of_server]
    try:
        with Console(stderr=True).status("asking") as shown:
            for done, answer in enumerate(as_completed(everything), 1):
                answer.result()
                shown.update(f"asking: {done} of {len(everything)} answers")
        return [[answer.result() for answer in of_server] for of_server in asked]
    finally:
        for answer in everything:
            answer.cancel()


def _ask_next_ones(
    server: ApiClient, line: SimpleQueue[tuple[Question, Future[_Answer]]], timeout: httpx.Timeout
) -> None:
    while True:
        try:
            question, asked = line.get_nowait()
        except Empty:
            return
        if not asked.set_running_or_notify_cancel():
            continue
        try:
            asked.set_result(_ask(server, question, timeout))
        except BaseException as error:
            asked.set_exception(error)


def _ask(server: ApiClient, question: Question, timeout: httpx.Timeout) -> _Answer:
    try:
        answer = server.post(question.path, msgspec.json.encode(question.body), timeout)
        return choices_of(msgspec.json.decode(answer.content))
    except TandemError as error:
        raise type(error)(f"{question.name}: {error}") from error
    except msgspec.DecodeError as error:
        raise Unavailable(f"{question.name}: {server.url} did not answer with JSON: {error}") from error
