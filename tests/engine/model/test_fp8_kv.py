"""A KV cache in FP8: answers depend on nothing but the prompt, and nodes refuse a cache of another dtype."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.base.errors import ConfigurationError
from tandem.engine.model import checkpoint, paths
from tandem.engine.model.attention.gathered import GatheredAttention
from tandem.engine.model.cuda.pieces import DevicePieces
from tandem.engine.model.torch_runner import TorchRunner
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.protocol.cache_map import PoolGeometry
from tandem.wire.handoff import CacheMemory
from tests.engine.model import driver, fake_flashinfer, tiny
from tests.engine.model.driver import Driver

PROMPT = [5, 17, 99, 3, 42, 42, 8, 11, 64, 23, 7]


load = partial(driver.load, kept="fp8", memory_bytes=1 << 20, prefix_caching=False, max_num_seqs=2, max_model_len=64)  # fmt: skip


def answer(runner: TorchRunner, chunks: list[int]) -> list[int]:
    driver = Driver(runner)
    driver.add("r", PROMPT)
    for count in chunks:
        driver.step({"r": count})
    return driver.generate(12)["r"]


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(request.param, tmp_path_factory.mktemp("models"))


def test_an_answer_does_not_depend_on_how_its_prompt_is_cut(path: Path) -> None:
    runner = load(path)
    assert runner.kv_cache.dtype == torch.float8_e4m3fn
    forward: Any = runner.forward
    assert isinstance(forward.attention, GatheredAttention)
    whole = answer(runner, [11])
    assert all(answer(runner, chunks) == whole for chunks in ([1, 10], [4, 4, 3], [10, 1]))


def test_recurrent_states_beside_it_keep_their_bits(tmp_path: Path) -> None:
    runner = load(tiny.save("lfm2", tmp_path))
    assert answer(runner, [4, 4, 3]) == answer(runner, [11])


def test_it_takes_a_quarter_of_float32s_memory(path: Path) -> None:
    def of(runner: TorchRunner) -> int:
        return runner.kv_cache[0].numel() * runner.kv_cache.element_size()

    assert 4 * of(load(path)) == of(load(path, kept="auto"))


def test_the_kernels_of_a_gpu_keep_the_same_numbers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = answer(load(path), [11])
    monkeypatch.setattr(paths, "pieces_for", lambda *_: DevicePieces())
    fake_flashinfer.use_here(monkeypatch)
    assert answer(load(path), [11]) == right


def test_a_peer_with_another_dtype_is_refused() -> None:
    def geometry(dtype: torch.dtype) -> PoolGeometry:
        memory = KVCacheMemory(torch.zeros(4, 2, 2, 1, 4, 8, dtype=dtype), "m", 2, 1, 100)
        reachable = CacheMemory(b"", "DRAM", 0, memory.tensor.data_ptr(), 4, memory.block_bytes)
        return PoolGeometry.of(memory, reachable, "nixl/push")

    ours, theirs = geometry(torch.float8_e4m3fn), geometry(torch.bfloat16)
    assert "dtype is 'float8_e4m3fn' here and 'bfloat16' there" in str(
        ours.mapping_to(theirs.fingerprint, theirs.memory)
    )
    assert not isinstance(ours.mapping_to(ours.fingerprint, ours.memory), str)


def test_a_card_that_cannot_convert_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    with pytest.raises(ConfigurationError, match=r"fp8, which A100 does not compute with: it needs .* 8\.9"):
        checkpoint.fp8_on(torch.device("cuda:0"))
