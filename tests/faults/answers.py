"""Streamed answers, watched while nodes are killed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx

from tests.integration.conftest import RunningDeployment


class WatchedAnswer:
    """One streamed answer, with the times of its events."""

    def __init__(self, server: RunningDeployment, prompt: list[int], tokens: int, fields: dict[str, Any]) -> None:
        self._server, self._prompt, self._tokens, self._fields = server, prompt, tokens, fields
        self.text = ""
        self.times: list[float] = []
        self.finished = False
        self.error: str | None = None
        self.nodes: dict[str, str] = {}  # by role; known once the answer has begun

    def run(self, at_event: int = 0, then: Callable[[], None] = lambda: None) -> None:
        body = {
            "model": self._server.model,
            "prompt": self._prompt,
            "max_tokens": self._tokens,
            "ignore_eos": True,
            "stream": True,
            **self._fields,
        }
        url = f"{self._server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=120, trust_env=False) as response:
            if response.status_code != 200:
                self.error = response.read().decode()
                return
            way = response.headers["x-tandem-nodes"].rpartition("|")[2]
            self.nodes = dict(part.split("=", 1) for part in way.split(","))
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    self.finished = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.error = line
                        return
                    self.text += event["choices"][0]["text"]
                    self.times.append(time.monotonic())
                    if len(self.times) == at_event:
                        then()

    def after(self, moment: float) -> float:
        return next((later for later in self.times if later > moment), moment) - moment
