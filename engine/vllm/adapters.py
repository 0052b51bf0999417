"""LoRA adapters as vLLM computes them. What the node's book has is loaded in each of vLLM's workers, so that vLLM never reads an adapter
in the middle of a step.

vLLM computes with what it finds a place for, and says nothing of the rest: so what it has loaded is compared with its layers. The layer
that makes logits is no place: the logits of a prompt would get another request's update. On CPUs vLLM adds the adapter in its last slot to
rows without one, unless a whole step is without: so its products are replaced there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tandem.base.errors import ConfigurationError
from tandem.engine.model.adapter_book import AdapterBook
from tandem.engine.model.peft_folder import CONFIG_FILE, WEIGHTS_FILE, read_peft_folder, some_of
from tandem.wire.adapters import identity_of

_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class VllmAdapter:
    name: str
    digest: str
    num_bytes: int
    about: str  # what errors call it
    number: int  # by which vLLM knows it
    files: TemporaryDirectory[str]  # those that the digest is of, until vLLM has read them

    @property
    def identity(self) -> str:
        return identity_of(self.name, self.digest)

    @property
    def request(self) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(self.identity, self.number, self.files.name)


def read_adapter(name: str, folder: Path, max_rank: int) -> VllmAdapter:
    """Raises ConfigurationError for what vLLM need not look at."""
    read = read_peft_folder(name, folder, max_rank)
    files = TemporaryDirectory(prefix="tandem-adapter-")
    Path(files.name, CONFIG_FILE).write_bytes(read.config_file)
    Path(files.name, WEIGHTS_FILE).write_bytes(read.weights_file)
    return VllmAdapter(name, read.digest, len(read.weights_file), read.about, next(_numbers), files)


class VllmAdapters(AdapterBook[VllmAdapter]):
    def __init__(self, core: Any, max_rank: int) -> None:
        super().__init__()
        self._core = core
        self._max_rank = max_rank
        if core.vllm_config.device_config.device_type == "cpu":
            core.collective_rpc(_add_run_by_run)

    def read(self, name: str, folder: Path) -> VllmAdapter:
        return read_adapter(name, folder, self._max_rank)

    def request_of(self, identity: str) -> Any:
        """What vLLM's requests say of an adapter. vLLM's block hashes have the identity, because it is the name there."""
        return self._adapters[identity].request

    def serve(self, read: Iterable[VllmAdapter], kept: Collection[str] = (), now: float = 0.0) -> None:
        here, loaded = [], []
        try:
            for adapter in read:
                if not self.has(adapter.identity):
                    self._load(adapter)
                    loaded.append(adapter)
                here.append(self._adapters.get(adapter.identity, adapter))
        except ConfigurationError:
            for adapter in loaded:
                self.forgotten(adapter)
            raise
        super().serve(here, kept, now)

    def _load(self, adapter: VllmAdapter) -> None:
        try:
            self._core.add_lora(adapter.request)
            wrong = _misfit(self._core.collective_rpc(_misplaced, args=(adapter.number,)))
        except Exception as error:  # its classes of layers raise what torch raises
            said, _, _ = str(error).partition("\n")
            wrong = f"vLLM does not take it: {said[:500]}"
        finally:
            adapter.files.cleanup()
        if wrong:
            self.forgotten(adapter)
            raise ConfigurationError(f"{adapter.about} cannot be served: {wrong}")

    def forgotten(self, adapter: VllmAdapter) -> None:
        self._core.remove_lora(adapter.number)


def _misfit(found: list[tuple[set[str], set[str]]]) -> str:
    """`found`: what `_misplaced` says of each worker. A stage of several has some of the layers."""
    if nowhere := set.intersection(*(layers for layers, _ in found)):
        return f"it changes {some_of(nowhere)}, which vLLM's model does not have, or which no adapter may change here"
    if unfit := set.union(*(layers for _, layers in found)):
        return f"its updates of {some_of(unfit)} have another size than these layers of the model"
    return ""


# --- in vLLM's workers


def _misplaced(worker: Any, number: int) -> tuple[set[str], set[str]]:
    """The layers of a loaded adapter that the worker's model does not have, and those that have another size there."""
    manager = worker.worker.model_runner.lora_manager._adapter_manager
    updates = manager.get_adapter(number).loras
    # Those for embeddings and logits have one tensor in place of a part for each matrix that vLLM has joined.
    layers = {name: each for name, each in manager.modules.items() if isinstance(_slots(each), list | tuple)}
    unfit = {name for name, update in updates.items() if name in layers and not _fits(layers[name], update)}
    return updates.keys() - layers.keys(), unfit


def _slots(layer: Any) -> Any:
    return getattr(layer, "lora_a_stacked", ())


def _fits(layer: Any, update: Any) -> bool:
    downs, ups = update.lora_a, update.lora_b
    if len(_listed(downs)) != len(_slots(layer)):
        return True  # vLLM divides them among these, and says if that does not come out even
    ranks = layer.tp_size
    cut = (layer.slice_lora_a(downs), layer.slice_lora_b(ups)) if ranks > 1 else (downs, ups)
    sides = ((downs, cut[0], layer.lora_a_stacked, -1), (ups, cut[1], layer.lora_b_stacked, -2))
    return all(
        part is None or part.shape[side] == slot.shape[side] >= whole.shape[side] / ranks
        for wholes, parts, slots, side in sides
        for whole, part, slot in zip(_listed(wholes), _listed(parts), slots, strict=True)
    )


def _listed(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]


def _add_run_by_run(worker: Any) -> None:
    """vLLM would copy the matrices for every row, and take tens of times as long with a prompt."""
    from vllm.lora.punica_wrapper import punica_cpu

    def shrink(rows: Any, downs: Any, out: Any, starts: Any, lengths: Any, slots: Any, *others: Any) -> None:
        for run, slot in _runs(starts, lengths, slots):
            out[run] = rows[run].to(out.dtype) @ downs[slot, 0].to(out.dtype).T * others[-1]

    def expand(rows: Any, ups: Any, out: Any, starts: Any, lengths: Any, slots: Any, *others: Any) -> None:
        *_, begin, size, _ = others
        for run, slot in _runs(starts, lengths, slots):
            out[run, begin : begin + size] += rows[run] @ ups[slot, 0].to(rows.dtype).T

    punica_cpu.sgmv_shrink, punica_cpu.sgmv_expand_slice = shrink, expand
    # With `prompt_logprobs` it gets more rows than slots, and fails the step.
    punica_cpu.PunicaWrapperCPU.add_lora_logits = lambda wrapper, logits, *update, **named: None


def _runs(starts: Any, lengths: Any, slots: Any) -> Iterator[tuple[slice, int]]:
    """Neighbouring rows with one adapter, and its slot."""
    for start, length, slot in zip(starts.tolist(), lengths.tolist(), slots.tolist(), strict=True):
        if slot >= 0:
            yield slice(start, start + length), slot
