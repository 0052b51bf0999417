"""See engine.model.states.StatesWing."""

from __future__ import annotations

from tandem.engine.model.recurrent.mixers import StateNotingCache
from tandem.engine.model.recurrent.own_states import take_states_out

noting_cache = StateNotingCache

__all__ = ["noting_cache", "take_states_out"]
