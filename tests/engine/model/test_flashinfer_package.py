"""FlashInfer's own package, where it is installed (`make test-gpu-packages`): its Python layer takes our calls, on a device
that computes nothing, and writes the source of each kernel that they ask for."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.base.errors import InternalError
from tandem.engine.model.attention.interface import AttentionCall
from tandem.engine.model.attention.layers import AttentionLayer, plan_cache
from tandem.engine.model.cuda import flashinfer as ours
from tandem.engine.model.cuda import flashinfer_latents, prebuild
from tandem.engine.model.cuda.decode_inputs import DecodeInputs
from tandem.engine.model.cuda.flashinfer import FlashInferAttention
from tandem.engine.model.latents.attention import Expansion, LatentLayers
from tandem.engine.model.runner import Batch, HostBatch
from tests.engine.model.fake_device import CUDA, FakeDevice

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"),
    pytest.mark.slow,  # its import takes seconds
]

LAYERS = (
    AttentionLayer(0, 8, 2, 64, 64, None, scale=0.125),
    AttentionLayer(1, 8, 2, 64, 64, 32, scale=0.125),
    AttentionLayer(2, 8, 2, 64, 64, None, scale=0.25, softcap=30.0),
)


class Modules:
    """Stands where the compiled kernels would be, and notes what was asked of them."""

    def __init__(self) -> None:
        self.wanted: list[tuple[Any, ...]] = []
        self.plans: list[tuple[Any, ...]] = []
        self.num_runs = 0

    def get(self, *which: Any) -> Any:
        self.wanted.append(which)
        return SimpleNamespace(plan=self._plan, paged_run=self._run, ragged_run=None)

    def _plan(self, *given: Any) -> list[int]:
        self.plans.append(given)
        return [0] * 15

    def _run(self, *_: Any) -> None:
        self.num_runs += 1


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Modules:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    import flashinfer.prefill

    modules = Modules()
    monkeypatch.setattr(flashinfer.prefill, "get_batch_prefill_module", modules.get)
    monkeypatch.setattr(ours, "WORKSPACE_BYTES", 1 << 20)
    monkeypatch.setattr(ours, "agree", lambda *_: True)  # nothing is computed
    return modules


def attention(kept: torch.dtype = torch.bfloat16, *, exact: bool = False) -> FlashInferAttention:
    plan = plan_cache(LAYERS, 16)
    cache = torch.zeros(plan.shape(12), device=CUDA, dtype=kept)
    made = ours.find_library()
    assert made is not None
    return FlashInferAttention(made, cache, plan, LAYERS, 64, torch.bfloat16, exact=exact)


def host(counts: list[int], contexts: list[int], groups: int) -> HostBatch:
    total = sum(counts)
    return HostBatch(
        positions=np.concatenate([np.arange(c - n, c) for n, c in zip(counts, contexts, strict=True)]),
        query_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lens=np.array(contexts, np.int32),
        slot_mapping=(np.arange(16, 16 + total),) * groups,
        block_tables=(np.ones((len(counts), 4), np.int32),) * groups,
        logit_rows=np.zeros(0, np.int64),
    )


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_every_call_of_ours_is_one_that_it_takes(modules: Modules, capability: tuple[int, int]) -> None:
    device = FakeDevice()
    device.capability = capability
    with device.present(), torch.inference_mode():
        made = attention()
        made.try_out()
        groups = len(made.plan.groups)
        kinds = len(made.kinds)
        assert modules.num_runs == kinds * (2 if capability[0] == 9 else 1)
        # A prompt's chunk beside a decode, and recorded steps of three sizes.
        of_host = host([1, 20], [9, 37], groups)
        slots = tuple(torch.arange(16, 37, device=CUDA) for _ in range(groups))
        modules.num_runs = 0
        step = made.begin(_batch(of_host, slots))
        _attend(step, 21)
        assert modules.num_runs == len(LAYERS) * (2 if capability[0] == 9 else 1)
        for size in (4, 2, 1):
            inputs = DecodeInputs(size, 0, groups, 16, CUDA)
            fixed = made.fixed(inputs)
            fixed.prepare(None)
            _attend(fixed.begin(), size)
            fixed.prepare(host([1] * size, [20 + size] * size, groups))
    backends = {which[0] for which in modules.wanted}
    assert backends == ({"fa2", "fa3"} if capability[0] == 9 else {"fa2"})


def test_for_the_same_bits_each_token_is_planned_alone_and_no_keys_are_split(modules: Modules) -> None:
    """So the library's tiles, which its plan chooses by the rows of a request, are the same in each step, recorded or not."""
    with FakeDevice().present(), torch.inference_mode():
        made = attention(exact=True)
        made.try_out()
        groups, of_trial = len(made.plan.groups), len(modules.plans)
        slots = tuple(torch.arange(16, 37, device=CUDA) for _ in range(groups))
        _attend(made.begin(_batch(host([1, 20], [9, 37], groups), slots)), 21)
        fixed = made.fixed(DecodeInputs(4, 0, groups, 16, CUDA))
        fixed.prepare(None)
        _attend(fixed.begin(), 4)
    assert {which[0] for which in modules.wanted} == {"fa2"}
    for plan in modules.plans[of_trial:]:
        rows = plan[6]
        assert rows in (21, 4)
        assert plan[7] == rows  # as many requests
        assert plan[16:18] == (-1, True)  # no size of splits, and none


def test_keys_and_values_in_fp8(modules: Modules) -> None:
    with FakeDevice().present(), torch.inference_mode():
        made = attention(torch.float8_e4m3fn)
        made.try_out()
        groups = len(made.plan.groups)
        slots = tuple(torch.arange(16, 22, device=CUDA) for _ in range(groups))
        _attend(made.begin(_batch(host([5, 1], [37, 9], groups), slots)), 6)
    # Hopper's kernels want queries in FP8, too.
    assert {which[0] for which in modules.wanted} == {"fa2"}
    assert {which[1:3] for which in modules.wanted} == {(torch.bfloat16, torch.float8_e4m3fn)}


def test_a_product_in_fp8_blocks_is_a_call_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashinfer.gemm import fp8_blockscale_gemm_sm90
    from flashinfer.jit.gemm import fp8_blockscale

    inspect.signature(fp8_blockscale_gemm_sm90).bind(object(), object(), None, object())
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setattr(fp8_blockscale, "is_cuda_version_at_least", lambda _: True)
    spec = fp8_blockscale.gen_fp8_blockscale_gemm_sm90_module()
    assert all(Path(source).read_text() for source in spec.sources)


class Bound:
    """A class of the package whose methods take our calls, and compute nothing."""

    made: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        inspect.signature(type(self).made.__init__).bind(self, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        inspect.signature(type(self).made.plan).bind(self, *args, **kwargs)
        self._rows = int(kwargs["metadata"].qo_indptr[-1])
        self._heads, self._latent = kwargs["num_heads"], kwargs["head_dim_ckv"]

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        inspect.signature(type(self).made.run).bind(self, *args, **kwargs)
        return kwargs["query"].new_zeros(self._rows, self._heads, self._latent)


def test_our_calls_for_latents_are_ones_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    import flashinfer.mla

    monkeypatch.setattr(Bound, "made", flashinfer.mla.BatchMLAPagedAttentionWrapper, raising=False)
    monkeypatch.setattr(ours, "WORKSPACE_BYTES", 1 << 10)
    library = SimpleNamespace(
        mla=SimpleNamespace(MLAPlanMetadata=flashinfer.mla.MLAPlanMetadata, BatchMLAPagedAttentionWrapper=Bound)
    )
    layer = AttentionLayer(0, 16, 1, 576, 512, None, scale=0.1, latent=(512, 64), expanded=(192, 128))
    up = torch.zeros(16, 256, 512, dtype=torch.bfloat16)
    how = LatentLayers({0: Expansion(None, lambda *_: (up, up), 512, 64, up[:, :128], up[:, 128:])})
    assert flashinfer_latents.reason_against((layer,), how, torch.bfloat16) is None
    plan = plan_cache((layer,), 16)
    cache = torch.zeros(plan.shape(4), dtype=torch.bfloat16)
    made = flashinfer_latents.FlashInferLatents(library, cache, plan, (layer,), how, 64)
    with pytest.raises(InternalError, match="something else than torch"):
        made.try_out()
    of_host = host([1, 1], [9, 17], 1)
    fixed = made.fixed(DecodeInputs(2, 0, 1, 16, torch.device("cpu")))
    fixed.prepare(of_host)


def test_the_source_of_the_kernel_for_latents_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    from flashinfer.jit import gen_batch_mla_module

    element = torch.bfloat16
    spec = gen_batch_mla_module("fa2", element, element, element, torch.int32, 512, 64, False)
    assert all(Path(source).read_text() for source in spec.sources)


def _batch(of_host: HostBatch, slots: tuple[torch.Tensor, ...]) -> Batch:
    unused: Any = torch.zeros(1)
    return Batch(
        token_ids=unused, positions=unused, query_start=unused, context_lens=unused, slot_mapping=slots,
        block_tables=(), logit_rows=unused, num_decodes=0, host=of_host
    )  # fmt: skip


def _attend(step: Any, tokens: int) -> None:
    for layer in LAYERS:
        query, key, value = (
            torch.zeros(heads, tokens, 64, device=CUDA, dtype=torch.bfloat16)
            for heads in (layer.num_query_heads, layer.num_kv_heads, layer.num_kv_heads)
        )
        out = step.attend(layer.index, query, key, value, AttentionCall(layer.scale, layer.softcap))
        assert out.shape == (tokens, layer.num_query_heads, 64)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_source_of_each_kernel_is_written(
    dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    from flashinfer.jit.attention import modules

    for window in (False, True):
        for softcap in (False, True):
            for kept in (dtype, torch.float8_e4m3fn):
                spec = modules.gen_batch_prefill_module(
                    "fa2", dtype, kept, dtype, torch.int32, dim, dim, 0, window, softcap, False
                )
                assert len(spec.sources) >= 5
                assert all(Path(source).read_text() for source in spec.sources)


@pytest.mark.parametrize(
    ("kept", "capability"), [(torch.bfloat16, (9, 0)), (torch.bfloat16, (8, 0)), (torch.float8_e4m3fn, (9, 0))], ids=str
)
def test_an_image_has_the_modules_that_a_node_loads(
    kept: torch.dtype, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Full attention, with a window, and with capped scores: the names of the modules are FlashInfer's own."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0 9.0a")
    monkeypatch.setattr(ours, "WORKSPACE_BYTES", 1 << 20)
    monkeypatch.setattr(ours, "agree", lambda *_: True)  # nothing is computed
    from flashinfer.prefill import get_batch_prefill_module

    built = prebuild.specs([64], windows=True, softcaps=True, fp8=True)
    assert all(Path(source).read_text() for spec in built for source in spec.sources)
    device = FakeDevice()
    device.capability = capability
    get_batch_prefill_module.cache_clear()
    try:
        with device.present(), torch.inference_mode(), prebuild.noted() as loaded:
            attention(kept).try_out()
    finally:
        get_batch_prefill_module.cache_clear()
    names = {spec.name for spec in loaded}
    hopper = capability[0] == 9 and kept == torch.bfloat16
    assert len(names) == 3 * (2 if hopper else 1)
    assert names <= {spec.name for spec in built}
    if kept == torch.bfloat16:
        usual = {spec.name for spec in prebuild.specs([64])}
        assert len(usual) == 2
        assert usual & names


def test_an_image_can_have_the_modules_of_latents_and_of_weights_in_fp8(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from flashinfer.jit.gemm import fp8_blockscale

    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setattr(fp8_blockscale, "is_cuda_version_at_least", lambda _: True)
    more = prebuild.specs([128], latents=True, fp8_weights=True)
    assert len(more) == len(prebuild.specs([128])) + 2
    assert all(Path(source).read_text() for spec in more for source in spec.sources)
