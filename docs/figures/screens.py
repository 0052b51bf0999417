"""Takes the documents' pictures of the terminal: `python docs/figures/screens.py` serves SmolLM2, asks it, types the commands, and
writes what they printed as SVG. What they show is one machine's, at that moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
TANDEM = [sys.executable, "-m", "tandem.cluster.cli"]
COLUMNS = 110
# Without the web font that rich names: a picture fetches nothing.
FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


@contextmanager
def serving() -> Iterator[str]:
    command = [
        *TANDEM,
        "serve",
        "smollm2",
        "--port",
        "0",
        "--kv-memory",
        "256MiB",
        "--decode",
        "2",
        "-o",
        "json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")["url"]
        finally:
            process.terminate()


def take(name: str, shown: str, *words: str) -> None:
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    printed = subprocess.run(
        [*TANDEM, *words], env=environment, capture_output=True, text=True, check=True
    ).stdout
    console = Console(record=True, width=COLUMNS, file=Path(os.devnull).open("w"), force_terminal=True)  # noqa: SIM115
    console.print(f"[bold]$ {shown}[/]", highlight=False)
    console.print(Text.from_ansi(printed))
    console.save_svg(str(HERE / name), title="", code_format=FORMAT, unique_id="screen")


def ask(url: str, index: int, tokens: int) -> None:
    body = {
        "model": "SmolLM2-135M-Instruct",
        "prompt": f"Story {index}: " + "once " * 700,
        "max_tokens": tokens,
        "stream": True,
    }
    headers = {"x-tandem-trace": "1", "x-request-id": f"story-{index}"}
    httpx.post(
        f"{url}/v1/completions", json=body, headers=headers, timeout=120, trust_env=False
    ).raise_for_status()


def main() -> int:
    with serving() as url:
        ask(url, 0, 24)
        take("trace.svg", "tandem trace story-0", "trace", "story-0", "--url", url)
        busy = [threading.Thread(target=ask, args=(url, index, 200)) for index in range(1, 7)]
        for thread in busy:
            thread.start()
        busy[0].join()
        take("status.svg", "tandem status", "status")
        for thread in busy:
            thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
