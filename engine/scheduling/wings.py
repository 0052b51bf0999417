"""Parts of the scheduler that can be deleted. Each is known by its row here."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from tandem.base.errors import ConfigurationError
from tandem.base.wings import find_wing
from tandem.engine.config import CacheConfig, SchedulerConfig
from tandem.engine.request import Request
from tandem.engine.scheduling.parts import DraftLimits, EncodedImages, TurnPins
from tandem.engine.scheduling.state import Totals

PINS = "tandem.engine.scheduling.pins.pins"
ENCODING = "tandem.engine.scheduling.encoding.budget"
DRAFTING = "tandem.engine.scheduling.drafting.judge"


def make_pins(
    config: SchedulerConfig, clock: Callable[[], float], free: Callable[[Request], None], totals: Totals
) -> TurnPins | None:
    if not config.pins_for_s:
        return None
    pins: TurnPins = _found(PINS, "scheduler.policy").Pins(config.pins_for_s, clock, free, totals)
    return pins


def make_drafts(config: SchedulerConfig, *, computed_twice: bool) -> DraftLimits | None:
    """`computed_twice`: see DraftJudge."""
    most = config.num_speculative_tokens
    if not most:
        return None
    judge = _found(DRAFTING, "scheduler.num_speculative_tokens").DraftJudge
    drafts: DraftLimits = judge(most, config.max_draft_loss, computed_twice=computed_twice)
    return drafts


def make_encoded(cache: CacheConfig, config: SchedulerConfig) -> EncodedImages:
    """For a model that reads images."""
    if encoding := find_wing(ENCODING):
        encoded: EncodedImages = encoding.EncoderCache(cache.encoder_tokens, config.max_encoder_tokens)
        return encoded
    raise ConfigurationError(f"a model that reads images is not served: this installation has no {ENCODING}")


def _found(name: str, setting: str) -> ModuleType:
    if module := find_wing(name):
        return module
    raise ConfigurationError(f"{setting}: this installation has no {name}")
