"""LoRA adapters of a schedule: operators replace their weights while requests run. A node's slots are the product's; in place of layers
there is one number, from which an adapter's KV begins. Drawn from a generator of its own."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from tandem.engine.model.adapters import Adapter, LayerUpdate
from tandem.engine.model.lora.slots import AdapterSlots
from tandem.node.loop import SetAdapters
from tandem.wire.adapters import identity_of

if TYPE_CHECKING:
    from tests.world.node import WorldNode
    from tests.world.router import WorldRouter
    from tests.world.schedule import Schedule

SHARE = 0.3
NAMES = ("tuned", "terse")
SLOTS = 2
_LAYER = "the only one"


def _drawing(seed: int) -> random.Random:
    return random.Random(f"adapters {seed}")


def happen_in(seed: int) -> bool:
    return _drawing(seed).random() < SHARE


class _Layer:
    """What `tandem.engine.model.lora.layers.AdaptedLayer` is to the slots."""

    def __init__(self) -> None:
        self.number = [0] * SLOTS  # of the adapter in each slot

    def put(self, slot: int, update: LayerUpdate | None, like: torch.Tensor) -> None:
        self.number[slot] = 0 if update is None else int(update.down.item())


class _Layers:
    slots, rank = SLOTS, 1

    def __init__(self) -> None:
        self.layers = {_LAYER: _Layer()}


class WorldAdapters(AdapterSlots):
    def __init__(self) -> None:
        layers: Any = _Layers()
        super().__init__(layers, torch.float32, torch.device("cpu"), free_memory=lambda: 1 << 40)

    def numbers(self, wanted: set[str]) -> dict[str, int]:
        """What is in the slots of these adapters, once they have some."""
        layer: Any = self._layers.layers[_LAYER]
        return {identity: layer.number[slot] for identity, slot in self.place(sorted(wanted)).items()}


def number_of(identity: str) -> int:
    """What the right weights of an adapter have."""
    return int(identity.rpartition("@")[2], 16)


def _adapter(name: str, digest: str) -> Adapter:
    number = torch.tensor([[int(digest, 16)]], dtype=torch.int64)
    return Adapter(name, digest, {_LAYER: LayerUpdate(number, number)})


class AdapterChanges:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._rng = rng = _drawing(schedule.outcome.seed)
        self.exist = rng.random() < SHARE
        self._wanted = {name: self._digest() for name in NAMES}

    def _digest(self) -> str:
        return f"{self._rng.randrange(1, 1 << 60):032x}"

    def begin(self, faults_s: float) -> None:
        if self.exist:
            for _ in range(self._rng.choice([1, 2, 4])):
                self._schedule.loop.call_later(self._rng.uniform(0.0, faults_s), self._replace)

    def starts(self, node: WorldNode) -> None:
        """A node that starts has them before it is announced."""
        if node.model.adapters is not None:
            node.model.adapters.serve([_adapter(*each) for each in self._wanted.items()])

    def chosen(self, router: WorldRouter, label: str) -> str | None:
        """The identity of the adapter that a request names, with the weights that its router serves."""
        name = random.Random(f"{label} adapter").choice([None, *NAMES])
        digest = router.pool.view.adapters().get(name) if self.exist and name is not None else None
        return identity_of(name, digest) if name is not None and digest is not None else None

    def _replace(self) -> None:
        """Every node gets other weights under the same name, one after another."""
        rng, schedule = self._rng, self._schedule
        name = rng.choice(NAMES)
        self._wanted[name] = self._digest()
        schedule.note(f"the adapter {name} is replaced")
        for node in schedule.nodes.values():
            schedule.loop.call_later(rng.choice([0.1, 3.0]) * rng.random(), self._tell, node)

    def _tell(self, node: WorldNode) -> None:
        """A node is told of all that is wanted now: an older list must not follow a newer one."""
        if not node.process.is_alive or node.model.adapters is None:
            return
        served = node.model.adapters.served
        read = [_adapter(name, digest) for name, digest in self._wanted.items() if served.get(name) != digest]
        kept = frozenset(self._wanted) - {adapter.name for adapter in read}
        node.process.do(lambda: node.mailbox.put(SetAdapters(read, kept, Future())))
