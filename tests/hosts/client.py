"""Runs where the router can be reached. `client.py load URL` streams one request after another from each of two clients until its input
ends, the same few again and again, and then says how many were finished, which failed, and how each was answered; `client.py nodes URL SECONDS N_PREFILL N_DECODE` waits for a router
that sees so many ready nodes, and says which."""

from __future__ import annotations

import collections
import itertools
import json
import sys
import threading
import time
from typing import Any

import httpx

CLIENTS = 2
QUESTIONS = 3  # different requests of each client


def ready_nodes(url: str) -> list[dict[str, Any]]:
    nodes = httpx.get(f"{url}/cluster", timeout=5, trust_env=False).raise_for_status().json()["nodes"]
    return [node for node in nodes if node["state"] == "ready"]


def wait_for_nodes(url: str, within_s: float, wanted: dict[str, int]) -> Any:
    deadline = time.monotonic() + within_s
    seen: Any = None
    while time.monotonic() < deadline:
        try:
            nodes = ready_nodes(url)
            seen = {node["node_id"]: node["role"] for node in nodes}
            if all(list(seen.values()).count(role) == count for role, count in wanted.items()):
                return seen
        except httpx.HTTPError as error:
            seen = repr(error)
        time.sleep(0.2)  # the router announces no changes
    return seen


def complete(url: str, words: str, tokens: int) -> str:
    """Streams a completion and returns its text. Raises if the answer is not whole."""
    model = httpx.get(f"{url}/v1/models", timeout=30, trust_env=False).raise_for_status().json()["data"][0]["id"]
    body = {"model": model, "prompt": words, "max_tokens": tokens, "stream": True, "temperature": 0}
    text, last = "", ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120, trust_env=False) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.read()!r}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise RuntimeError(str(chunk["error"]))
                text += chunk["choices"][0]["text"] if chunk["choices"] else ""
            last = line or last
    if last != "data: [DONE]":
        raise RuntimeError(f"the stream ended with {last!r}")
    return text


def load(url: str) -> dict[str, Any]:
    ending = threading.Event()

    def until_told() -> None:
        sys.stdin.read()
        ending.set()

    def ask(client: int) -> None:
        for turn in itertools.count():
            if ending.is_set() and turn >= QUESTIONS:
                return
            words = (
                f"Client {client}, request {turn % QUESTIONS}: " + "the quick brown fox jumps over the lazy dog; " * 3
            )
            try:
                answers[words].append(complete(url, words, 16 + 48 * client))
            except (httpx.HTTPError, RuntimeError) as error:
                failures.append(f"{type(error).__name__}: {error}")

    threading.Thread(target=until_told, daemon=True).start()
    answers: dict[str, list[str]] = collections.defaultdict(list)
    failures: list[str] = []
    asking = [threading.Thread(target=ask, args=(client,)) for client in range(CLIENTS)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    return {
        "finished": sum(map(len, answers.values())),
        "failures": failures,
        "answers": {words: sorted(set(texts)) for words, texts in answers.items()},
    }


def main() -> None:
    match sys.argv[1:]:
        case ["load", url]:
            answer: Any = load(url)
        case ["complete", url, words]:
            answer = complete(url, words, 8)
        case ["nodes", url, within_s, prefill, decode]:
            answer = wait_for_nodes(url, float(within_s), {"prefill": int(prefill), "decode": int(decode)})
        case ["epochs", url]:
            answer = {node["node_id"]: node["incarnation"] for node in ready_nodes(url)}
        case _:
            sys.exit(__doc__)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
