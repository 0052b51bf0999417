"""See engine.cache.wings.StateBlocksWing."""

from __future__ import annotations

from tandem.engine.cache.states.checkpoints import Checkpoints
from tandem.engine.cache.states.tables import StateManager

tables = StateManager
checkpoints = Checkpoints
