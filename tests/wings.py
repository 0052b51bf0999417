"""The wings of the house: what can be deleted, and the proof that it can.

    python -m tests.wings                 lists them, with their size and who still imports them
    python -m tests.wings NAME...         deletes these wings in a copy of the tree, and checks the copy
    python -m tests.wings --each          the same for one wing after another
    python -m tests.wings --all           deletes all of them at once

A copy is checked by importing every module that is left, by mypy, and by the quick tests of the rooms that lost something.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Wing:
    """Paths are relative to the root; one that ends in `/` is a folder."""

    product: tuple[str, ...]
    tests: tuple[str, ...]
    needs: tuple[str, ...] = ()  # wings that this one stands on: they are deleted only together with it


# The rows are in the order of the floors.
WINGS: dict[str, Wing] = {
    "nccl": Wing(("kvtransfer/nccl/",), ("tests/kvtransfer/test_nccl_connector.py",)),
    "speculation": Wing(
        ("engine/model/speculation/",),
        (
            "tests/engine/test_draft_model.py",
            "tests/engine/test_eagle.py",
            "tests/engine/model/test_ngram.py",
        ),
    ),
    "quantized": Wing(
        ("engine/model/quantized/",),
        ("tests/engine/model/quantized_files.py", "tests/engine/model/test_quantized.py"),
    ),
    "gguf": Wing(
        ("engine/model/gguf/",), ("tests/engine/model/gguf_files.py", "tests/engine/model/test_gguf.py")
    ),
    "images": Wing(
        ("engine/model/vision/",),
        (
            "tests/engine/test_images.py",
            "tests/engine/model/test_lone_tower.py",
            "tests/engine/model/test_image_processing.py",
        ),
    ),
    "lora": Wing(
        ("engine/model/lora/",),
        (
            "tests/engine/model/adapter_files.py",
            "tests/engine/model/test_adapter_slots.py",
            "tests/engine/model/test_lora.py",
            "tests/engine/model/test_lora_kernel.py",
        ),
    ),
    "vectors": Wing(("engine/model/vectors/",), ("tests/engine/model/test_vectors.py",)),
    "hidden states": Wing(("engine/model/hidden_states/",), ("tests/engine/model/test_hidden_states.py",)),
    "simulator": Wing(("simulator/",), ("tests/simulator/",)),
    "static hosts": Wing(("cluster/static_hosts/",), ("tests/cluster/static_hosts/",)),
}


def lies_in(file: str, paths: Iterable[str]) -> bool:
    return any(file.startswith(path) if path.endswith("/") else file == path for path in paths)


def wing_of(file: str) -> str | None:
    return next((name for name, wing in WINGS.items() if lies_in(file, wing.product)), None)


def with_dependents(names: Iterable[str]) -> list[str]:
    """These wings and those that stand on them."""
    taken = set(names)
    while more := {name for name, wing in WINGS.items() if taken & set(wing.needs)} - taken:
        taken |= more
    return [name for name in WINGS if name in taken]


@cache
def tracked() -> tuple[str, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )  # fmt: skip
    return tuple(
        file for file in listed.stdout.splitlines() if (ROOT / file).is_file() or (ROOT / file).is_symlink()
    )


def modules_of(paths: Iterable[str]) -> set[str]:
    return {module_of(file) for file in tracked() if file.endswith(".py") and lies_in(file, paths)}


def module_of(file: str) -> str:
    return "tandem." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_in(file: str) -> Iterator[tuple[int, str]]:
    """Every module of ours that a file imports, anywhere in it: type checking needs them, too."""
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{each.name}") for each in node.names)


def who_imports(names: Iterable[str], files: Iterable[str]) -> list[str]:
    """Lines of the given files, outside these wings, that import a module of one."""
    paths = [path for name in names for path in (*WINGS[name].product, *WINGS[name].tests)]
    gone = modules_of(path for name in names for path in WINGS[name].product)
    return [
        f"{file}:{line} imports {module}"
        for file in files
        if file.endswith(".py") and not lies_in(file, paths)
        for line, module in imported_in(file)
        if module in gone
    ]


def copy_without(names: Iterable[str], folder: Path) -> None:
    paths = [path for name in names for path in (*WINGS[name].product, *WINGS[name].tests)]
    for file in tracked():
        target = folder / file
        if lies_in(file, paths) or (
            file.startswith("tandem/") and lies_in(file.removeprefix("tandem/") + "/", paths)
        ):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / file).is_symlink():
            target.symlink_to((ROOT / file).readlink())
        else:
            target.write_bytes((ROOT / file).read_bytes())


_IMPORT_ALL = """
import importlib, sys
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tandem"):
            raise
"""
# What a machine without GPUs or a compiled library cannot import, is not imported.
_NOT_IMPORTED = ("tandem.manifests", "tandem.kernels.build")


def check_without(names: list[str], tests: bool) -> bool:
    """Deletes these wings in a copy. Prints what fails, and returns whether all is well."""
    gone = with_dependents(names)
    with tempfile.TemporaryDirectory(prefix="wings-") as made:
        folder = Path(made)
        copy_without(gone, folder)
        rooms = {path.name for path in (folder / "tandem").iterdir() if path.is_symlink()}
        left = [
            module_of(file.relative_to(folder).as_posix())
            for room in sorted(rooms)
            for file in sorted((folder / room).rglob("*.py"))
        ]
        steps: list[tuple[str, list[str]]] = [
            ("imports", [sys.executable, "-c", _IMPORT_ALL, *(each for each in left if not each.startswith(_NOT_IMPORTED))]),
            ("types", [sys.executable, "-m", "mypy", "--cache-dir", str(ROOT / ".mypy_cache"), "-p", "tandem"]),
        ]  # fmt: skip
        if tests:
            lost = {path.split("/")[0] for name in gone for path in WINGS[name].product}
            where = [f"tests/{room}" for room in sorted(lost) if (folder / "tests" / room).is_dir()]
            quick = "not slow and not integration and not more"
            steps.append(("tests", [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", quick, *where]))
        whole = True
        for what, command in steps:
            ended = subprocess.run(
                command, cwd=folder, env=_environment(folder), capture_output=True, text=True, check=False
            )
            whole = whole and ended.returncode == 0
            print(
                f"without {', '.join(gone)}: {what} {'hold' if ended.returncode == 0 else 'FAIL'}", flush=True
            )
            if ended.returncode != 0:
                print("\n".join((ended.stdout + ended.stderr).strip().splitlines()[-40:]), flush=True)
        return whole


def _environment(folder: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(folder)}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.wings", description="Deletes wings in a copy of the tree."
    )
    parser.add_argument("names", nargs="*", choices=[*WINGS, []], metavar="NAME")
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--no-tests", action="store_true", help="imports and types only")
    options = parser.parse_args()
    if not (options.names or options.each or options.all):
        for name, wing in WINGS.items():
            lines = sum(
                len((ROOT / file).read_text().splitlines())
                for file in tracked()
                if lies_in(file, wing.product)
            )
            print(f"{name:24} {lines:6} lines", *who_imports([name], tracked()), sep="\n    ")
        return 0
    runs = [[name] for name in WINGS] if options.each else [list(WINGS) if options.all else options.names]
    results = [check_without(names, not options.no_tests) for names in runs]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
