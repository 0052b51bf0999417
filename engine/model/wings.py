"""The table of what a model may be loaded with. `loading` knows each by its row here and never imports it."""

from __future__ import annotations

from typing import Protocol, cast

from tandem.base.wings import find_wings
from tandem.engine.model.capabilities import Capability, ModelLoad

# Parts of the runner are called in this order.
ROWS = (
    "tandem.engine.model.divided.capability",
    "tandem.engine.model.wide.capability",
    "tandem.engine.model.lora.capability",
    "tandem.engine.model.vision.capability",
    "tandem.engine.model.crossed.capability",
    "tandem.engine.model.vectors.capability",
    "tandem.engine.model.speculation.capability",
    "tandem.engine.model.hidden_states.capability",
    "tandem.engine.structured.capability",
    "tandem.engine.model.work.capability",
    "tandem.engine.model.fused.capability",
    "tandem.engine.model.cuda.capability",
    "tandem.engine.model.exact.capability",
)


class ModelWing(Protocol):
    """What such a module has. It is imported for every model, so what takes long to import waits until a model needs it."""

    def capability(self, loading: ModelLoad) -> Capability | None:
        """What this load needs of the wing; None if nothing. Raises a ConfigurationError for settings that cannot be met."""


def capabilities_for(loading: ModelLoad) -> list[Capability]:
    wings = [cast("ModelWing", module) for module in find_wings(ROWS)]
    return [found for wing in wings if (found := wing.capability(loading)) is not None]
