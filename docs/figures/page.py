"""Takes the documents' pictures of the page: `python docs/figures/page.py` shows it made-up clusters in a browser. The figures in them
are made up, too. Each picture keeps the digest of the page that it shows, so that a test notices an old picture."""

from __future__ import annotations

import hashlib
import random
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tandem.router.page_state import NodeRow, PageState, Pair, PoolRow, RouterState, TierRow
from tandem.router.recent import ADVICE, Moment, RequestAccount, SlowRequest, Trouble
from tests.browser import Browser

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "router" / "http" / "ui.html"
DRAWN = "state !== null && document.querySelectorAll('.tile').length > 0 && rates.size > 0 && seen.length > 3"


def digest() -> str:
    return hashlib.sha256(PAGE.read_bytes()).hexdigest()[:16]


def cluster(prefill: int, decode: int, at: int) -> PageState:
    """A cluster with this many nodes. One was lost a moment ago. The page has been open for `at` seconds."""
    chance = random.Random(7)
    now = time.time()
    nodes = []
    for role, number in (("prefill", prefill), ("decode", decode)):
        for index in range(number):
            lost = role == "decode" and index == 3
            total, rate = (512, 900) if role == "prefill" else (2048, 700)
            used = chance.randint(total // 5, total - 40)
            sent, received = (260, 0) if role == "prefill" else (0, 170)
            tiers = [TierRow("cpu", chance.randint(1, 4) << 30, 8 << 30)] if role == "prefill" else []
            nodes.append(
                NodeRow(
                    f"{role}-{index}", role, "down" if lost else "ready",
                    "its process ended: killed by signal 9" if lost else "",
                    running=0 if lost else chance.randint(1, 48), waiting=0 if lost else chance.randint(0, 6),
                    used_blocks=0 if lost else used, total_blocks=total, transfers=0 if lost else chance.randint(1, 4),
                    bytes_sent=(sent << 20) * at, bytes_received=0 if lost else (received << 20) * at,
                    output_tokens=rate * at if role == "decode" and not lost else 0,
                    prompt_tokens=2 * rate * at if role == "prefill" else 0, step_s=0.02, tiers=tiers,
                )
            )  # fmt: skip
    pairs = [
        Pair(f"prefill-{source}", f"decode-{target}", chance.randint(1, 3), 900, 0.02)
        for source in range(min(prefill, 3)) for target in range(min(decode, 5)) if target != 3
    ]  # fmt: skip
    moments = [
        Moment(now - 600 + 10 * index, ended=40, first_in_time=chance.randint(36, 40), tokens_in_time=chance.randint(37, 40),
               running=chance.randint(25, 80), queued=chance.choice((0, 0, 0, 4, 7)))
        for index in range(60)
    ]  # fmt: skip
    moments[40].moved, moments[40].restarts, moments[50].refused, moments[58].restarts, moments[58].moved = (
        3,
        1,
        5,
        1,
        2,
    )
    latest = [
        RequestAccount(
            f"{chance.getrandbits(64):016x}", now - chance.random() * 6, 0.004, chance.random() / 9, chance.random() / 2, chance.random() / 2,
            0.004, 1 + 2 * chance.random(), chance.randint(300, 3800), 0, chance.randint(60, 300), 0.05, f"prefill-{chance.randrange(3)}",
            f"decode-{chance.randrange(3)}", "", 0, 0, "stop", traced=False,
        )
        for _ in range(16)
    ]  # fmt: skip
    latest.sort(key=lambda one: one.ended_at)
    causes = ("a node's line", "computing the prompt", "it moved to another node", "writing the answer")
    slowest = [
        SlowRequest(one, 3.2 - index / 2, causes[index], ADVICE[causes[index]]) for index, one in enumerate(latest[:4])
    ]
    troubles = [
        Trouble(now - 20, "node", "", 0, "down", "decode-3", "its process ended: killed by signal 9"),
        Trouble(now - 20, "moved", latest[2].request_id, 0, "node_lost", "decode-3", "decode-3 was lost", 2),
        Trouble(now - 95, "refused", latest[5].request_id, 429, "rate_limit_exceeded", "", "too many requests per minute with this key", 5),
    ]  # fmt: skip
    pools = [PoolRow("prefill", prefill, prefill, 0, 0), PoolRow("decode", decode, decode - 1, 1, 0)]
    router = RouterState(
        "smollm2", "", "least_wait", None, False, 47, 3, 1024, 512, 47, 0.8, 0.0031, tells_decisions=True
    )
    return PageState(now, router, 2.0, 0.1, nodes, pairs, moments, latest, slowest, troubles, pools)


def served(prefill: int, decode: int) -> ThreadingHTTPServer:
    opened = time.monotonic()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/ui/state":
                body, kind = (
                    msgspec.json.encode(cluster(prefill, decode, int(time.monotonic() - opened) + 1)),
                    "application/json",
                )
            elif self.path == "/ui/decisions":
                decided = [
                    {
                        "unix_time": time.time() - 300,
                        "text": f"decode: from {decode - 1} to {decode}, 1 node more: 90% of the blocks are taken",
                    }
                ]
                body, kind = msgspec.json.encode({"decisions": decided, "may_act": False}), "application/json"
            else:
                body, kind = PAGE.read_bytes(), "text/html; charset=utf-8"
            self.send_response(200)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(Path(folder))
        try:
            for name, prefill, decode, dark in (("page-light", 3, 5, False), ("page-dark", 200, 800, True)):
                server = served(prefill, decode)
                browser.open(f"http://127.0.0.1:{server.server_port}/ui", dark=dark)
                browser.until(DRAWN, "it is drawn")
                browser.look(1440, int(browser.run("document.documentElement.scrollHeight")), dark)
                browser.until("new Promise(requestAnimationFrame).then(() => true)", "it is drawn again")
                browser.picture(Path(folder) / "page.png")
                shown = PngInfo()
                shown.add_text("page", digest())
                colours = Image.open(Path(folder) / "page.png").convert("RGB").quantize(128)
                colours.save(HERE / f"{name}.png", pnginfo=shown, optimize=True)
                server.shutdown()
        finally:
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
