"""The parts of a model that are found and fused compute what its modules did; and a layer's number of launches on a GPU."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.engine.model.attention.interface import PAGED
from tandem.engine.model.cuda.pieces import DevicePieces
from tandem.engine.model.fused.cpu import cpu_pieces
from tandem.engine.model.fused.find import SharedProduct, _Seen, fuse
from tandem.engine.model.pieces import Activation, Matrix, activate, rms_norm
from tandem.engine.model.sums import PutOffSum, Summand, take_sum
from tests.engine.model import fake_flashinfer, tiny
from tests.engine.model.driver import Driver
from tests.engine.model.test_decode_graphs import load

# gated activations, norms, merged products, rotary embeddings put off; of two layers, four for gemma3
FOUND = {
    "llama": (2, 5, 2, 2),
    "qwen2": (2, 5, 2, 2),
    "qwen3": (2, 9, 2, 2),
    "mistral-window": (2, 5, 2, 2),
    "gemma2": (2, 9, 2, 2),
    "gemma3": (4, 25, 4, 4),
    "phi3": (2, 5, 0, 2),  # its products are merged in the checkpoint
    "gpt2": (0, 0, 0, 0),
    "opt": (0, 0, 2, 0),
    "mixtral": (0, 5, 2, 2),
    "gpt-oss": (0, 5, 2, 0),
    "deepseek-v3": (2, 9, 2, 0),
}


def model_of(architecture: str, dtype: torch.dtype = torch.float32) -> Any:
    model = tiny.build(architecture).to(dtype)
    model.set_attn_implementation(PAGED)
    model.requires_grad_(False)
    return model


def all_pieces() -> list[Any]:
    found = cpu_pieces(torch.float32, 1)
    return [DevicePieces(), *([found] if found is not None else [])]


@pytest.mark.parametrize("architecture", sorted(FOUND))
@pytest.mark.parametrize("pieces", all_pieces(), ids=lambda pieces: type(pieces).__name__)
def test_what_is_found(architecture: str, pieces: Any) -> None:
    found = fuse(model_of(architecture), pieces)
    assert found is not None
    assert (found.gated, found.norms, found.merged, found.rotary) == FOUND[architecture]


# Attention's and the feed-forward's result in each of two layers, after a norm of its own or by experts.
@pytest.mark.parametrize(
    ("architecture", "sums"),
    [("llama", 4), ("phi3", 4), ("gemma2", 4), ("mixtral", 4), ("deepseek-v3", 4), ("gpt2", 0)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_add_up_with_the_same_bits(architecture: str, sums: int, dtype: torch.dtype) -> None:
    class Apart(DevicePieces):
        norms_add = False

    said = []
    launches = []
    for pieces in (Apart(), DevicePieces()):
        model = model_of(architecture, dtype)
        found = fuse(model, pieces)
        assert found is not None
        assert found.sums == (sums if pieces.norms_add else 0)
        launches.append(Launches())
        with torch.inference_mode(), launches[-1]:
            said.append(_Seen(model).logits())
    assert torch.equal(*said)
    names = [each.names for each in launches]
    assert names[0]["add"] - names[1]["add"] == names[1]["add_rms_norm"] == sums


def test_a_sum_that_waits_is_there_when_it_is_looked_at() -> None:
    torch.manual_seed(0)
    residual, result = torch.randn(2, 3), torch.randn(2, 3)
    right = residual + result

    def waiting() -> Any:
        made = residual + Summand.of(result)
        assert isinstance(made, PutOffSum)
        return made

    assert torch.equal(waiting() * 2, right * 2)
    assert torch.equal(torch.cat([waiting(), residual]), torch.cat([right, residual]))
    assert waiting().sum().item() == right.sum().item()
    assert torch.equal(Summand.of(result) + waiting(), result + right)
    assert type(waiting()[0]) is torch.Tensor
    taken = waiting()
    parts = take_sum(taken)
    assert parts is not None
    torch.add(parts.one, parts.other, out=parts.total)
    assert take_sum(taken) is None
    assert torch.equal(taken + 1, right + 1)
    for other in (residual[:1], residual.double(), 1.0):
        made = Summand.of(result) + other
        assert type(made) is torch.Tensor
        assert torch.equal(made, result + other)
    assert take_sum(result) is None


def test_no_weight_is_there_twice() -> None:
    for pieces in all_pieces():
        model = model_of("llama")
        before = {weight.untyped_storage().data_ptr(): weight.nbytes for weight in model.parameters()}
        fuse(model, pieces)
        after = {
            weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.parameters()
        }
        left = sum(after.values())
        # On a CPU the packed copy is all there is of the layers' matrices; the embedding stays as it is.
        assert left <= sum(before.values())
        assert (left < sum(before.values()) / 2) is pieces.copies


def test_a_module_that_computes_something_else_stays_as_it_is() -> None:
    model = model_of("llama")

    class Other(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.silu(x) + 0.01 * x

    model.model.layers[1].mlp.act_fn = Other()
    model.model.layers[0].input_layernorm.forward = lambda x: x * 0.5
    found = fuse(model, DevicePieces())
    assert found is not None
    # Layer 1's gate and up are one product all the same.
    assert (found.gated, found.norms, found.merged) == (1, 4, 3)


def test_a_model_that_is_another_one_afterwards_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part was right when it was tried, and the whole is not."""

    class Forgetful(DevicePieces):
        def norm(self, weight: torch.Tensor, offset: float, eps: float) -> Any:
            right = super().norm(weight, offset, eps)
            calls: list[int] = []

            def run(x: torch.Tensor) -> torch.Tensor:
                calls.append(1)
                return right(x) if len(calls) == 1 else right(x) * 1.5

            return run

    assert fuse(model_of("llama"), Forgetful()) is None


def test_one_that_is_refused_is_served_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.engine.model.fused import find

    path = tiny.save("llama", tmp_path)
    plain = Driver(load(path))
    plain.add("r", [5, 6, 7])
    expected = plain.generate(5)
    monkeypatch.setattr(find, "fuse", lambda *_, **__: None)
    driver = Driver(load(path, DevicePieces()))
    driver.add("r", [5, 6, 7])
    assert driver.generate(5) == expected


def test_a_shared_product_is_computed_once_for_one_tensor() -> None:
    computed: list[torch.Tensor] = []

    def piece(x: torch.Tensor) -> torch.Tensor:
        computed.append(x)
        return torch.cat((x, 2 * x, 3 * x), dim=-1)

    shared = SharedProduct(piece, [2, 2, 2])
    parts = [shared.part(index) for index in range(3)]
    one, other = torch.ones(1, 2), torch.full((1, 2), 5.0)
    assert [float(part(one)[0, 0]) for part in parts] == [1, 2, 3]
    assert len(computed) == 1
    assert float(parts[0](one)[0, 0]) == 1
    assert [float(part(other)[0, 0]) for part in parts] == [5, 10, 15]
    assert len(computed) == 3
    # Asked for twice, it is not the first time's that is given.
    assert float(parts[1](one)[0, 0]) == float(parts[1](one)[0, 0]) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_a_cpus_pieces_compute_their_formulas(dtype: torch.dtype, rows: int) -> None:
    pieces = cpu_pieces(dtype, 2)
    if pieces is None:
        pytest.skip("the kernels do not run here")
    torch.manual_seed(0)

    def matrix(outputs: int, inputs: int, bias: bool = False) -> Matrix:
        weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
        return Matrix(weight, torch.randn(outputs).to(dtype) if bias else None)

    def exact(matrix: Matrix, x: torch.Tensor) -> torch.Tensor:
        bias = None if matrix.bias is None else matrix.bias.double()
        return nn.functional.linear(x, matrix.weight.double(), bias)

    def check(ours: torch.Tensor, right: torch.Tensor) -> None:
        assert ours.dtype == dtype
        assert ours.shape == right.shape
        error = (ours.double() - right).abs().max() / right.abs().max()
        assert error < (1e-5 if dtype is torch.float32 else 2e-2)

    # What lies in the memory that pieces share is not read, wherever a row ends within a tile.
    spoiled = torch.full((1, rows, 64), float("nan"), dtype=dtype)
    pieces.gated(matrix(64, 64), matrix(64, 64), matrix(64, 64), Activation.SILU)(spoiled)
    x = torch.randn(1, rows, 52).to(dtype)
    part = torch.randn(1, rows, 100).to(dtype)[..., 20:72]  # rows that do not lie side by side
    some = [matrix(33, 52), matrix(20, 52, True), matrix(7, 52)]
    gate, up, down = matrix(45, 52, True), matrix(45, 52), matrix(52, 45, True)
    weight = torch.randn(52).to(dtype)
    product = pieces.product(some)
    for given in (x, part):
        wide = given.double()
        check(product(given), torch.cat([exact(each, wide) for each in some], dim=-1))
        for activation in Activation:
            inner = activate(exact(gate, wide), activation) * exact(up, wide)
            check(pieces.gated(gate, up, down, activation)(given), exact(down, inner))
        for offset in (0.0, 1.0):
            right = rms_norm(given.float(), weight.float(), offset, 1e-6).double()
            check(pieces.norm(weight, offset, 1e-6)(given), right)
    heads = part[..., :48].view(1, rows, 4, 12)
    weight = torch.randn(12).to(dtype)
    check(pieces.norm(weight, 0.0, 1e-6)(heads), rms_norm(heads.float(), weight.float(), 0.0, 1e-6).double())


_VIEWS = {"view", "t", "transpose", "permute", "unsqueeze", "squeeze", "slice", "select", "split", "chunk", "expand"}
_VIEWS |= {"split_with_sizes", "alias", "detach", "as_strided", "_unsafe_view", "lift_fresh", "empty", "empty_like"}


class Launches(TorchDispatchMode):
    """What a GPU would be given: operations that are neither views nor memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        out = func(*args, **(kwargs or {}))
        # Where nothing records gradients these are not taken apart: a view, or the very tensor, is no launch.
        may_be_view = name in ("reshape", "contiguous", "to", "flatten", "dropout")
        if name not in _VIEWS and not (may_be_view and out.data_ptr() == args[0].data_ptr()):
            self.names[name] += 1
        return out


@pytest.mark.parametrize(
    ("architecture", "most", "outside"), [("llama", 9, 11), ("qwen3", 9, 11), ("gemma3", 11, 19), ("phi3", 9, 11)]
)
def test_a_layer_is_few_launches(architecture: str, most: int, outside: int, tmp_path: Path) -> None:
    """As counted with the operations that a GPU gets: nine where transformers has over forty; two more where a model has two more
    norms between its parts. Attention counts as one of them. `outside`: the embedding, angles, the last norm, the head, the rows that are
    wanted."""
    path = tiny.save(architecture, tmp_path)
    counted: dict[str, collections.Counter[str]] = {}
    layers = 0
    for name, pieces in (("plain", None), ("fused", DevicePieces())):
        with pytest.MonkeyPatch.context() as patch:
            fake_flashinfer.use_here(patch)
            runner = load(path, pieces)
        layers = runner.info.num_layers
        driver = Driver(runner)
        driver.add("r", [5, 6, 7])
        driver.step({"r": 3})
        forward: Any = runner.forward
        compute = forward.compute
        launches = Launches()

        def counting(*arguments: Any, launches: Launches = launches, compute: Any = compute) -> Any:
            with launches:
                return compute(*arguments)

        forward.compute = counting
        driver.step({"r": 1})
        counted[name] = launches.names
    assert counted["fused"].total() <= layers * most + outside, counted["fused"]
    assert counted["plain"].total() > layers * 30
    assert counted["fused"]["rotate_and_write"] == layers
