"""Which files of Tandem one chat request runs through: `python -m benchmarks.one_request [--list]`.

Runs a router, a prefill node and a decode node in one process, over HTTP, ZMQ and NIXL, with a real model. After some requests that load what is
loaded once, some streamed requests are observed: a file counts if one of its functions runs between the first byte and the end of the answer
of every one of them. So what only a heartbeat or a report runs, in the time of one or another request, does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import msgspec

from tandem.cluster.models.store import prepare_model, tokenizer_folder
from tandem.decode_node.node import DecodeNode
from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig
from tandem.http_server import serving
from tandem.kvtransfer.config import TransferConfig
from tandem.node.config import NodeConfig, NodeTimeouts
from tandem.prefill_node.node import PrefillNode
from tandem.router.config import Heartbeat, LocalPrefill, RouterConfig
from tandem.router.server import RouterServer
from tandem.wire.nodes import Role

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 3
OBSERVED = 5
# Between two heartbeats, of nodes, of the router, and of a router's process for others on its port: longer than a request takes.
SELDOM_S = 5.0
PROMPT = "Name the seas that Europe borders on, and say a sentence about each. " * 12


class Watch:
    """Between `begin` and `end` records the files whose functions begin to run, in every thread that starts after it was installed."""

    def __init__(self) -> None:
        self._on = False
        self._now: set[str] = set()
        self._always: set[str] | None = None  # in every observation so far

    def install(self) -> None:
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if self._on and event == "call":
            self._now.add(frame.f_code.co_filename)

    def begin(self) -> None:
        self._now, self._on = set(), True

    def end(self) -> None:
        self._on = False
        self._always = self._now if self._always is None else self._always & self._now

    def ours(self) -> dict[str, list[str]]:
        """Returns the files relative to the repository's root, by package."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in sorted(self._always or ()):
            path = Path(name).resolve()
            # Leaves out "<string>"
            is_ours = path.is_relative_to(ROOT) and ".venv" not in path.parts and path.is_file()
            if is_ours and path != Path(__file__).resolve():
                relative = path.relative_to(ROOT)
                found[relative.parts[0]].append(str(relative))
        return dict(sorted(found.items()))


async def ask(client: httpx.AsyncClient, model: str, number: int) -> int:
    """Returns the number of chunks with text."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{number}: {PROMPT}"}],
        "max_tokens": 8,
        "stream": True,
        "ignore_eos": True,
    }
    chunks = 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunks += bool(json.loads(line[6:])["choices"][0]["delta"].get("content"))
    return chunks


async def watched(model: str) -> dict[str, list[str]]:
    watch = Watch()
    watch.install()
    serving.STAMP_S = SELDOM_S
    path = prepare_model(model, lambda *_: None).path
    engine = EngineConfig(model=ModelConfig(path=path, threads=1), cache=CacheConfig(memory_bytes=256 << 20))
    transfer, timeouts = TransferConfig(), NodeTimeouts(status_period_s=SELDOM_S)
    nodes = [
        kind(NodeConfig(node_id=role.value, role=role, engine=engine, transfer=transfer, timeouts=timeouts))
        for kind, role in ((PrefillNode, Role.PREFILL), (DecodeNode, Role.DECODE))
    ]
    infos = [await asyncio.to_thread(node.start) for node in nodes]
    config = RouterConfig(port=0, tokenizer_path=tokenizer_folder(path), model_name=Path(path).name)
    heartbeat = Heartbeat(ping_interval=SELDOM_S, silence=4 * SELDOM_S, starved=4 * SELDOM_S)
    router = RouterServer(
        msgspec.structs.replace(config, local_prefill=LocalPrefill.NEVER, heartbeat=heartbeat)
    )
    url = await router.start()
    router.set_members(infos)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as client:
            for _ in range(100):
                if (await client.get("/health")).is_success:
                    break
                await asyncio.sleep(0.1)
            for number in range(WARM_UP):
                await ask(client, config.model_name, number)
            await asyncio.sleep(1.0)
            for number in range(WARM_UP, WARM_UP + OBSERVED):
                watch.begin()
                chunks = await ask(client, config.model_name, number)
                watch.end()
                assert chunks > 1, "the answer was not streamed"
    finally:
        await router.stop()
        for node in nodes:
            await asyncio.to_thread(node.stop)
    return watch.ours()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--list", action="store_true", help="print the files, not only how many there are")
    options = parser.parse_args()
    found = asyncio.run(watched(options.model))
    for package, files in found.items():
        print(f"{package:14}{len(files):4}")
        for file in files if options.list else ():
            print(f"    {file}")
    print(f"{'in all':14}{sum(map(len, found.values())):4}")


if __name__ == "__main__":
    main()
