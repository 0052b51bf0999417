"""Run by a Python that has vLLM: reads the paths of batches' files, and prints what vLLM's own classes read in them. Only the file of the
classes is loaded, because vLLM itself takes half a minute and a model's device."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import msgspec


def batch_class() -> type:
    """vLLM's KVEventBatch, from the statements of its file that need nothing else of vLLM."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0]) / "distributed" / "kv_events.py"
    wanted = {"EventBatch", "KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch"}
    tree = ast.parse(file.read_text())
    tree.body = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name in wanted]
    names: dict[str, Any] = {
        "msgspec": msgspec,
        "Any": Any,
        "ExternalBlockHash": bytes | int,
        "__name__": "vllm_events",
    }
    module = type(sys)("vllm_events")
    sys.modules["vllm_events"] = module
    module.__dict__.update(names)
    exec(compile(tree, str(file), "exec"), module.__dict__)
    found: type = module.__dict__["KVEventBatch"]
    return found


def main() -> None:
    decoder = msgspec.msgpack.Decoder(batch_class())
    for path in sys.argv[1:]:
        batch: Any = decoder.decode(Path(path).read_bytes())
        events = [[type(event).__name__, msgspec.structs.asdict(event)] for event in batch.events]
        print(json.dumps(events, default=lambda value: value.hex()))


if __name__ == "__main__":
    main()
