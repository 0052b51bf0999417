"""Draws the documents' pictures: `python docs/figures/draw.py`. The plots' figures are read from the tables in
docs/performance.md, so that they cannot say something else."""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
PERFORMANCE = HERE.parent / "performance.md"

INK, SOFT, LINE, PAPER = "#1b1f24", "#57606a", "#8c959f", "#ffffff"
ROUTER, PREFILL, DECODE, CLIENT = "#ddf4ff", "#fff1d6", "#dafbe1", "#f6f8fa"
KV = "#cf222e"
SYSTEMS = {
    "Tandem 1P+1D": "#0969da",
    "Tandem aggregated": "#54aeff",
    "vLLM 1P+1D": "#bf8700",
    "vLLM aggregated": "#d4a72c",
}
# On Zen 4 vLLM's 1P+1D takes so long that its bars would be all that there is to see.
DRAWN = ("AMD Zen 5", "Intel")
LOADS = ("1 user", "4 users", "8 users", "chats beside long prompts", "sharing 1,000 tokens")


class Picture:
    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="sans-serif" role="img"><title>{escape(title)}</title>',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="context-stroke"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str, *lines: str) -> None:
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{LINE}"/>'
        )
        for place, line in enumerate(lines):
            self.text(x + width / 2, y + 22 + 17 * place, line, bold=place == 0)

    def bar(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self._parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        bold: bool = False,
        anchor: str = "middle",
        fill: str = "",
        size: int = 13,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{weight} '
            f'fill="{fill or (INK if bold else SOFT)}">{escape(text)}</text>'
        )

    def arrow(
        self, x1: float, y1: float, x2: float, y2: float, *, color: str = SOFT, width: float = 1.5, both: bool = False
    ) -> None:
        start = ' marker-start="url(#tip)"' if both else ""
        self._parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-width="{width}" '
            f'marker-end="url(#tip)"{start}/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> None:
        dashes = ' stroke-dasharray="3 4"' if dashed else ""
        self._parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{LINE}"{dashes}/>')

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def architecture() -> Picture:
    picture = Picture(760, 430, "Clients, the router, a prefill pool and a decode pool, and Ray beside them")
    picture.box(240, 15, 280, 38, CLIENT, "any OpenAI client")
    picture.arrow(380, 53, 380, 92, both=True)
    picture.text(392, 78, "HTTP, SSE", anchor="start")
    picture.box(
        190,
        95,
        380,
        68,
        ROUTER,
        "router",
        "checks, tokenizes, chooses a pair of nodes,",
        "owns the request: deadline, cancel, failover",
    )
    picture.arrow(270, 163, 200, 217)
    picture.text(222, 186, "request", anchor="end")
    picture.arrow(250, 217, 320, 163, color="#0969da")
    picture.text(300, 205, "first token", anchor="start", fill="#0969da")
    picture.arrow(490, 163, 560, 217)
    picture.text(540, 186, "request, at once", anchor="start")
    picture.arrow(510, 217, 440, 163, color="#0969da")
    picture.text(462, 205, "all others", anchor="end", fill="#0969da")
    for x, fill, name, does in (
        (60, PREFILL, "prefill node", "reads the prompt"),
        (440, DECODE, "decode node", "writes the answer"),
    ):
        picture.box(x + 12, 230, 260, 96, fill)
        picture.box(x + 6, 225, 260, 96, fill)
        picture.box(x, 220, 260, 96, fill, f"{name} (1 … N)", does, "scheduler, block pool, model", "connector")
    picture.arrow(334, 282, 438, 282, color=KV, width=2)
    picture.text(386, 270, "KV blocks", fill=KV, bold=True)
    picture.text(386, 300, "NIXL", fill=KV)
    picture.box(
        60,
        360,
        652,
        52,
        CLIENT,
        "Ray",
        "places, supervises, scales and replaces all of them; it never carries a token or a block",
    )
    picture.line(190, 326, 190, 360, dashed=True)
    picture.line(570, 326, 570, 360, dashed=True)
    return picture


def timeline() -> Picture:
    picture = Picture(
        760, 330, "One request in time: prefill by chunks, KV written meanwhile, first token, handover, decode"
    )
    rows = (("client", 50), ("router", 105), ("prefill node", 160), ("KV transfer", 215), ("decode node", 270))
    for name, y in rows:
        picture.text(100, y + 5, name, anchor="end", bold=True)
        picture.line(112, y, 745, y, dashed=True)

    def span(y: float, start: float, end: float, fill: str, label: str) -> None:
        picture.box(start, y - 16, end - start, 32, fill)
        picture.text((start + end) / 2, y + 4, label, size=11)

    picture.arrow(120, 50, 128, 88)
    span(105, 120, 186, ROUTER, "tokenize")
    picture.arrow(186, 121, 194, 142)
    picture.arrow(186, 121, 194, 252)
    span(160, 194, 284, PREFILL, "chunk 1")
    span(160, 284, 374, PREFILL, "chunk 2")
    span(160, 374, 464, PREFILL, "chunk 3")
    span(215, 284, 350, "#ffebe9", "KV of 1")
    span(215, 374, 440, "#ffebe9", "KV of 2")
    span(215, 464, 506, "#ffebe9", "of 3")
    span(270, 194, 530, CLIENT, "its blocks are reserved and registered; it computes for others")
    picture.arrow(464, 144, 476, 66, color="#0969da")
    picture.text(482, 80, "first token", anchor="start", fill="#0969da", size=11)
    picture.arrow(506, 231, 526, 252)
    picture.text(512, 245, "verified", anchor="end", size=11)
    for step, x in enumerate((530, 566, 602, 638, 674)):
        span(270, x, x + 34, DECODE, f"t{step + 2}")
        picture.arrow(x + 34, 254, x + 40, 66, color="#0969da", width=1)
    picture.text(735, 36, "one token per step", anchor="end", fill="#0969da", size=11)
    picture.text(430, 318, "time →", size=11)
    return picture


Table = dict[tuple[str, str], list[float]]  # by load and system: the columns' medians


def whole_system(text: str) -> dict[str, Table]:
    """The tables of the whole system in docs/performance.md, by machine. Each stands after the text that names its machine."""
    found: dict[str, Table] = {}
    before, *tables = text.split("| load | system |")
    for table in tables:
        rows: Table = {}
        load = ""
        for line in table.splitlines()[2:]:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not line.startswith("|"):
                break
            load = cells[0] or load
            rows[load, cells[1]] = [float(re.sub(r"[*,]|\(.*", "", cell).strip() or "nan") for cell in cells[2:]]
        machine = re.findall(r"Zen \d|Intel", before)[-1]
        found[f"AMD {machine}" if machine.startswith("Zen") else machine] = rows
        before = table
    return {machine: found[machine] for machine in DRAWN}


def bars(tables: dict[str, Table], column: int, title: str, heading: str) -> Picture:
    """One column of the tables: the machines beside each other, each with a scale of its own."""
    picture = Picture(760, 74 + 88 * len(LOADS), title)
    picture.text(20, 24, heading, bold=True, anchor="start")
    for place, (machine, rows) in enumerate(tables.items()):
        left = 20 + 375 * place
        picture.text(left, 50, machine, bold=True, anchor="start")
        longest = max(values[column] for (load, _), values in rows.items() if load in LOADS)
        for at, load in enumerate(LOADS):
            top = 60 + 88 * at
            picture.text(left, top + 10, load, anchor="start", fill=INK, size=12)
            for row, (system, color) in enumerate(SYSTEMS.items()):
                y = top + 16 + 16 * row
                picture.text(left + 112, y + 10, system, anchor="end", size=10)
                values = rows.get((load, system))
                width = 190 * values[column] / longest if values else 0
                picture.bar(left + 118, y, width, 12, color)
                label = f"{values[column]:,g}" if values else "not measured"
                picture.text(left + 123 + width, y + 10, label, anchor="start", size=10)
    return picture


def pictures() -> dict[str, str]:
    measured = whole_system(PERFORMANCE.read_text(encoding="utf-8"))
    where = "two cores, no GPU, SmolLM2-135M"
    return {
        "first-tokens.svg": str(
            bars(
                measured,
                0,
                "Median time to the first token of Tandem and vLLM",
                f"Time to the first token, median ms: shorter is sooner ({where})",
            )
        ),
        "throughput.svg": str(
            bars(
                measured,
                3,
                "Tokens per second of Tandem and vLLM",
                f"Tokens per second of all users: longer is more ({where})",
            )
        ),
        "architecture.svg": str(architecture()),
        "timeline.svg": str(timeline()),
        "gaps.svg": str(
            bars(
                measured,
                2,
                "The longest gaps between tokens (p99) of Tandem and vLLM",
                f"p99 between two tokens, ms: shorter is steadier ({where})",
            )
        ),
    }


def main() -> int:
    for name, text in pictures().items():
        (HERE / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
