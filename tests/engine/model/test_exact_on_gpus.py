"""`model.exact: require` on a GPU, as far as a CPU can tell: all that a step sums up is put together as on a card, with products of a row at
a time and a stand-in for FlashInfer whose bits depend on the step as the library's do. Whether a card's own kernels keep the
promise, a node tries when it loads the model; here bugs are put in, and the load is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.base.errors import ConfigurationError
from tandem.base.wings import find_wing
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.model import capabilities, paths
from tandem.engine.model.checkpoint import read_config
from tandem.engine.model.cuda import capability, decode_graphs, flashinfer, same_bits, step_memory, triton_ops
from tandem.engine.model.cuda.decode_graphs import DecodeGraphs
from tandem.engine.model.cuda.pieces import DevicePieces
from tandem.engine.model.fused import find
from tandem.engine.model.runner import Batch, LayerHooks
from tandem.engine.model.source import find_source
from tandem.engine.model.torch_runner import TorchRunner
from tests.engine.model import fake_flashinfer, tiny
from tests.engine.model.driver import load
from tests.engine.model.fake_device import CUDA
from tests.engine.model.lives import PROMISED, Lives, alone, prompts_of
from tests.engine.model.recording import record
from tests.more import more

EXACT = "tandem.engine.model.exact.capability"


class Tiles(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    """Its tiles depend on the rows of requests, and it splits keys if requests are few, unless it must not."""

    def plan(self, starts: torch.Tensor, *given: torch.Tensor, **options: Any) -> None:
        super().plan(starts, *given, **options)
        few = len(starts) < 9 and self._options["splits"]
        self._otherwise = few or bool((starts.diff() > 1).any())

    def run(self, query: torch.Tensor, kv_cache: Any, *, out: torch.Tensor) -> torch.Tensor:
        super().run(query, kv_cache, out=out)
        return out.mul_(1.01) if self._otherwise else out


@pytest.fixture(autouse=True)
def as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a card with Triton and FlashInfer, and its steps of up to 16 tokens are recorded."""
    library = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Tiles)
    monkeypatch.setattr(capability, "capability", capability.OnCuda)
    if (exact := find_wing(EXACT)) is not None:  # it knows that this is no card
        monkeypatch.setattr(exact, "capability", lambda _: None)
    monkeypatch.setattr(flashinfer, "find_library", lambda: library)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1 << 10)
    monkeypatch.setattr(flashinfer, "_HEAD_DIMS", range(300))
    monkeypatch.setattr(decode_graphs, "CudaRecorder", lambda _: record)
    monkeypatch.setattr(decode_graphs, "_SHORT_PROMPT", 16)
    monkeypatch.setattr(step_memory, "bytes_of_step", lambda *_: 0)


def runner_for(path: Path, exact: str = "require") -> TorchRunner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "pieces_for", lambda *_: DevicePieces(exact=exact == "require"))
        return load(path, native=False, dtype="bfloat16", exact=exact, max_num_seqs=8, num_speculative_tokens=4)


@pytest.mark.parametrize("kind", [PROMISED[0], *more(PROMISED[1:])])
def test_no_company_changes_a_bit(kind: str, tmp_path: Path) -> None:
    path = tiny.save(kind, tmp_path)
    nodes = [runner_for(path), runner_for(path)]
    assert not any(node.kv_cache.any() for node in nodes)
    prompts = prompts_of(random.Random(kind))
    with torch.inference_mode():
        right = alone(nodes[0], prompts)
        happened: set[str] = set()
        seed = 3
        while len(happened) < 5:  # of: prefix found, preempted, handed over, mirrored, failed over, drafts accepted
            lives = Lives(nodes, prompts, seed)
            assert lives.run(right) == right
            happened.update(lives.happened)
            seed += 2
    assert nodes[0].forward.num_replays  # type: ignore[attr-defined]


def _chunks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(flashinfer, "as_rows", lambda host: host)


def _splits(patch: pytest.MonkeyPatch) -> None:
    plan = Tiles.plan
    patch.setattr(Tiles, "plan", lambda *a, **k: plan(*a, **{**k, "disable_split_kv": False}))


def _products(patch: pytest.MonkeyPatch) -> None:
    product = triton_ops.product_by_rows

    def by_rows(x: torch.Tensor, **matrix: Any) -> torch.Tensor:
        return product(x, **matrix) * (1.01 if x.shape[-2] > 8 else 1.0)

    patch.setattr(triton_ops, "product_by_rows", by_rows)


def _replays(patch: pytest.MonkeyPatch) -> None:
    compute = DecodeGraphs.__call__

    def wrong_in_replays(graphs: DecodeGraphs, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        return compute(graphs, batch, hooks) * (1.01 if graphs.replays(batch) else 1.0)

    patch.setattr(DecodeGraphs, "__call__", wrong_in_replays)


def _norms(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(find, "_norm_in", lambda *_: None)


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        (_chunks, "other bits for the same tokens in parts and in a batch"),
        (_splits, "other bits for the same tokens in parts and in a batch"),
        (_products, "other bits for the same tokens in parts and in a batch"),
        (_replays, "other bits for the same tokens in recorded steps"),
        (_norms, "torch would compute model.layers.0.input_layernorm"),
    ],
)
def test_a_card_with_other_bits_is_refused_when_the_model_is_loaded(
    bug: Callable[[pytest.MonkeyPatch], None], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.save("llama", tmp_path)
    bug(monkeypatch)
    with pytest.raises(ConfigurationError, match=r"llama.*require.*leave model.exact at auto") as refused:
        runner_for(path)
    assert said in str(refused.value)
    if bug is _splits:
        runner_for(path, "auto")


def test_without_flashinfer_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "find_library", lambda: None)
    with pytest.raises(ConfigurationError, match="FlashInfer does not attend"):
        runner_for(tiny.save("llama", tmp_path))


@pytest.mark.parametrize(
    ("kind", "dtype", "said"),
    [
        ("llama", torch.bfloat16, ""),
        ("qwen3", torch.bfloat16, ""),
        ("llama", torch.float32, "FlashInfer does not compute in torch.float32"),
        ("llama", torch.float16, "the dtype is torch.float16"),
        ("gemma3", torch.bfloat16, "the model is of type gemma3_text"),
    ],
)
def test_the_models_are_those_of_the_native_library(
    kind: str, dtype: torch.dtype, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (exact := find_wing(EXACT)) is None:
        pytest.skip("the wing model.exact is not there")
    source = find_source(str(tiny.save(kind, tmp_path)))
    model, config = ModelConfig(path=str(source.folder), exact="require"), read_config(source)
    loading = capabilities.ModelLoad(
        model, CacheConfig(), SchedulerConfig(), source, config, dtype, CUDA, 1, lambda *_: None
    )
    required = exact.RequiredBits(loading)
    if said:
        with pytest.raises(ConfigurationError, match=said):
            required.on_general_path("the device is cuda:0")
        return
    required.on_general_path("the device is cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.2")
    ways = {same_bits.way_of_computing(CUDA, size) for size in (16, 32)}
    assert len(ways) == 2
    assert all(f"NVIDIA-H200-torch-{torch.__version__}-triton-1.2-flashinfer-python-1.2-" in way for way in ways)
