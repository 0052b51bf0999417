"""Which files of Tandem one chat request runs through: `python -m benchmarks.one_request [--list]`.

Runs a router, a prefill node and a decode node in one process, over HTTP, ZMQ and NIXL, with a real model. After some requests that load what is
loaded once, one streamed request is observed: a file counts if one of its functions runs between the request's first byte and the end of its
answer. Heartbeats and reports that happen to run in that time count, too.
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
from tandem.kvtransfer.config import TransferConfig
from tandem.node.config import NodeConfig
from tandem.prefill_node.node import PrefillNode
from tandem.router.config import LocalPrefill, RouterConfig
from tandem.router.server import RouterServer
from tandem.wire.nodes import Role

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 3
PROMPT = "Name the seas that Europe borders on, and say a sentence about each. " * 12


class Watch:
    """While it is `on`, records the files whose functions begin to run, in every thread that starts after it was installed."""

    def __init__(self) -> None:
        self.on = False
        self.files: set[str] = set()

    def install(self) -> None:
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call":
            self.files.add(frame.f_code.co_filename)

    def ours(self) -> dict[str, list[str]]:
        """Returns the files relative to the repository's root, by package."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in sorted(self.files):
            path = Path(name).resolve()
            is_ours = (
                path.is_relative_to(ROOT) and ".venv" not in path.parts and path.is_file()
            )  # leaves out "<string>"
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
    path = prepare_model(model, lambda *_: None).path
    engine = EngineConfig(model=ModelConfig(path=path, threads=1), cache=CacheConfig(memory_bytes=256 << 20))
    transfer = TransferConfig()
    nodes = [
        kind(NodeConfig(node_id=role.value, role=role, engine=engine, transfer=transfer))
        for kind, role in ((PrefillNode, Role.PREFILL), (DecodeNode, Role.DECODE))
    ]
    infos = [await asyncio.to_thread(node.start) for node in nodes]
    config = RouterConfig(port=0, tokenizer_path=tokenizer_folder(path), model_name=Path(path).name)
    router = RouterServer(msgspec.structs.replace(config, local_prefill=LocalPrefill.NEVER))
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
            watch.on = True
            chunks = await ask(client, config.model_name, WARM_UP)
            watch.on = False
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
