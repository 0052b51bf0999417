"""From a run's options to its sessions and their arrival times. Prompts and arrival times come from separate random
streams, so a run at another rate sends the same prompts."""

from __future__ import annotations

import numpy as np

from tandem.loadgen.options import Options, Workload
from tandem.loadgen.traces import read_trace, replay
from tandem.loadgen.vocabulary import Vocabulary
from tandem.loadgen.workload import Lengths, Session, multi_turn, random_prompts, shared_prefix
from tandem.wire.errors import ConfigurationError

_MEASURED, _WARM_UP, _ARRIVALS = range(3)


def make_sessions(options: Options, vocabulary: Vocabulary) -> tuple[list[Session], list[Session]]:
    """The sessions to measure, and those that warm up before: of the same kind, with no prompt in common."""
    measured, before = (np.random.default_rng((options.seed, stream)) for stream in (_MEASURED, _WARM_UP))
    lengths = Lengths(options.input, options.output, options.spread)
    if options.workload is Workload.TRACE and options.trace is not None:
        rows = read_trace(options.trace, options.sessions)
        sessions = replay(rows, vocabulary, options.seed, options.trace_speed, options.trace_scale)
        return sessions, random_prompts(vocabulary, before, options.warmup_sessions, lengths)
    count = options.sessions or 0
    return (
        _synthetic(options, vocabulary, measured, lengths, count),
        _synthetic(options, vocabulary, before, lengths, options.warmup_sessions),
    )


def _synthetic(
    options: Options, vocabulary: Vocabulary, rng: np.random.Generator, lengths: Lengths, count: int
) -> list[Session]:
    if options.workload is Workload.SHARED_PREFIX:
        return shared_prefix(vocabulary, rng, count, lengths, options.prefix, options.prefixes)
    if options.workload is Workload.MULTI_TURN:
        turn_input = options.turn_input or options.input
        return multi_turn(vocabulary, rng, count, lengths, options.turns, turn_input, options.think)
    return random_prompts(vocabulary, rng, count, lengths)


def arrival_times(options: Options, sessions: list[Session]) -> list[float] | None:
    if options.follows_trace:
        return [session.arrival_s or 0.0 for session in sessions]
    if options.rate is not None:
        return poisson(np.random.default_rng((options.seed, _ARRIVALS)), len(sessions), options.rate)
    return None


def poisson(rng: np.random.Generator, count: int, rate: float) -> list[float]:
    """Seconds from the start of the run, with exponential gaps, scaled so that the last arrival is at `count / rate`.
    Given the time of the last arrival, the others are still a Poisson process, and every seed offers the same load."""
    if rate <= 0:
        raise ConfigurationError(f"the rate must be above 0 requests a second, not {rate:g}")
    times = np.cumsum(rng.exponential(size=count))
    return [float(time) for time in times * (count / rate / times[-1])] if count else []
