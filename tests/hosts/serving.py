"""Shared by the tests of serving hosts: a client in the hosts' network, and a model for hosts that cannot download any."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab import Lab

from tandem.kernels.build import library_path

Answers = dict[str, list[str]]
"""The different answers that a prompt had."""

CLIENT = Path(__file__).with_name("client.py")


def give_model(lab: Lab, source: Path) -> Path:
    """Puts the model where all hosts see it, and returns its folder."""
    model = lab.folder / "SmolLM2-135M-Instruct"
    shutil.copytree(source, model, dirs_exist_ok=True)
    give_kernels(lab)
    return model


def give_kernels(lab: Lab) -> None:
    """Copies the compiled kernels to where each host looks for them, because its home is empty."""
    library = library_path()
    for host in lab.hosts:
        kept = host.home / ".cache" / "tandem" / "native" / library.parent.name
        shutil.copytree(library.parent, kept, dirs_exist_ok=True)


class Client:
    """A client outside the hosts, in their network."""

    def __init__(self, lab: Lab, url: str) -> None:
        self._lab = lab
        self._url = url

    def complete(self, words: str) -> str:
        return str(self._ask("complete", words, timeout_s=150))

    def wait_for_nodes(self, *, prefill: int, decode: int, within_s: float) -> dict[str, str]:
        nodes = self._ask("nodes", str(within_s), str(prefill), str(decode), timeout_s=within_s + 30)
        roles = list(nodes.values()) if isinstance(nodes, dict) else []
        counts = (roles.count("prefill"), roles.count("decode"))
        assert counts == (prefill, decode), f"after {within_s:.0f} s the router sees {nodes}"
        return nodes

    def epochs(self) -> dict[str, str]:
        return dict(self._ask("epochs", timeout_s=30))

    def _ask(self, question: str, *arguments: str, timeout_s: float) -> Any:
        words = (sys.executable, str(CLIENT), question, self._url, *arguments)
        return json.loads(self._lab.on_laptop(*words, timeout_s=timeout_s))

    @contextmanager
    def load(self, answers: Answers | None = None, contents: int = 1) -> Iterator[None]:
        """Sends one request after another while the block runs. Each must succeed, and have at most as many different answers as models
        have served (`contents`). `answers` holds all answers after the block."""
        command = self._lab.laptop_command(sys.executable, str(CLIENT), "load", self._url)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            yield
            said, _ = process.communicate(timeout=150)
        finally:
            process.kill()
            process.wait()
        outcome = json.loads(said)
        assert outcome["failures"] == []
        assert outcome["finished"] > 0
        said_of: Answers = outcome["answers"]
        assert {words: texts for words, texts in said_of.items() if len(texts) > contents} == {}
        if answers is not None:
            answers |= said_of
