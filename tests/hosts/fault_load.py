"""Runs outside the hosts and sends the requests that it reads: a line of JSON in for each request, a line out for each of its events.
Times are of the machine's monotonic clock, which all namespaces share.

In:  {"ask": ID, "url": ..., "body": {...}}   or {"leave": ID}
Out: {"id": ID, "event": "token", "at": T} ... {"id": ID, "event": "end", "at": T, "outcome": ..., "text": ..., ...}
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import httpx

_LONGEST_S = 400.0


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


async def ask(http: httpx.AsyncClient, name: str, url: str, body: dict[str, Any]) -> dict[str, Any]:
    text = ""
    times: list[float] = []

    def ended(outcome: str, detail: str = "") -> dict[str, Any]:
        return {"outcome": outcome, "detail": detail[:400], "times": times, "text": text}

    try:
        async with asyncio.timeout(_LONGEST_S), http.stream("POST", url, json=body) as response:
            if (status := response.status_code) != 200:
                detail = (await response.aread()).decode(errors="replace")
                retry = "retry-after" in response.headers
                return ended("refused" if retry or status < 500 else "error", f"{status}: {detail}")
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return ended("whole")
                if not line.startswith("data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return ended("error", json.dumps(event["error"]))
                for choice in event["choices"]:
                    text += choice["text"]
                    if choice["text"]:
                        times.append(time.monotonic())
                        if len(times) <= 16:  # no test waits for later tokens
                            say(id=name, event="token", at=times[-1])
            return ended("silent", "the stream ended without [DONE] and without an error")
    except TimeoutError:
        return ended("hang", f"not over after {_LONGEST_S:.0f} s")
    except httpx.HTTPError as error:
        return ended("connection", f"{type(error).__name__}: {error}")
    except asyncio.CancelledError:
        return ended("left")


async def main() -> None:
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(_LONGEST_S, connect=10.0)
    tasks: dict[str, asyncio.Task[None]] = {}

    async def run(http: httpx.AsyncClient, told: dict[str, Any]) -> None:
        name = told["ask"]
        ending = await ask(http, name, told["url"], told["body"])
        say(id=name, event="end", at=time.monotonic(), **ending)

    async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as http:
        while line := await reader.readline():
            told = json.loads(line)
            if "ask" in told:
                tasks[told["ask"]] = asyncio.create_task(run(http, told))
            elif told["leave"] in tasks:
                tasks[told["leave"]].cancel()


if __name__ == "__main__":
    asyncio.run(main())
