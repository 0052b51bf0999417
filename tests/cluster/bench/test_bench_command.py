"""The whole command against a fake server: flags in, table, JSON and picture out."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster import cli
from tandem.cluster.bench.command import add_arguments, run
from tandem.loadgen.options import options_from
from tests.cluster.trace.test_trace_command import record
from tests.loadgen.fake_server import Exchange, FakeServer, answering, complete, serving
from tests.loadgen.made_tokenizers import byte_level

DEADLINE_S = 20.0


@contextmanager
def served_in_a_thread(answer: Callable[[Exchange], Awaitable[None]]) -> Iterator[FakeServer]:
    """The command has an event loop of its own, so the server needs another."""
    ready = threading.Event()
    found: list[FakeServer] = []
    stop: list[Callable[[], None]] = []

    async def main() -> None:
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with serving(answer) as server:
            found.append(server)
            stop.append(lambda: loop.call_soon_threadsafe(done.set))
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(DEADLINE_S)
    try:
        yield found[0]
    finally:
        stop[0]()
        thread.join(DEADLINE_S)


async def answer_as_a_server(exchange: Exchange) -> None:
    if exchange.path == "/v1/models":
        await exchange.respond(200, {"data": [{"id": "smol", "object": "model"}, {"id": "other"}]})
    else:
        await complete(exchange)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with served_in_a_thread(answer_as_a_server) as running:
        yield running


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(flags)


def bench(server: FakeServer, *flags: str) -> int:
    """What the command raises, too: `main` would print it."""
    words = ["bench", "--url", server.url, "--output", "4", *flags]
    options = cli.make_parser().parse_args(words)
    return int(options.run(options))


def completions(server: FakeServer) -> list[dict[str, Any]]:
    return [request.body for request in server.requests if request.path == "/v1/completions"]


def test_a_run_is_shown_as_a_table(server: FakeServer, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--model",
        "smol",
        "--tokenizer",
        str(tokenizer),
        "--requests",
        "6",
        "--concurrency",
        "2",
        "--slo",
        "ttft=10s",
    )
    assert bench(server, *flags) == 0
    shown = capsys.readouterr().out
    for said in ("inter-token", "6 requests", "goodput", "100.0%"):
        assert said in shown
    assert len(completions(server)) == 6 + 2  # and a warm-up for each user
    assert all(body["ignore_eos"] for body in completions(server))


def test_a_run_as_json_says_all_that_is_needed_to_repeat_it(
    server: FakeServer, tokenizer: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    bench(
        server, "--tokenizer", str(tokenizer), "--requests", "5", "--input", "30", "--rate", "500",
        "--warmup", "0", "--seed", "3", "--slo", "itl=10s", "--json", str(file),
    )  # fmt: skip
    report = json.loads(file.read_text())
    assert report["settings"]["seed"] == 3
    assert report["settings"]["model"] == "smol"  # the first that the server lists
    assert report["exact_lengths"] is True
    assert report["machine"]["cores"] >= 1
    (summary,) = report["summaries"]
    assert summary["succeeded"] == 5
    assert summary["output_tokens"] == 20
    assert summary["attainment"] == 1.0
    assert set(summary["itl_ms"]) == {"mean", "p50", "p90", "p95", "p99", "max"}
    assert [request["output_tokens"] for request in report["requests"]] == [4] * 5
    assert all(request["ttft_ms"] > 0 for request in report["requests"])


@pytest.mark.parametrize("wish", [("--json", "-"), ("-o", "json", "--json", "run.json")])
def test_json_on_standard_output_is_nothing_but_json(
    server: FakeServer,
    capfdbinary: pytest.CaptureFixture[bytes],
    wish: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench(server, "--requests", "2", *wish) == 0
    captured = capfdbinary.readouterr()
    report = json.loads(captured.out)
    assert report["exact_lengths"] is False
    assert b"inter-token" in captured.err
    if "run.json" in wish:
        assert json.loads((tmp_path / "run.json").read_text()) == report


@pytest.mark.slow
def test_a_run_as_a_picture(server: FakeServer, tmp_path: Path) -> None:
    """matplotlib takes a second to import, and makes its font cache once."""
    file = tmp_path / "run.png"
    assert bench(server, "--requests", "3", "--plot", str(file)) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


async def answer_and_trace(exchange: Exchange) -> None:
    if not exchange.path.startswith("/traces/"):
        await answer_as_a_server(exchange)
        return
    traced = record(request_id=exchange.path.rpartition("/")[2], answer_id="")
    await exchange.respond(200, json.loads(msgspec.json.encode(traced)))


def test_one_request_in_the_middle_is_traced_and_its_timeline_shown(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "timeline.svg"
    with served_in_a_thread(answer_and_trace) as server:
        flags = ("--tokenizer", str(tokenizer), "--requests", "5", "--warmup", "1", "--timeline", str(picture))
        assert bench(server, *flags) == 0
        asked = [one for one in server.requests if one.path == "/v1/completions"]
        traced = [index for index, one in enumerate(asked) if "x-tandem-trace" in one.headers]
        assert traced == [3], "one, after the warm-up, with as many before it as after it"
        name = asked[3].headers["x-request-id"]
        assert server.requests[-1].path == f"/traces/{name}"
    assert name in capsys.readouterr().err
    assert b"<svg" in picture.read_bytes()[:400]


def test_a_server_that_traces_nothing_is_measured_all_the_same(
    server: FakeServer, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--tokenizer", str(tokenizer), "--requests", "2", "--timeline", str(tmp_path / "t.png"))
    assert bench(server, *flags) == 0
    captured = capsys.readouterr()
    assert "No timeline" in captured.err
    assert "time to first token" in captured.out


def test_without_matplotlib_a_picture_is_refused_before_anything_is_sent(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match="pip install matplotlib"):
        bench(server, "--requests", "3", "--plot", str(tmp_path / "run.png"))
    assert server.requests == []


@pytest.mark.parametrize(
    "given",
    [
        ["--requests", "1000000000"],
        ["--requests", "3", "--input", "1000000000000"],
        ["--requests", "3", "--concurrency", "1000000000"],
        ["--requests", "3", "--workload", "shared-prefix", "--prefix", "100000000000"],
        ["--requests", "3", "--workload", "shared-prefix", "--prefixes", "100000000000"],
        ["--requests", "3", "--workload", "multi-turn", "--turns", "100000000000"],
        ["--requests", "3", "--workload", "multi-turn", "--turn-input", "100000000000"],
    ],
)
def test_more_prompts_than_memory_holds_are_refused(given: list[str], server: FakeServer) -> None:
    with pytest.raises(ConfigurationError, match="tokens: at most 1,073,741,824 are made"):
        bench(server, *given)
    assert server.requests == []


@pytest.mark.parametrize("flag", ["--plot", "--timeline"])
def test_a_picture_of_another_kind_is_refused_before_anything_is_sent(
    flag: str, server: FakeServer, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=rf"{flag} .*run\.jpg: must end in \.png or \.svg"):
        bench(server, "--requests", "3", flag, str(tmp_path / "run.jpg"))
    assert server.requests == []


def test_a_request_is_what_the_flags_make_it(server: FakeServer, tokenizer: Path) -> None:
    status = bench(
        server, "--tokenizer", str(tokenizer), "--endpoint", "completions", "--stop-at-eos", "--temperature", "0.5",
        "--workload", "shared-prefix", "--prefix", "10", "--prefixes", "1", "--input", "20", "--warmup", "0",
        "--requests", "4", "--duration", "60", "--timeout", "30",
    )  # fmt: skip
    assert status == 0
    bodies = completions(server)
    assert len(bodies) == 4
    assert {body["temperature"] for body in bodies} == {0.5}
    assert not any(body.get("ignore_eos") for body in bodies)
    assert len({body["prompt"][:20] for body in bodies}) == 1, "they share their first words"


def test_conversations(server: FakeServer, tokenizer: Path) -> None:
    bench(
        server, "--tokenizer", str(tokenizer), "--workload", "multi-turn", "--requests", "2", "--turns", "3",
        "--input", "20", "--turn-input", "5", "--think", "0.001", "--spread", "0", "--warmup", "0",
    )  # fmt: skip
    prompts = [body["prompt"] for body in completions(server)]
    assert len(prompts) == 6
    assert prompts[1].startswith(prompts[0] + " word" * 4)


def test_a_trace_is_played_at_its_own_times(server: FakeServer, tokenizer: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": at, "input_length": 40, "output_length": 3, "hash_ids": [1]} for at in (0, 100, 400)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    file = tmp_path / "run.json"
    status = bench(
        server, "--tokenizer", str(tokenizer), "--workload", "trace", "--trace", str(trace), "--requests", "9000000",
        "--trace-speed", "10", "--trace-scale", "1", "--prompt-format", "ids", "--json", str(file),
    )  # fmt: skip
    assert status == 0
    sent = [request["sent_s"] for request in json.loads(file.read_text())["requests"]]
    assert len(sent) == 3
    assert sent[1] >= 0.01
    assert sent[2] >= 0.04
    assert [len(body["prompt"]) for body in completions(server)[1:]] == [40, 40, 40]


def test_a_run_whose_warm_up_fails_does_not_begin_and_one_in_which_nothing_succeeds_has_failed(
    tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse = answering(("respond", 503, {"error": {"message": "full"}}))
    flags = ("--model", "x", "--tokenizer", str(tokenizer), "--requests", "4")
    with served_in_a_thread(refuse) as server:
        with pytest.raises(ConfigurationError, match="full"):
            bench(server, *flags)
        assert bench(server, *flags, "--warmup", "0") == 1
    assert "4 failed, http_503: full" in capsys.readouterr().out


def test_nobody_there_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:1 does not answer .* --url"):
        run(arguments("--url", "http://127.0.0.1:1"))


@pytest.mark.parametrize("variable", ["TANDEM_API_KEY", "OPENAI_API_KEY"])
def test_the_key_comes_from_the_environment(variable: str, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer_whom_it_knows(exchange: Exchange) -> None:
        if exchange.headers.get("authorization") == "Bearer s3cr3t":
            await answer_as_a_server(exchange)
        else:
            await exchange.respond(401, {"error": {"message": "who are you"}})

    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with served_in_a_thread(answer_whom_it_knows) as server:
        with pytest.raises(ConfigurationError, match="TANDEM_API_KEY or OPENAI_API_KEY"):
            bench(server, "--tokenizer", str(tokenizer), "--requests", "1")
        monkeypatch.setenv(variable, "s3cr3t")
        assert bench(server, "--tokenizer", str(tokenizer), "--requests", "1") == 0


def test_flags_that_make_no_run_are_refused() -> None:
    for words in (
        "--requests 0", "--duration 0", "--timeout 0", "--rate nan", "--rate inf", "--duration nan", "--trace-scale inf",
        "--warmup -1", "--seed -1", "--workload trace", "--trace x", "--endpoint chat --prompt-format ids",
    ):  # fmt: skip
        with pytest.raises(ConfigurationError):
            options_from(arguments(*words.split()))


def test_a_file_that_cannot_be_written_is_refused_before_the_run() -> None:
    for flags in (("--json", "/nowhere/at/all.json"), ("--plot", "/nowhere/at/all.png")):
        with pytest.raises(ConfigurationError, match="cannot be written"):
            run(arguments("--url", "http://127.0.0.1:1", *flags))


def test_flags_that_cannot_be_read_are_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (("--slo", "ttft"), ("--workload", "mixed"), ("--rate", "fast")):
        with pytest.raises(SystemExit):
            arguments(*flags)
        assert flags[0] in capsys.readouterr().err
