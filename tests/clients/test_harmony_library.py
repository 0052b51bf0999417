"""gpt-oss's format, beside OpenAI's own library for it: what that writes is read here as it reads it, however it is cut."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tandem.api.formats.harmony import HarmonyReader
from tandem.api.pieces import Arguments, CallBegins, Reasoning
from tests.clients.test_clients import program

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
Said = list[tuple[str, str]]  # "reasoning", "text" or a function's name, and what was said there

TEXTS = ["Hm.", "", "two\n\nlines ", '{"city": "Þórshöfn", "at": [62.5, -7]}', "<think> a < b </think>", "🌧 雨"]
ANSWERS: list[Any] = [
    *([["final", None, text]] for text in TEXTS),
    *([["analysis", None, text], ["final", None, "So."]] for text in TEXTS),
    *([["analysis", None, "Where?"], ["commentary", "weather.now", text]] for text in TEXTS),
    [["analysis", None, "a"], ["commentary", None, "I look."], ["commentary", "weather", "{}"]],
    [["analysis", None, "a"], ["analysis", None, "b"], ["final", None, "c"]],
    [["commentary", None, "First."], ["analysis", None, "a"], ["final", None, "c"]],
    # As models write them otherwise: the function in either half of the header, with and without the kind of content.
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{}<|call|>",
    "<|channel|>commentary to=functions.weather<|message|>{}<|call|>",
    " to=functions.weather<|channel|>commentary json<|message|>{}<|call|>",
    "<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.weather<|channel|>commentary<|message|>{}<|call|>",
    "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>cut o",
]  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Said]]:
    """Each answer as the library writes it, and what the library reads in it."""
    script = Path(__file__).parent / "harmony_library.py"
    python = program("litellm", "python")
    if subprocess.run([python, "-c", "import openai_harmony"], capture_output=True, check=False).returncode:
        pytest.skip("build/litellm is older than this test: remove it, and `make test-clients` installs it")
    done = subprocess.run(
        [python, "-P", script],
        cwd=tmp_path_factory.mktemp("harmony"),
        env={**os.environ, "PYTHONPATH": ""},
        input=json.dumps(ANSWERS),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(found["text"], library_said(found["messages"])) for found in json.loads(done.stdout)]


def library_said(messages: list[dict[str, Any]]) -> Said:
    said: Said = []
    for message in messages:
        where = "reasoning" if message["channel"] == "analysis" else "text"
        if recipient := message.get("recipient"):
            where = recipient.removeprefix("functions.")
        said.append((where, "".join(part["text"] for part in message["content"])))
    return merged(said)


def router_said(text: str, cuts: list[int]) -> Said:
    reader = HarmonyReader(calls=True)
    said: Said = []
    pieces = [piece for start, end in pairwise([0, *cuts, len(text)]) for piece in reader.push(text[start:end])]
    for piece in [*pieces, *reader.finish()]:
        if isinstance(piece, CallBegins):
            said.append((piece.name, ""))
        elif isinstance(piece, Arguments):
            said[-1] = (said[-1][0], said[-1][1] + piece.text)
        else:
            said.append(("reasoning" if isinstance(piece, Reasoning) else "text", piece.text))
    return merged(said)


def merged(said: Said) -> Said:
    """One entry for what follows in one place: a client of the API sees no border between two messages of a channel."""
    found: Said = []
    for where, text in said:
        if where in ("reasoning", "text") and found and found[-1][0] == where:
            found[-1] = (where, found[-1][1] + text)
        elif text or where not in ("reasoning", "text"):
            found.append((where, text))
    return found


def test_answers_are_read_as_openais_library_reads_them(answers: list[tuple[str, Said]]) -> None:
    assert len(answers) == len(ANSWERS)
    for text, expected in answers:
        assert router_said(text, []) == expected, text
        assert router_said(text, list(range(1, len(text)))) == expected, text
        for cut in range(1, len(text)):
            assert router_said(text, [cut]) == expected, (text[:cut], text[cut:])
