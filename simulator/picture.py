"""Draws goodput against cost as an SVG, without any library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tandem.simulator.planner import Trial

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 48, 56
INK, SOFT, LINE = "#1b1f24", "#57606a", "#d0d7de"
COLORS = {"separate": "#0969da", "aggregated": "#bf8700"}


def draw(trials: Sequence[Trial], chosen: Trial | None, title: str) -> str:
    whole = [trial for trial in trials if not trial.given_up]
    most_cost = max([trial.cost for trial in whole], default=1.0) * 1.05
    most_goodput = max([trial.goodput_per_s for trial in whole], default=1.0) * 1.1 or 1.0

    def x(cost: float) -> float:
        return LEFT + cost / most_cost * (WIDTH - LEFT - RIGHT)

    def y(goodput: float) -> float:
        return HEIGHT - BOTTOM - goodput / most_goodput * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="12" role="img"><title>{escape(title)}</title>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 20, title, INK, "start", bold=True),
    ]
    for step in range(5):
        cost, goodput = most_cost * step / 4, most_goodput * step / 4
        parts.append(
            f'<line x1="{LEFT}" y1="{y(goodput):.1f}" x2="{WIDTH - RIGHT}" y2="{y(goodput):.1f}" stroke="{LINE}"/>'
        )
        parts.append(_text(LEFT - 8, y(goodput) + 4, f"{goodput:.3g}", SOFT, "end"))
        parts.append(_text(x(cost), HEIGHT - BOTTOM + 18, f"{cost:.3g}", SOFT, "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, "cost of an hour", SOFT, "middle"))
    parts.append(_text(LEFT, TOP - 10, "requests a second within the limits", SOFT, "start"))
    for place, (kind, color) in enumerate(COLORS.items()):
        at = WIDTH - RIGHT - 200 + 100 * place
        parts.append(f'<circle cx="{at}" cy="{TOP - 14}" r="5" fill="{color}"/>')
        parts.append(_text(at + 10, TOP - 10, kind, SOFT, "start"))
    for trial in whole:
        color = COLORS["aggregated" if trial.layout.aggregated else "separate"]
        is_chosen = chosen is not None and trial == chosen
        ring = f' stroke="{INK}" stroke-width="2.5"' if is_chosen else ""
        note = f"{trial.layout}: {trial.goodput_per_s:.2f}/s within the limits, {trial.attainment:.1%}"
        parts.append(
            f'<circle cx="{x(trial.cost):.1f}" cy="{y(trial.goodput_per_s):.1f}" r="{7 if is_chosen else 5}" fill="{color}" '
            f'fill-opacity="0.8"{ring}><title>{escape(note)}</title></circle>'
        )
        if is_chosen:
            parts.append(_text(x(trial.cost), y(trial.goodput_per_s) - 14, str(trial.layout), INK, "middle", bold=True))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, fill: str, anchor: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"{weight}>{escape(text)}</text>'
