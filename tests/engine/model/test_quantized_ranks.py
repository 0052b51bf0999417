"""Several ranks share a quantized checkpoint: each reads its part alone, and together they give the ordinary checkpoint's tokens."""

from __future__ import annotations

import itertools
import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from tandem.base.errors import ConfigurationError
from tandem.engine.model import paths
from tandem.engine.model.checkpoint import read_config
from tandem.engine.model.cuda.pieces import DevicePieces
from tandem.engine.model.fused.find import Fused, fuse
from tandem.engine.model.kernel_linear import KernelLinear
from tandem.engine.model.quantized import kernels, loading
from tandem.engine.model.quantized.formats import QuantizedCheckpoint, dense, read_checkpoint
from tandem.engine.model.quantized.parts import CheckpointFiles, is_ordinary, part_of_matrix
from tandem.engine.model.shard import MatrixPart, Shard
from tandem.engine.model.source import find_source
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.model.wide import cut
from tandem.wire.sampling import SamplingParams
from tests.engine.model import driver
from tests.engine.model import quantized_files as files
from tests.engine.model.driver import Driver
from tests.engine.model.ranks_here import ranks_here
from tests.more import more

PROMPT = [5, 17, 99, 3, 42, 42, 8]


load = partial(driver.load, memory_bytes=1 << 20, prefix_caching=False, max_num_seqs=2, max_model_len=64, native=False)  # fmt: skip


def answer(runner: TorchRunner) -> tuple[list[int], list[float]]:
    driver = Driver(runner)
    driver.add("r", PROMPT, SamplingParams(temperature=0.0, logprobs=0))
    tokens = driver.generate(6)["r"]
    return tokens, [entry.logprob for entry in driver.requests["r"].logprobs][:6]


@pytest.mark.parametrize(
    ("of", "name", "width", "stages"),
    [
        ("", "compressed-fp8-rows", 2, 1),
        ("", "awq", 4, 1),  # with fewer heads of keys than ranks
        ("", "gptq-act-order", 2, 2),
        ("mixtral", "awq", 2, 1),
        ("mixtral", "compressed-fp8-rows", 1, 1),
        ("three-experts", "gptq-act-order", 2, 1),
        *more(("", name, 2, 1) for name in sorted(files.FORMATS) if name != "compressed-fp8-rows"),
        *more(
            [("", "fp8-blocks", 4, 1), ("", "compressed-4bit-zeros", 4, 2), ("deepseek-v3", "compressed-4bit", 1, 1)]
        ),
        *more([("three-experts", "fp8-blocks", 4, 2), ("deepseek-v3", "fp8-blocks", 4, 1)]),
    ],
)
def test_ranks_give_the_tokens_of_the_numbers(of: str, name: str, width: int, stages: int, tmp_path: Path) -> None:
    """`of`: a mixture of experts, or a Llama."""
    quantized, ordinary = files.save(name, tmp_path, of=of)
    with ranks_here(width, partial(load, quantized), stages) as runner:
        tokens, logprobs = answer(runner)
    right, expected = answer(load(ordinary))
    assert tokens == right
    assert logprobs == pytest.approx(expected, abs=2e-4)


def with_biases(*saved: Path) -> None:
    """Gives the same biases to checkpoints that have zeros."""
    for path in saved:
        tensors = files.load_file(path / "model.safetensors")
        for number, key in enumerate(sorted(key for key in tensors if key.endswith(".bias"))):
            there = tensors[key]
            tensors[key] = torch.linspace(-1, 1, len(there)).roll(number).to(there.dtype)
        files.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_a_quantized_matrix_with_a_bias_is_added_once(tmp_path: Path) -> None:
    quantized, ordinary = files.save("fp8-blocks", tmp_path, attention_bias=True, mlp_bias=True)
    with_biases(quantized, ordinary)
    with ranks_here(2, partial(load, quantized)) as runner:
        assert answer(runner)[0] == answer(load(ordinary))[0]


@pytest.mark.parametrize("biases", [True, *more([False])])
def test_kernels_compute_the_parts(biases: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs: each rank's matrices stay quantized, and are fused."""
    quantized, ordinary = files.save(
        "awq", tmp_path, torch.bfloat16, hidden_size=256, intermediate_size=512, attention_bias=biases
    )
    with_biases(quantized, ordinary)
    fused: list[Fused | None] = []

    def noted_fusion(*given: Any) -> Fused | None:
        fused.append(fuse(*given))
        return fused[-1]

    monkeypatch.setattr("tandem.engine.model.fused.find.fuse", noted_fusion)
    monkeypatch.setattr(paths, "pieces_for", lambda *_: DevicePieces())
    kept: list[tuple[int, int]] = []
    join = cut.join_parts

    def noted(name: str, model: PreTrainedModel, shard: Shard) -> None:
        kept.extend(tuple(one.packed.shape) for one in model.modules() if isinstance(one, KernelLinear))
        assert not any("proj" in where for where, one in model.named_modules() if isinstance(one, nn.Linear))
        join(name, model, shard)

    monkeypatch.setattr(cut, "join_parts", noted)
    monkeypatch.setattr(loading, "_may_stay", lambda device: True)
    with ranks_here(2, partial(load, quantized, dtype="bfloat16")) as runner:
        tokens, logprobs = answer(runner)
    assert len(kept) == 2 * 14
    assert [(each.gated, each.merged) for each in fused if each is not None] == [(2, 2), (2, 2)]
    monkeypatch.undo()
    right, expected = answer(load(ordinary, dtype="bfloat16"))
    assert tokens[0] == right[0]
    assert logprobs[0] == pytest.approx(expected[0], abs=0.15)  # bfloat16 rounds at other places


class CountingFile:
    """A checkpoint's layer, and how much of it was read."""

    def __init__(self, path: Path, layer: str) -> None:
        self._file, self._layer = path / "model.safetensors", layer
        self.read_bytes = 0

    def read(self, name: str, at: tuple[slice, ...]) -> torch.Tensor:
        with safe_open(self._file, framework="pt") as opened:
            found: torch.Tensor = opened.get_slice(f"{self._layer}.{name}")[at if at else ...]
        self.read_bytes += found.nbytes
        return found


def checkpoint_of(path: Path) -> QuantizedCheckpoint:
    source = find_source(str(path))
    found = read_checkpoint(source, read_config(source))
    assert found is not None
    return found


@pytest.mark.parametrize("name", sorted(files.FORMATS))
def test_a_part_stands_for_a_part_of_the_numbers(name: str, tmp_path: Path) -> None:
    path, _ = files.save(name, tmp_path, hidden_size=512, intermediate_size=320, num_hidden_layers=1)
    checkpoint = checkpoint_of(path)
    layer = "model.layers.0.mlp.down_proj"
    facts, size = checkpoint.layers[layer], (512, 320)
    everything = MatrixPart(*(range(total) for total in size))
    whole = CountingFile(path, layer)
    numbers = dense(part_of_matrix(facts, checkpoint, size, everything, whole.read), checkpoint)
    # Halves of the outputs, halves and thirds of the inputs (of which few lie on a group's or a block's borders), and single ones.
    outputs = (range(256), range(256, 512), range(512), range(7, 8))
    inputs = (range(160), range(160, 320), range(320), range(107), range(128, 320))
    for rows, columns in itertools.product(outputs, inputs):
        file = CountingFile(path, layer)
        tensors = part_of_matrix(facts, checkpoint, size, MatrixPart(rows, columns), file.read)
        found = tensors["weight"] if is_ordinary(tensors) else dense(tensors, checkpoint)
        assert torch.equal(found, numbers[rows.start : rows.stop, columns.start : columns.stop])
        if len(rows) == 256 and len(columns) == 320:
            assert not is_ordinary(tensors)
            assert file.read_bytes < 0.6 * whole.read_bytes


@pytest.mark.parametrize("name", ["compressed-fp8-rows", "awq", "gptq", "compressed-4bit-zeros"])
def test_a_kernel_takes_a_part(name: str, tmp_path: Path) -> None:
    path, _ = files.save(name, tmp_path, torch.bfloat16, hidden_size=512, intermediate_size=512, num_hidden_layers=1)
    checkpoint, layer = checkpoint_of(path), "model.layers.0.mlp.down_proj"
    for part in (MatrixPart(range(256, 512), range(512)), MatrixPart(range(512), range(256, 512))):
        file = CountingFile(path, layer)
        tensors = part_of_matrix(checkpoint.layers[layer], checkpoint, (512, 512), part, file.read)
        made, reason = kernels.kernel_for(tensors, checkpoint, torch.bfloat16)
        assert made is not None, reason


def test_the_matrix_that_latents_are_attended_with_is_an_ordinary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs, where the others stay quantized."""
    path, _ = files.save("awq", tmp_path, torch.bfloat16, of="deepseek-v3")
    monkeypatch.setattr(loading, "_may_stay", lambda device: True)
    monkeypatch.setattr(paths, "pieces_for", lambda *_: DevicePieces())
    forward: Any = load(path, dtype="bfloat16").forward
    kinds = {name.rpartition(".")[2]: type(one) for name, one in forward._model.named_modules()}
    assert kinds["kv_b_proj"] is nn.Linear
    assert issubclass(kinds["q_b_proj"], KernelLinear)


# Whole experts, or a part of each where the ranks do not divide them; the layers of two stages; and one rank.
def test_a_rank_reads_its_own_experts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = files.save("awq", tmp_path, of="mixtral")
    read: list[tuple[int, str]] = []
    take = CheckpointFiles.read

    def noted(files: CheckpointFiles, name: str, *given: Any) -> torch.Tensor:
        if ".experts." in name:
            read.append((threading.get_ident(), name.rpartition(".")[0]))
        return take(files, name, *given)

    monkeypatch.setattr(CheckpointFiles, "read", noted)
    with ranks_here(2, partial(load, path)):
        pass
    by_rank = [{layer for who, layer in read if who == rank} for rank in {who for who, _ in read}]
    assert [len(layers) for layers in by_rank] == [2 * 2 * 3] * 2  # two of four experts in each of two layers
    assert not by_rank[0] & by_rank[1]


@pytest.mark.parametrize("what", ["missing", "more", "size", "bias"])
def test_experts_that_do_not_fit_are_refused(what: str, tmp_path: Path) -> None:
    path, _ = files.save("fp8-tensor", tmp_path, of="mixtral")
    tensors = files.load_file(path / "model.safetensors")
    layer = "model.layers.1.block_sparse_moe.experts.2.w1"
    if what == "missing":
        tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].float()
        del tensors[f"{layer}.weight_scale"]
    elif what == "more":
        tensors |= {
            key.replace("experts.2", "experts.4"): each.clone()
            for key, each in tensors.items()
            if "1.block_sparse_moe.experts.2" in key
        }
    elif what == "size":
        tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"][:-1].contiguous()
    else:
        tensors[f"{layer}.bias"] = torch.ones(192)
    files.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    why = {
        "missing": r"layers.1.mlp.experts has experts that are quantized, and some that are not \(2\)",
        "more": "layers.1.mlp.experts has 4 experts by the configuration, and 5 in the checkpoint",
        "size": r"experts.2.w1 is \(191, 128\) in the checkpoint, and \(192, 128\)",
        "bias": r"experts.2.w1 has a bias in the checkpoint",
    }[what]
    with pytest.raises(ConfigurationError, match=why):
        load(path)


def test_matrices_that_only_transformers_reads_are_refused(tmp_path: Path) -> None:
    path, _ = files.save("fp8-tensor", tmp_path)
    described = json.loads((path / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigurationError, match="several ranks: it has quantized matrices that only"):
        load(path, Shard(0, 2, None))  # type: ignore[arg-type]  # refused before it communicates
