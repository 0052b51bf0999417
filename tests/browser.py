"""Drives a headless Chromium (Debian's package) through its DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.hosts.tools import install_absent

PATIENCE_S = 20.0


class Browser:
    def __init__(self, profile: Path) -> None:
        install_absent({"chromium": "chromium"}, "a test of the page")
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        flags = (
            "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
            "--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={profile}", "--remote-debugging-pipe",
        )  # fmt: skip
        # The browser reads from descriptor 3 and writes to 4.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "-", "chromium", *flags, "about:blank"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(profile)},
        )
        os.close(to_read)
        os.close(to_write)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []  # exceptions and console errors of the page

    def open(self, url: str, width: int = 1440, height: int = 1400, dark: bool = False) -> None:
        """Opens a page in a new tab, and closes the previous tab."""
        if self._session is not None:
            self.call("Page.close")
            self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.complaints.clear()
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.look(width, height, dark)
        self.call("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'", "the page is there")

    def look(self, width: int, height: int, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def run(self, script: str) -> Any:
        """Evaluates an expression in the page and returns its value; awaits a promise."""
        told = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, script: str, what: str) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, (
                f"not within {PATIENCE_S:.0f} s: {what}; the page complains: {self.complaints}"
            )
            self.run("new Promise(requestAnimationFrame)")
        return found

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            more = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            codes = {"Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "End": 35, "Home": 36, "Tab": 9}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **more)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def accessible(self) -> list[tuple[str, str]]:
        """The role and name of each element that a screen reader finds."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")
        ]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        for told in self._messages():
            if told.get("id") == self._number:
                assert "error" not in told, f"{method}: {told['error']}"
                result: dict[str, Any] = told["result"]
                return result
            self._note(told)
        raise AssertionError(f"{method}: the browser has ended")

    def _note(self, told: dict[str, Any]) -> None:
        match told.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(told["params"]["exceptionDetails"]))
            case "Log.entryAdded" if told["params"]["entry"]["level"] == "error":
                self.complaints.append(told["params"]["entry"]["text"])

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            head, found, self._rest = self._rest.partition(b"\0")
            if found:
                yield json.loads(head)
                continue
            more = os.read(self._from, 1 << 20)
            if not more:
                return
            self._rest = head + more

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._session = None
            os.write(self._to, b'{"id": 0, "method": "Browser.close"}\0')
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._to)
        os.close(self._from)
