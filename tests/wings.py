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
from collections.abc import Iterable
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
    "vllm": Wing(("engine/vllm/",), ("tests/engine/vllm/", "tests/vllm/", "tests/cluster/commands/test_engines.py")),
    "nccl": Wing(("kvtransfer/nccl/",), ("tests/kvtransfer/nccl/", "tests/integration/test_nccl_connector.py")),
    "object store": Wing(("kvtransfer/objects/",), ("tests/kvtransfer/objects/",), ("tiers",)),
    "formats": Wing(
        ("api/formats/",),
        (
            "tests/api/formats/",
            "tests/router/test_router_tools.py",
            "tests/router/test_router_reasoning.py",
            "tests/router/test_router_call_grammars.py",
            "tests/clients/test_harmony_library.py",
        ),
    ),
    "images in messages": Wing(("api/images/",), ("tests/router/test_router_images.py",)),
    "prompt embeds": Wing(
        ("api/prompt_embeds/",), ("tests/api/prompt_embeds/", "tests/router/test_router_prompt_embeds.py")
    ),
    "realtime": Wing(
        ("router/realtime/", "api/realtime/", "http_server/websocket.py"),
        ("tests/router/realtime/", "tests/integration/test_serve_realtime.py"),
    ),
    "other deployments": Wing(("router/other_models/",), ("tests/router/other_models/",)),
    "siblings": Wing(("router/processes/",), ("tests/router/processes/",)),
    "simulator": Wing(
        ("simulator/",),
        ("tests/simulator/", "tests/benchmarks/test_autoscaler.py"),
        ("autoscaling", "trace and why", "replay", "bench"),
    ),
    "static hosts": Wing(("cluster/static_hosts/",), ("tests/cluster/static_hosts/",)),
    "tiers": Wing(
        ("kvtransfer/offload/", "wire/sharing.py"),
        (
            "tests/kvtransfer/offload/",
            "tests/engine/scheduling/test_tiers.py",
            "tests/engine/test_tiers_text.py",
            "tests/node/test_node_tiers.py",
            "tests/integration/test_pairs_random.py",
            "tests/integration/test_ranks_random.py",
            "tests/integration/test_restarted_readers.py",
            "tests/integration/test_serve_tiers.py",
            "tests/integration/test_shared_tiers.py",
            "tests/integration/test_shared_tiers_random.py",
            "tests/integration/test_tiers_between_engines.py",
        ),
    ),
    "messages": Wing(("router/messages/", "api/anthropic/"), ("tests/router/messages/",)),
    "work": Wing(("engine/model/work/",), ("tests/engine/model/test_work.py",)),
    "kv events": Wing(("node/kv_events/",), ("tests/node/kv_events/",)),
    "trace and why": Wing(("cluster/trace/", "router/tracing/"), ("tests/cluster/trace/", "tests/router/tracing/")),
    "step costs": Wing(("node/step_costs/",), ("tests/node/step_costs/",)),
    "step trace": Wing(("node/step_trace/",), ("tests/node/step_trace/",)),
    "replay": Wing(("cluster/replay/",), ("tests/cluster/replay/",), ("step trace",)),
    "bench": Wing(("cluster/bench/", "loadgen/"), ("tests/cluster/bench/", "tests/loadgen/"), ("trace and why",)),
    "chaos": Wing(("cluster/chaos/",), ("tests/cluster/chaos/",)),
    "chat": Wing(("cluster/chat/",), ("tests/cluster/chat/",)),
    "picker": Wing(("cluster/picker/",), ("tests/cluster/picker/", "tests/clients/test_gateway.py")),
    "doctor": Wing(("cluster/doctor/",), ("tests/cluster/doctor/",)),
    "verify": Wing(
        ("cluster/verify/", "router/receipts/"),
        (
            "tests/cluster/verify/",
            "tests/router/receipts/",
            "tests/integration/test_verify.py",
            "tests/integration/test_verified_rollout.py",
        ),
    ),
    "quotes": Wing(("router/quotes/",), ("tests/router/quotes/", "tests/integration/test_quotes.py")),
    "foreign flags": Wing(("cluster/foreign_flags/",), ("tests/cluster/foreign_flags/",)),
    "ranks": Wing(
        ("node/ranks/", "engine/model/wide/", "kvtransfer/nixl/ranks/", "kvtransfer/offload/ranks.py"),
        (
            "tests/node/ranks/",
            "tests/kvtransfer/kv_wide_engine.py",
            "tests/kvtransfer/test_rank_lines.py",
            "tests/engine/vllm/test_rank_lines_of_vllm.py",
            "tests/kvtransfer/test_wide_caches.py",
            "tests/kvtransfer/test_wide_faults.py",
            "tests/kvtransfer/offload/test_tier_ranks.py",
            "tests/engine/model/test_stages.py",
            "tests/engine/model/test_quantized_ranks.py",
            "tests/engine/model/test_wide.py",
            "tests/integration/far_machines.py",
            "tests/integration/test_machines.py",
            "tests/integration/test_ranks.py",
            "tests/integration/test_serve_ranks.py",
            "tests/integration/test_spread_nodes.py",
        ),
    ),
    "divided prompts": Wing(
        ("engine/model/divided/",),
        (
            "tests/engine/model/divided/",
            "tests/integration/test_divided_handover.py",
            "tests/integration/test_pairs_random.py",
            "tests/integration/test_ranks_random.py",
            "tests/integration/test_serve_divided.py",
        ),
        ("ranks",),
    ),
    "speculation": Wing(
        ("engine/model/speculation/", "engine/scheduling/drafting/"),
        (
            "tests/engine/scheduling/test_drafting.py",
            "tests/engine/test_draft_model.py",
            "tests/engine/test_eagle.py",
            "tests/engine/test_mtp.py",
            "tests/engine/model/test_ngram.py",
            "tests/integration/test_own_heads.py",
        ),
    ),
    "quantized": Wing(
        ("engine/model/quantized/",),
        (
            "tests/engine/model/quantized_files.py",
            "tests/engine/model/test_quantized.py",
            "tests/engine/model/test_triton_ops.py",
            "tests/engine/model/test_quantized_ranks.py",
        ),
    ),
    "gguf": Wing(("engine/model/gguf/",), ("tests/engine/model/gguf_files.py", "tests/engine/model/test_gguf.py")),
    "encoder and decoder": Wing(
        ("engine/model/crossed/",),
        (
            "tests/engine/model/test_crossed.py",
            "tests/engine/model/tiny_crossed.py",
            "tests/integration/test_crossed_served.py",
        ),
    ),
    "images": Wing(
        ("engine/model/vision/", "engine/scheduling/encoding/"),
        (
            "tests/engine/cache/test_encoder_cache.py",
            "tests/engine/test_images.py",
            "tests/engine/model/test_lone_tower.py",
            "tests/engine/model/test_image_processing.py",
        ),
    ),
    "gpu health": Wing(
        ("node/gpu_health/", "cluster/pools/gpu_health/"), ("tests/node/gpu_health/", "tests/cluster/pools/gpu_health/")
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
    "vectors": Wing(
        ("engine/model/vectors/", "router/vectors/", "api/vectors/"),
        ("tests/engine/model/test_vectors.py", "tests/router/vectors/"),
    ),
    "grammars": Wing(
        ("engine/structured/", "node/grammar/"), ("tests/engine/structured/", "tests/engine/model/test_device_order.py")
    ),
    "fused models": Wing(
        ("engine/model/fused/",),
        (
            "tests/engine/model/recording.py",
            "tests/engine/model/test_decode_graphs.py",
            "tests/engine/model/test_fp8_kv.py",
            "tests/engine/model/test_fused.py",
            "tests/engine/model/test_lora_kernel.py",
            "tests/engine/model/test_planning_ahead.py",
            "tests/engine/model/test_quantized.py",
            "tests/engine/model/test_recorded_steps.py",
        ),
    ),
    "cuda": Wing(
        ("engine/model/cuda/",),
        (
            "tests/engine/model/fake_flashinfer.py",
            "tests/engine/model/test_cuda.py",
            "tests/engine/model/test_decode_graphs.py",
            "tests/engine/model/test_device_order.py",
            "tests/engine/model/test_exact_on_gpus.py",
            "tests/engine/model/test_flashinfer_package.py",
            "tests/engine/model/test_flashinfer_plan.py",
            "tests/engine/model/test_fp8_kv.py",
            "tests/engine/model/test_fused.py",
            "tests/engine/model/test_latents.py",
            "tests/engine/model/test_planning_ahead.py",
            "tests/engine/model/test_quantized.py",
            "tests/engine/model/test_triton_ops.py",
            "tests/engine/model/test_wide.py",
        ),
    ),
    "recurrent states": Wing(
        ("engine/cache/states/", "engine/model/recurrent/"),
        (
            "tests/engine/cache/test_checkpoints.py",
            "tests/engine/cache/test_state_slots.py",
            "tests/engine/model/test_recurrent_models.py",
            "tests/engine/model/test_state_layout.py",
        ),
    ),
    "own attention": Wing(
        ("engine/model/own_attention/",),
        ("tests/engine/model/every_class.py", "tests/engine/model/test_every_class.py"),
    ),
    "latents": Wing(
        ("engine/model/latents/",),
        ("tests/engine/model/test_flashinfer_package.py", "tests/engine/model/test_latents.py"),
    ),
    "exact": Wing(("engine/model/exact/",), ("tests/engine/model/exact/",)),
    "hidden states": Wing(
        ("engine/model/hidden_states/",),
        ("tests/engine/model/test_hidden_states.py", "tests/integration/test_own_heads.py"),
    ),
    "autoscaling": Wing(
        ("cluster/pools/autoscaling/",),
        ("tests/cluster/pools/autoscaling/", "tests/cluster/pools/foresight/test_steps_by_load.py"),
    ),
    "foresight": Wing(
        ("cluster/pools/foresight/",),
        (
            "tests/cluster/pools/foresight/",
            "tests/benchmarks/test_autoscaler.py",
            "tests/integration/test_graded_forecast.py",
        ),
    ),
    "rollouts": Wing(("cluster/pools/rollouts/",), ("tests/cluster/pools/rollouts/",)),
    "adapters": Wing(("cluster/adapters/",), ("tests/cluster/adapters/",)),
    "canary": Wing(("node/canary/",), ("tests/node/canary/", "tests/engine/test_mixed_runs.py")),
    "batches": Wing(
        ("router/batches/", "api/batches/", "cluster/batches/"),
        ("tests/router/batches/", "tests/cluster/batches/", "tests/integration/test_serve_batch.py"),
        ("messages",),
    ),
    "responses": Wing(("router/responses/", "api/responses/"), ("tests/router/responses/",)),
    "encoder nodes": Wing(
        ("encode_node/", "node/encoders/", "wire/encoding.py"),
        ("tests/encode_node/", "tests/integration/test_encoder_nodes.py"),
    ),
    "pins": Wing(
        ("engine/scheduling/pins/",), ("tests/engine/scheduling/pins/", "tests/router/test_router_jobs_at_nodes.py")
    ),
}


def documented() -> list[str]:
    """The rows of the table in docs/architecture.md."""
    return [
        f"| {name} | {', '.join(f'`{path}`' for path in wing.product)} | {', '.join(wing.needs) or '–'} |"
        for name, wing in sorted(WINGS.items())
    ]


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
    return tuple(file for file in listed.stdout.splitlines() if (ROOT / file).is_file() or (ROOT / file).is_symlink())


def modules_of(paths: Iterable[str]) -> set[str]:
    listed = tuple(paths)
    return {module_of(file) for file in tracked() if file.endswith(".py") and lies_in(file, listed)}


def module_of(file: str) -> str:
    return "tandem." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def imported_in(file: str) -> list[tuple[int, str]]:
    """Every module of ours that a file imports, anywhere in it: type checking needs them, too."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, each.name) for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(node.lineno, f"{node.module}.{each.name}") for each in node.names]
            found.append((node.lineno, node.module))
    return [(line, name) for line, name in found if name.startswith("tandem.")]


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
        if lies_in(file, paths) or (file.startswith("tandem/") and lies_in(file.removeprefix("tandem/") + "/", paths)):
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
# An installation for development finds the rooms of its own tree, also those that a copy lost.
_ONLY_HERE = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "__editable__" not in repr(each)]
"""
# What a machine without GPUs or a compiled library cannot import, is not imported.
_NOT_IMPORTED = ("tandem.manifests", "tandem.kernels.build")


def check_without(names: list[str], tests: bool) -> bool:
    """Deletes these wings in a copy. Prints what fails, and returns whether all is well."""
    gone = with_dependents(names)
    with tempfile.TemporaryDirectory(prefix="wings-") as made:
        folder = Path(made)
        copy_without(gone, folder)
        (folder / "sitecustomize.py").write_text(_ONLY_HERE)
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
            print(f"without {', '.join(gone)}: {what} {'hold' if ended.returncode == 0 else 'FAIL'}", flush=True)
            if ended.returncode != 0:
                print("\n".join((ended.stdout + ended.stderr).strip().splitlines()[-40:]), flush=True)
        return whole


def _environment(folder: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(folder)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.wings", description="Deletes wings in a copy of the tree.")
    parser.add_argument("names", nargs="*", choices=[*WINGS, []], metavar="NAME")
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--no-tests", action="store_true", help="imports and types only")
    options = parser.parse_args()
    if not (options.names or options.each or options.all):
        for name, wing in WINGS.items():
            lines = sum(
                len((ROOT / file).read_text().splitlines()) for file in tracked() if lies_in(file, wing.product)
            )
            print(f"{name:24} {lines:6} lines", *who_imports([name], tracked()), sep="\n    ")
        return 0
    runs = [[name] for name in WINGS] if options.each else [list(WINGS) if options.all else options.names]
    results = [check_without(names, not options.no_tests) for names in runs]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
