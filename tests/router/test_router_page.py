"""The page at /ui, in a real browser: every view of it, by mouse, keys and screen reader."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.router.config import ApiKey
from tandem.router.recent import ADVICE
from tandem.wire.forecasts import ForecastScore
from tandem.wire.nodes import PoolReport, Role
from tandem.wire.requests import TierStatus
from tests.browser import Browser
from tests.router.conftest import RunningRouter, StartRouter, bearer

pytestmark = pytest.mark.slow  # a browser starts in a second or two, once for all of them

PAGE = (Path(__file__).resolve().parents[2] / "router" / "http" / "ui.html").read_text(encoding="utf-8")
DRAWN = "typeof state !== 'undefined' && state !== null && document.querySelectorAll('.tile').length > 0"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def busy(start: StartRouter) -> RunningRouter:
    """A router whose nodes have reported, and which has answered three requests."""
    router = start(decode=2)
    tiers = [TierStatus("cpu", 1, 4, 0, 0, 0, 0, 0)]
    router.nodes["d0"].set(status_fields={"free_blocks": 250, "running": 3, "waiting": 2, "tiers": tiers})

    def reported() -> bool:
        member = router.server.services.pool.member("d0")
        return member is not None and member.status is not None and member.status.running == 3

    router.wait_for(reported, "the status is here")
    for number in range(3):
        headers = {"x-request-id": f"ask-{number}", "x-tandem-trace": "1"}
        assert router.complete(headers=headers, max_tokens=4).status_code == 200
    return router


@pytest.fixture
def router(start_router: StartRouter) -> RunningRouter:
    return busy(start_router)


@pytest.fixture(scope="module")
def shown_router(keep_router: StartRouter) -> RunningRouter:
    """For tests that only look."""
    return busy(keep_router)


def opened(browser: Browser, router: RunningRouter, **how: Any) -> None:
    browser.open(f"{router.url}/ui", **how)
    browser.until(DRAWN, "it is drawn")


def shown(browser: Browser, css: str) -> str:
    return str(browser.run(f"document.querySelector({json.dumps(css)}).innerText"))


def test_everything_is_there_and_has_a_name(browser: Browser, shown_router: RunningRouter) -> None:
    opened(browser, shown_router)
    assert shown(browser, "#health") == "serving"
    assert "3 of 3 take requests" in shown(browser, "#nodes-note")
    assert browser.run("[...document.querySelectorAll('.pool b')].map(b => b.innerText)") == ["prefill", "decode"]
    row = browser.run("[...document.querySelectorAll('.grid-row')].map(r => r.innerText).find(t => t.startsWith('d0'))")
    assert "750 of 1000" in row
    assert "cpu 25.0 %" in row
    for css, count in (("#lanes .lane", 3), ("#slow tr", 3), ("#past svg", 2)):
        assert browser.run(f"document.querySelectorAll('{css}').length") == count
    # A screen reader finds a name for everything that can be used.
    found = browser.accessible()
    assert {"button", "textbox", "combobox", "grid", "heading", "image", "status"} <= {role for role, _ in found}
    usable = ("button", "textbox", "combobox", "grid", "image", "link", "columnheader")
    assert not [role for role, name in found if role in usable and not name]
    seen, name = browser.run(
        "(lane => [lane.innerText, lane.getAttribute('aria-label')])(document.querySelector('#lanes .lane'))"
    )
    assert name.startswith(" ".join(seen.split())), "what a request is called begins with what is seen"
    assert not browser.complaints


def test_what_happens_is_shown_while_it_happens(browser: Browser, router: RunningRouter) -> None:
    router.set(pause_at=0)
    opened(browser, router)
    stream = router.stream(max_tokens=4)
    browser.until("document.querySelectorAll('#moving path').length === 1", "a transfer is under way")
    assert "p0 to d" in browser.run("document.querySelector('#moving svg').getAttribute('aria-label')")
    router.set(pause_at=None)
    stream.rest()
    browser.until("document.querySelectorAll('#moving path').length === 0", "it is over")
    browser.until("document.querySelectorAll('#lanes .lane').length === 4", "the request is among the last ones")


def test_requests_and_nodes_open_into_their_parts(browser: Browser, shown_router: RunningRouter) -> None:
    opened(browser, shown_router)
    browser.run("document.querySelector('#lanes .lane').click()")
    browser.until("document.querySelector('#detail').innerText.includes('Every step, on one clock')", "its trace")
    text = shown(browser, "#detail")
    assert text.startswith("ask-2")
    assert "router read" in text
    assert re.search(r"^d\d \w+", text, re.MULTILINE), "the node's steps are there"
    browser.press("Escape")
    assert browser.run("document.querySelector('#detail').open") is False
    # Nodes are reached by keys.
    browser.run("document.querySelector('#rows').focus()")
    browser.press("ArrowDown")
    assert browser.run("document.querySelector('#rows').getAttribute('aria-activedescendant')") == "row-1"
    browser.press("Enter")
    assert shown(browser, "#detail-title") == browser.run("rows[1].id")
    browser.press("Escape")
    browser.press("End")
    assert browser.run("chosen") == 2


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_can_be_read_in_both_themes(browser: Browser, shown_router: RunningRouter, theme: str) -> None:
    opened(browser, shown_router, dark=theme == "dark")
    colors = browser.run(
        "Object.fromEntries(['--card', '--bg', '--text', '--soft', '--good', '--bad', '--focus'].map(n => [n, color(n)]))"
    )
    assert luminance(colors["--card"]) < 0.1 if theme == "dark" else luminance(colors["--card"]) > 0.9
    for ground in ("--card", "--bg"):
        for text in ("--text", "--soft", "--good", "--bad", "--focus"):
            assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
    browser.run("setTheme('dark'); setTheme('light')")
    assert browser.run("color('--card')") == "#fff", "what is chosen goes before the system's"


def luminance(code: str) -> float:
    digits = code.removeprefix("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_advice_rates_and_a_thousand_nodes(browser: Browser, shown_router: RunningRouter) -> None:
    opened(browser, shown_router)
    browser.run("document.querySelector('#pause').click()")
    browser.run("state.slowest.forEach(one => one.excess = 2); drawSlow(); 0")
    said = browser.run("[...document.querySelectorAll('.advice')].map(one => one.innerText)")
    assert set(said) <= set(ADVICE.values()), "a cause comes with advice"
    assert len(said) == 3
    few = browser.run("document.querySelectorAll('*').length")
    browser.run(
        "const all = Array.from({length: 1000}, (_, i) => ({...state.nodes[0], id: 'node-' + i, role: i % 4 ? 'decode' : 'prefill'}));"
        "measure({...state, nodes: all}); state.nodes = all; draw(); 0"
    )
    assert browser.run("document.querySelectorAll('*').length") < few + 500, "no more elements than for thirty"
    assert browser.run("document.querySelector('#rows').getAttribute('aria-rowcount')") == "1001"
    browser.run("document.querySelector('#rows').focus()")
    browser.press("End")
    assert browser.run("document.querySelector('#row-999').innerText.startsWith('node-999')")
    # Nodes report once a second, in lumps: a rate is a mean of ten seconds.
    rate = browser.run(
        "(() => { seen = []; const node = state.nodes[0]; for (let i = 0; i <= 20; i++)"
        " measure({now: 1e6 + i, nodes: [{...node, output: 100 * (i - i % 2)}]}); return rates.get(node.id).output; })()"
    )
    assert rate == 100
    assert not browser.complaints


def test_where_keys_are_set_it_asks_for_an_operators(browser: Browser, start_router: StartRouter) -> None:
    router = start_router(
        api_keys=(ApiKey(name="ops", key="operator-key", operator=True), ApiKey(name="guest", key="guest-key"))
    )
    assert router.client.get("/ui").status_code == 200
    assert router.client.get("/ui/state").status_code == 401
    assert router.client.get("/ui/state", headers=bearer("guest-key")).status_code == 403
    browser.open(f"{router.url}/ui")
    browser.until("!document.querySelector('#keys').hidden", "it asks for a key")
    for key in ("guest-key", "operator-key"):
        browser.run("document.querySelector('#key').value = ''; document.querySelector('#key').focus()")
        browser.type(key)
        browser.press("Enter")
        if key == "guest-key":
            browser.until("document.querySelector('#health').innerText.includes('operator')", "it is refused")
    browser.until(DRAWN, "it is drawn")
    assert browser.run("document.querySelector('#keys').hidden") is True


def test_where_operators_may_change_the_cluster_it_has_buttons_for_that(
    browser: Browser, router: RunningRouter
) -> None:
    """The cluster's door is played here: what the page asks of it, and what it does with the answers."""
    opened(browser, router)
    assert browser.run("document.querySelectorAll('#admin button').length") == 0
    browser.run(
        "window.asked = []; window.questions = []; window.confirm = text => questions.push(text); const through = window.fetch;"
        "window.fetch = (path, options) => { if (!/^.(admin|ui.decisions)/.test(path)) return through(path, options);"
        " if (options.body) asked.push([path, options.body]);"
        " const told = path === '/ui/decisions' ? {may_act: true, decisions: [{unix_time: 1, text: 'decode: from 1 to 2, 3 requests wait'}]} : path === '/admin/foretell' ? {said: 'expected: half as long'} : {changes: ['done']};"
        " return Promise.resolve(new Response(JSON.stringify(told), {status: 200})); };"
        "const told = measure; window.measure = state => { state.router.tells_decisions = true; told(state); }; viewedAt = -1e9; 0"
    )
    browser.until("document.querySelector('#decisions').innerText.includes('3 requests wait')", "decisions")
    browser.run(
        "document.querySelector('#admin select').value = 'decode'; document.querySelector('#admin input').value = 3; 0"
    )
    browser.run("document.querySelector('#admin button').click()")
    browser.until("document.querySelector('#detail').innerText.includes('done')", "what the cluster answered")
    browser.press("Escape")
    browser.run("showNode(state.nodes.find(node => node.id === 'd0'))")
    browser.run("[...document.querySelectorAll('#detail-body button')].find(one => one.innerText === 'Drain').click()")
    browser.until("asked.some(([path]) => path === '/admin/drain')", "it asks")
    browser.run("showNode(state.nodes.find(node => node.id === 'd0'))")
    browser.run(
        "[...document.querySelectorAll('#detail-body button')].find(one => one.innerText === 'Make it prefill').click()"
    )
    browser.until("asked.some(([path]) => path === '/admin/role')", "it asks")
    asked = [(path, json.loads(body)) for path, body in browser.run("asked")]
    prefill, decode = (browser.run(f"sizeOf('{role}')") for role in ("prefill", "decode"))
    assert asked == [
        ("/admin/foretell", {"pools": {"decode": 3}}),
        ("/admin/scale", {"pools": {"decode": 3}}),
        ("/admin/foretell", {"pools": {"decode": decode - 1}}),
        ("/admin/drain", {"node": "d0"}),
        ("/admin/foretell", {"pools": {"decode": decode - 1, "prefill": prefill + 1}}),
        ("/admin/role", {"node": "d0", "role": "prefill"}),
    ], "what it brings is said before it is wanted"
    assert browser.run("questions")[0] == "Make the decode pool 3 nodes?\n\nexpected: half as long"


@pytest.fixture
def failing(router: RunningRouter) -> str:
    """A cluster in trouble: two requests were refused and one moved because its node died; one node is left out, and the one that is
    left has faults. Returns the id of the node that serves."""
    for _ in range(2):
        assert router.complete(model="no-such-model").status_code == 404
    decoding = [router.nodes[name] for name in ("d0", "d1")]
    for node in decoding:
        node.set(pause_at=2)
    with router.stream(max_tokens=4) as events:
        events.text(count=2)
        lost = max(decoding, key=lambda node: len(node.running)).info.node_id
        (left,) = {"d0", "d1"} - {lost}
        router.nodes[left].resume()
        router.remove(lost).kill()
        events.rest()
    faults = {
        "tiers": [TierStatus("disk", 1, 4, 0, 0, 0, 0, 0, left_out="it hangs")],
        "left_out": ("p0",),
        "slower": "it computes without the native library",
    }
    router.nodes[left].set(status_fields=faults)
    router.announce(
        PoolReport(Role.PREFILL, 1),
        PoolReport(Role.DECODE, 3, down={lost: "its process ended: killed"}, left_out={"d9": "other weights"}),
    )

    def reported() -> bool:
        member = router.server.services.pool.member(left)
        return member is not None and bool(member.status.slower)

    router.wait_for(reported, "the status is here")
    return left


def test_what_went_wrong_comes_first(browser: Browser, router: RunningRouter, failing: str) -> None:
    opened(browser, router)
    tiles = browser.run(
        "Object.fromEntries([...document.querySelectorAll('#trouble .tile')].map(one => "
        "[one.querySelector('dt').innerText, [one.querySelector('dd').innerText, one.classList.contains('bad')]]))"
    )
    assert tiles == {
        "Nodes ready": ["2 of 4", True],
        "Failed": ["0", False],
        "Refused": ["2", True],
        "Moved to another node": ["1", True],
        "Node restarts": ["1", True],
    }
    wrong = shown(browser, "#wrong")
    lost = "d1" if failing == "d0" else "d0"
    for said in (
        "it computes without the native library",
        "its disk tier is left out: it hangs",
        "takes nothing from p0: its KV arrived wrong here",
        f"down\t{lost}\tits process ended: killed",
        "left out\td9\tother weights",
        f"moved\t{failing}",
    ):
        assert said in wrong
    assert re.search(r"refused 2×\t[0-9a-f-]+\t404\tmodel not found", wrong)
    nodes = browser.run("rows.map(node => `${node.id} ${node.state}`)")
    assert {f"{lost} down", "d9 left out"} <= set(nodes)
    assert not browser.complaints


@pytest.mark.parametrize("width", [390, 1440])
def test_it_fits_its_screen(browser: Browser, router: RunningRouter, failing: str, width: int) -> None:
    opened(browser, router, width=width)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("rows.length") == 4, "it has something to show"
    assert "its process ended: killed" in shown(browser, "#wrong")
    outside = browser.run(
        "[...document.querySelectorAll('svg text')].filter(text => { const own = text.getBoundingClientRect(), "
        "all = text.ownerSVGElement.getBoundingClientRect(); return own.left < all.left || own.right > all.right + 1; })"
        ".map(text => text.textContent)"
    )
    assert not outside, "these are cut off"


def test_a_router_that_is_gone_is_said_so_and_nothing_looks_alive(browser: Browser, router: RunningRouter) -> None:
    opened(browser, router)
    browser.run("window.fetch = () => Promise.reject(new TypeError('Failed to fetch')); 0")
    browser.until("document.body.classList.contains('stale')", "it is grey")
    assert re.fullmatch(r"the router has not answered since \d+:\d\d:\d\d( [AP]M)?", shown(browser, "#health"))
    assert browser.run("document.title") == "✗ Tandem · fake"
    assert float(browser.run("getComputedStyle(document.querySelector('main')).opacity")) < 0.6


class DecidingControl:
    async def act(self, action: str, body: bytes) -> bytes:
        assert action == "view"
        return b'{"model": "m", "decisions": [{"unix_time": 1, "text": "decode: from 1 to 2"}]}'


def test_on_loopback_without_keys_decisions_are_shown_and_nothing_can_be_done(
    browser: Browser, router: RunningRouter
) -> None:
    router.server.services.control = DecidingControl()
    router.server.services.pool.forecasts = ForecastScore(
        graded=3, said=["of the last 3 graded forecasts, 2 were inside"]
    )
    browser.open(f"{router.url}/ui")
    browser.until("document.querySelector('#decisions').innerText.includes('from 1 to 2')", "decisions")
    assert shown(browser, "#forecasts") == "of the last 3 graded forecasts, 2 were inside"
    assert browser.run("document.querySelectorAll('#admin button').length") == 0
    assert not browser.complaints


def test_elsewhere_decisions_need_an_operators_key(start_router: StartRouter) -> None:
    everyone = start_router(host="0.0.0.0")
    everyone.server.services.control = DecidingControl()
    assert everyone.client.get("/ui/decisions").status_code == 403
    assert everyone.client.get("/ui/state").json()["router"]["tells_decisions"] is False
    keyed = start_router(api_keys=(ApiKey(name="ops", key="ops-key", operator=True), ApiKey(name="a", key="a-key")))
    keyed.server.services.control = DecidingControl()
    for key, status in (("a-key", 403), ("ops-key", 200)):
        assert keyed.client.get("/ui/decisions", headers=bearer(key)).status_code == status


def test_it_asks_nothing_of_anyone_else_and_is_told_little(shown_router: RunningRouter) -> None:
    answer = shown_router.client.get("/ui")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#|data:)""", PAGE)
    assert not re.findall(r"https?://(?!www\.w3\.org/)", PAGE)
    state = shown_router.client.get("/ui/state").json()
    assert len(json.dumps(state["nodes"])) / len(state["nodes"]) < 250
    assert "epoch" not in json.dumps(state)
