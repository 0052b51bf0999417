"""A run as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tandem.loadgen.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_run(figure: Figure, timelines: Sequence[Timeline], began_at: float, title: str) -> None:
    served = [timeline for timeline in timelines if timeline.succeeded]
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    distribution(axes[0][0], "time to first token", {"": [timeline.ttft for timeline in served]})
    gaps = [gap for timeline in served for gap in timeline.inter_token]
    distribution(axes[0][1], "inter-token latency", {"": gaps})
    distribution(axes[1][0], "end to end", {"": [timeline.e2e for timeline in served]})
    _throughput(axes[1][1], served, began_at)


def distribution(axes: Axes, title: str, series: Mapping[str, Sequence[float]]) -> None:
    """How large a share is no slower than x. The tail is the point, so x is logarithmic and p99 is marked."""
    axes.set_title(title)
    axes.set_xlabel("ms")
    axes.set_ylabel("share")
    axes.set_ylim(0, 1.02)
    axes.axhline(0.99, color="grey", linewidth=0.5, linestyle=":")
    for name, seconds in series.items():
        # A chunk that came with the one before it has no latency, and a logarithm no zero.
        values = np.maximum(np.sort(np.asarray(seconds)) * 1e3, 1e-2)
        if len(values):
            axes.plot(values, np.arange(1, len(values) + 1) / len(values), label=name, drawstyle="steps-post")
    axes.set_xscale("log")
    axes.grid(alpha=0.3)


def _throughput(axes: Axes, served: Sequence[Timeline], began_at: float) -> None:
    axes.set_title("output over time")
    axes.set_xlabel("s")
    axes.set_ylabel("chunks/s")
    times = np.asarray([moment - began_at for timeline in served for moment in timeline.chunk_times])
    if len(times):
        edges = np.linspace(0.0, float(times.max()), num=min(120, max(2, int(times.max()) + 1)))
        counts, _ = np.histogram(times, bins=edges)
        axes.step(edges[:-1], counts / np.diff(edges), where="post")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
