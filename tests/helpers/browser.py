"""A page in Chromium without a window, pointed at and read through the browser's own protocol on two pipes."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """A page that is loaded."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, os.fdopen(answers, "rb")
        self._rest, self._last, self._session = b"", 0, ""

    def load(self, path: pathlib.Path, width: int, height: int, scheme: str) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Do as the protocol's method says and return its result."""
        self._last += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._last, "method": method, "params": params, **session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._last:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def value(self, expression: str) -> Any:
        """Return what an expression of the page's own names is, after the next frame has been drawn."""
        shown = f"new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done({expression}))))"
        found = self.call("Runtime.evaluate", expression=shown, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **({"text": key} if len(key) == 1 else {}))

    def picture(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._answers.fileno(), 1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        first, _, self._rest = self._rest.partition(b"\0")
        return json.loads(first)


@contextlib.contextmanager
def page(path: pathlib.Path, width: int = 1200, height: int = 800, scheme: str = "light") -> Iterator[Browser]:
    """Open a file and give the page; the browser ends with the context."""
    assert PROGRAM is not None
    pipes = [os.pipe(), os.pipe()]
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (pipes[0][0], pipes[1][1])]  # which 3 and 4 do not replace
    for fd in (pipes[0][0], pipes[1][1]):
        os.close(fd)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        words = [PROGRAM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
        bash = ["bash", "-c", f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}', "bash"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([*bash, *words], pass_fds=theirs, **quiet) as process:
            for fd in theirs:
                os.close(fd)
            browser = Browser(pipes[0][1], pipes[1][0])
            try:
                browser.load(path, width, height, scheme)
                yield browser
            finally:
                process.kill()
                os.close(pipes[0][1])
                browser._answers.close()
