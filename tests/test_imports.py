"""The floors of the house, read from the code itself: who may import whom, and where the heavy parts may stand."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Every package is imported as tandem.<package>; tandem/ holds a link to each folder.
NAME = "tandem"
# package -> what it may import of ours. A dotted name allows that module alone. Errors are one tree, so floors that need
# nothing else of ours may raise them.
MAY_IMPORT: dict[str, set[str]] = {
    "base": set(),
    "wire": {"base"},
    "machine": {"base.errors"},
    "kernels": set(),
    "loadgen": {"base.errors", "base.flags", "base.percentile"},
    "kvtransfer": {"base", "wire"},
    "api": {"base", "wire"},
    "http_server": {"base"},
    "router": {"api", "base", "http_server", "wire"},
    "engine": {
        "base",
        "kernels",
        "kvtransfer.base",
        "kvtransfer.config",
        "machine",
        "wire.adapters",
        "wire.embeds",
        "wire.images",
        "wire.kv_events",
        "wire.nodes",
        "wire.pooling",
        "wire.requests",
        "wire.sampling",
        "wire.tracing",
    },
    "node": {"base", "engine", "kvtransfer", "machine", "wire"},
    "prefill_node": {"base", "node", "engine", "kvtransfer", "wire"},
    "decode_node": {"base", "node", "engine", "kvtransfer", "wire"},
    "encode_node": {"base", "engine", "machine", "node", "wire"},
    "simulator": {
        "api",
        "base",
        "cluster.api_client",
        "cluster.commands.address",
        "cluster.commands.operate",
        "cluster.commands.output",
        "cluster.commands.parser",
        "cluster.commands.router_url",
        "cluster.commands.setting_options",
        "cluster.config",
        "cluster.control",
        "cluster.describe",
        "cluster.orders",
        "cluster.pools",
        "cluster.replay.reading",
        "cluster.saving",
        "cluster.tasks",
        "cluster.trace.why",
        "cluster.wings",
        "decode_node",
        "engine",
        "kvtransfer.base",
        "kvtransfer.config",
        "loadgen",
        "node",
        "prefill_node",
        "router",
        "wire",
    },
    "cluster": {
        "api",
        "base",
        "decode_node",
        "encode_node",
        "engine",
        "http_server.certificate",
        "kernels",
        "kvtransfer",
        "loadgen",
        "machine",
        "node",
        "prefill_node",
        "router",
        "wire",
    },
}
# A folder of cluster/ -> what it may import of the others. All of them may import what lies in cluster/ itself.
WITHIN_CLUSTER: dict[str, set[str]] = {
    "settings": {"models"},
    "pools": set(),
    "models": set(),
    "static_hosts": set(),
    "foreign_flags": set(),
    "adapters": {"commands", "pools", "settings"},
    "on_ray": {"pools", "models"},
    "commands": {"settings", "pools", "models", "on_ray"},
    "trace": {"commands"},
    "replay": {"commands"},
    "bench": {"commands", "models", "trace"},
    "offline": set(),
    "batches": {"commands", "offline"},
    "chaos": {"commands", "on_ray"},
    "doctor": {"commands", "models", "pools"},
    "chat": {"commands"},
    "verify": {"commands"},
    "picker": {"commands"},
}
MAY_IMPORT_RAY = (
    "cluster/on_ray/",
    "cluster/static_hosts/",
    "prefill_node/actor.py",
    "decode_node/actor.py",
    "encode_node/actor.py",
)
# An import of these takes seconds and hundreds of megabytes.
HEAVY = {"torch", "transformers"}
WITHOUT_HEAVY_PARTS = ("base", "wire", "machine", "loadgen", "api", "http_server", "router", "cluster", "simulator")
# They run what they read.
UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
UNPICKLING_METHODS = {"recv_pyobj", "send_pyobj"}


@dataclass(frozen=True)
class Import:
    file: str  # relative to the root
    line: int
    module: str
    at_import_time: bool  # False inside functions and under TYPE_CHECKING

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def source_files(package: str) -> Iterator[Path]:
    return (path for path in sorted((ROOT / package).rglob("*.py")) if "__pycache__" not in path.parts)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports_in(tree: ast.Module, file: str) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, at_import_time: bool) -> None:
        match node:
            case ast.Import(names=names):
                found.extend(Import(file, node.lineno, ours(alias.name), at_import_time) for alias in names)
            case ast.ImportFrom(module=module, level=level, names=names):
                inside = file.split("/")[:-level] if level else []
                base = ours(".".join([*inside, *([module] if module else [])]))
                # `from wire import sockets` may name a module.
                targets = [f"{base}.{alias.name}" for alias in names] if is_package(base) else [base]
                found.extend(Import(file, node.lineno, target, at_import_time) for target in targets)
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                found.append(Import(file, node.lineno, ours(name), at_import_time))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_type_checking(node):
            at_import_time = False
        for child in ast.iter_child_nodes(node):
            visit(child, at_import_time)

    visit(tree, True)
    return found


def ours(module: str) -> str:
    """A module of ours without the name that it is installed under."""
    return module.removeprefix(NAME + ".")


def is_package(module: str) -> bool:
    return bool(module) and (ROOT / module.replace(".", "/")).is_dir()


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@cache
def all_imports(package: str) -> list[Import]:
    return [
        found for path in source_files(package) for found in imports_in(parse(path), path.relative_to(ROOT).as_posix())
    ]


def is_allowed(found: Import, package: str) -> bool:
    if found.top == package or found.top not in MAY_IMPORT:
        return True
    return any(found.module == name or found.module.startswith(name + ".") for name in MAY_IMPORT[package])


def fail_with(offences: list[Import], rule: str) -> None:
    if offences:
        pytest.fail(rule + "\n" + "\n".join(f"  {offence}" for offence in offences), pytrace=False)


def test_every_package_of_the_house_is_in_the_table() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/py.typed")} - {NAME}
    assert packages == set(MAY_IMPORT), "a package without a floor, or a floor without a package"


def test_every_package_has_its_link_and_nothing_is_imported_by_the_name_of_its_folder() -> None:
    links = {path.name: path.resolve() for path in (ROOT / NAME).iterdir() if path.is_symlink()}
    # manifests/ is data: `tandem init` copies it.
    assert links == {package: ROOT / package for package in (*MAY_IMPORT, "manifests")}
    plain = re.compile(r"^\s*(?:from|import) (" + "|".join(MAY_IMPORT) + r")\b", re.MULTILINE)
    folders = [*MAY_IMPORT, "benchmarks", "tests"]
    offences = [
        f"{path.relative_to(ROOT)}: {found[0].strip()}"
        for folder in folders
        for path in source_files(folder)
        if path.name != "test_imports.py"
        for found in plain.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not offences, "a user's own module of that name would be imported: " + "; ".join(offences)


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_package_imports_only_from_floors_below_it(package: str) -> None:
    offences = [found for found in all_imports(package) if not is_allowed(found, package)]
    allowed = ", ".join(sorted(MAY_IMPORT[package])) or "nothing of ours"
    fail_with(offences, f"{package}/ may import {allowed}:")


def test_every_folder_of_cluster_is_in_the_table() -> None:
    folders = {path.parent.name for path in ROOT.glob("cluster/*/__init__.py")}
    assert folders == set(WITHIN_CLUSTER), "a folder without a place, or a place without a folder"


@pytest.mark.parametrize("folder", sorted(WITHIN_CLUSTER))
def test_a_folder_of_cluster_imports_only_from_those_below_it(folder: str) -> None:
    forbidden = {f"cluster.{other}" for other in set(WITHIN_CLUSTER) - WITHIN_CLUSTER[folder] - {folder}}
    forbidden.add("cluster.cli")
    offences = [
        found
        for found in all_imports("cluster")
        if found.file.startswith(f"cluster/{folder}/")
        and any(found.module == name or found.module.startswith(name + ".") for name in forbidden)
    ]
    allowed = ", ".join(sorted(WITHIN_CLUSTER[folder])) or "no other folder of it"
    fail_with(offences, f"in cluster/, {folder}/ may import {allowed}:")


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def cycle_among(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, each the next and the last the first; [] when there are none."""
    left = {module: set(targets) for module, targets in imports.items()}
    while free := [module for module, targets in left.items() if not targets & left.keys()]:
        for module in free:
            del left[module]
    path: list[str] = []
    module = min(left, default="")
    while left and module not in path:
        path.append(module)
        module = min(left[module] & left.keys())
    return path[path.index(module) :] if path else []


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_no_modules_import_each_other(package: str) -> None:
    """Nor under TYPE_CHECKING: two modules that need each other's types are one module, or need a third."""
    imports: dict[str, set[str]] = {module_of(found.file): set() for found in all_imports(package)}
    for found in all_imports(package):
        target = found.module if found.module in imports else found.module.rpartition(".")[0]
        imports[module_of(found.file)].add(target)
    cycle = cycle_among(imports)
    assert not cycle, f"these import each other: {' → '.join([*cycle, cycle[0]])}"


@pytest.mark.parametrize(
    "folder",
    sorted(
        path.parent.relative_to(ROOT).as_posix()
        for package in MAY_IMPORT
        for path in (ROOT / package).glob("**/__init__.py")
    ),
)
def test_a_package_says_where_everything_in_it_is(folder: str) -> None:
    """A wing's README.md lists its files, the docstring of any other package."""
    there = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}
    there |= {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
    page = ROOT / folder / "README.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    if "docstring" in text.partition("Files:")[2] or not page.is_file():
        text = ast.get_docstring(parse(ROOT / folder / "__init__.py")) or ""
    said = set(re.findall(r"\w+", text))
    missing = sorted(there - said)
    assert len(there) <= 2 or not missing, f"{folder} does not say what these are: {missing}"


def test_ray_stands_only_where_it_is_the_subject() -> None:
    offences = [
        found
        for package in MAY_IMPORT
        for found in all_imports(package)
        if found.top == "ray" and not found.file.startswith(MAY_IMPORT_RAY)
    ]
    fail_with(offences, f"ray may be imported in {' and '.join(MAY_IMPORT_RAY)} only:")


def test_nixl_stands_only_in_kvtransfer() -> None:
    offences = [
        found
        for package in MAY_IMPORT
        for found in all_imports(package)
        if found.top.startswith("nixl") and package != "kvtransfer"
    ]
    fail_with(offences, "nixl may be imported in kvtransfer/ only:")


def test_nothing_that_unpickles_is_imported_or_called() -> None:
    offences = [found for package in MAY_IMPORT for found in all_imports(package) if found.top in UNPICKLERS]
    for package in MAY_IMPORT:
        for path in source_files(package):
            for node in ast.walk(parse(path)):
                if isinstance(node, ast.Attribute) and node.attr in UNPICKLING_METHODS:
                    offences.append(
                        Import(path.relative_to(ROOT).as_posix(), node.lineno, f".{node.attr}", at_import_time=False)
                    )
    fail_with(offences, "bytes from outside are decoded with msgspec, never unpickled:")


def test_an_interpreter_that_is_started_imports_nothing_from_the_current_folder() -> None:
    """Python would look there first: a user's own `random.py` would be imported, or a folder `tandem`."""
    offences = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for package in MAY_IMPORT
        for path in source_files(package)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable"
        if ast.unparse(node.elts[1]) not in ("'-P'", "'-I'")
    ]
    assert offences == []


@pytest.mark.parametrize("package", WITHOUT_HEAVY_PARTS)
def test_no_module_asks_for_torch_when_it_is_imported(package: str) -> None:
    offences = [found for found in all_imports(package) if found.top in HEAVY and found.at_import_time]
    fail_with(offences, f"{package}/ may import {' and '.join(sorted(HEAVY))} inside functions only:")


@pytest.mark.slow
def test_importing_the_light_packages_does_not_bring_torch_along() -> None:
    """Through whatever they import in turn. Slow: an interpreter of its own imports all of it."""
    modules = [
        f"{NAME}.{module_of(path.relative_to(ROOT).as_posix())}"
        for package in WITHOUT_HEAVY_PARTS
        for path in source_files(package)
    ]
    script = (
        "import importlib, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        f"    heavy = {sorted(HEAVY)!r}\n"
        "    found = [name for name in heavy if name in sys.modules]\n"
        "    if found: sys.exit(f'importing {module} imports {found}')\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", script, *modules], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert child.returncode == 0, child.stderr.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["cluster.on_ray.remote_controller", "cluster.on_ray.controller_actor"])
def test_who_only_starts_nodes_and_routers_imports_neither(module: str) -> None:
    """Each start waits for the command and for the controller. Slow: runs an interpreter."""
    theirs = ["numpy", "starlette", "llguidance", f"{NAME}.router.server", f"{NAME}.engine.core"]
    script = f"import sys, {NAME}.{module}\nprint([name for name in {theirs!r} if name in sys.modules])"
    child = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    assert child.stdout.strip() == "[]"


# --- the reader itself


def read(source: str, file: str = "engine/sample.py") -> list[Import]:
    return imports_in(ast.parse(source), file)


def test_the_reader_sees_every_way_to_import() -> None:
    source = (
        "import ray\nfrom tandem.wire import sockets\nfrom tandem.wire.nodes import Role\nfrom . import core\n"
        "def f():\n    import torch\n"
        "if TYPE_CHECKING:\n    import transformers\n"
        "importlib.import_module('nixl._api')\n"
    )
    found = {(each.module, each.at_import_time) for each in read(source)}
    assert found == {
        ("ray", True),
        ("wire.sockets", True),
        ("wire.nodes", True),
        ("engine.core", True),
        ("torch", False),
        ("transformers", False),
        ("nixl._api", True),
    }


def test_the_table_refuses_what_is_not_in_it() -> None:
    forbidden = [
        "from tandem.wire import sockets",
        "import tandem.router.config",
        "from tandem.kvtransfer.registry import find",
    ]
    assert not any(is_allowed(found, "engine") for source in forbidden for found in read(source))
    allowed = [
        "from tandem.kvtransfer.base import TransferConfig",
        "from tandem.engine.core import Engine",
        "import numpy",
    ]
    assert all(is_allowed(found, "engine") for source in allowed for found in read(source))


def test_modules_that_import_each_other_are_found() -> None:
    assert cycle_among({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]
    assert cycle_among({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
