"""A real browser without a window, driven over its debugging pipe with the standard library alone."""

import base64
import io
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import time
from contextlib import contextmanager

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
# a phone and a laptop, with the heights of their windows, in both themes
SIZES = {420: 850, 1280: 800}
CASES = [(width, scheme) for width in SIZES for scheme in ("light", "dark")]
# what a reader of the page as it stands cannot see: each with what is wrong and the text
MISFITS = """(() => {
  const box = e => e.getBoundingClientRect(), found = new Set(), style = new Map();
  const styled = e => style.get(e) ?? (style.set(e, getComputedStyle(e)), style.get(e));
  const clips = value => ["hidden", "clip"].includes(value), scrolls = value => ["auto", "scroll"].includes(value);
  const inside = (a, low, high, b, slack = 1.5) => a[low] >= b[low] - slack && a[high] <= b[high] + slack;
  const note = (fault, text) => found.add(`${fault}: ${text.trim().replace(/\\s+/g, " ").slice(0, 80)}`);
  const page = { left: 0, right: innerWidth };
  const wide = document.scrollingElement.scrollWidth - innerWidth;
  if (wide > 0) note("scrolls sideways", `${wide} pixels`);

  // a text is cut by a box around it that hides what is beyond it, unless a box in between can be scrolled
  function fault(node, rect) {
    let sideways = true, upwards = true, far = false;
    for (let e = node.parentElement; e; e = e.parentElement) {
      const { overflowX, overflowY, position } = styled(e), edge = box(e);
      // one pixel is for screen readers alone
      if (clips(overflowX) && edge.width <= 2) return null;
      if (sideways && clips(overflowX) && !inside(rect, "left", "right", edge)) return "cut";
      if (upwards && clips(overflowY) && !inside(rect, "top", "bottom", edge, 3)) return "cut";
      if (scrolls(overflowX)) sideways = false;
      if (scrolls(overflowY)) upwards = false;
      // a drawer waits beside the window
      if (position == "fixed") far = edge.right <= 0 || edge.left >= innerWidth;
      if (position == "fixed") break;
    }
    return far || !sideways || inside(rect, "left", "right", page) ? null : "outside of the window";
  }

  // what is wider than its own box lies over its neighbours
  function beside(parent, rect) {
    const own = parent.closest("h1, h2, h3, h4, p, td, th, button, output, label, summary");
    return own && box(own).width && !inside(rect, "left", "right", box(own)) ? "leaves its box" : null;
  }

  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest("script, style, option")) continue;
    if (!parent.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const drawing = parent.closest("text") && parent.closest("svg");
    if (drawing) {
      // a card leaves its drawings some room, and above a drawing stands its heading
      const text = box(parent), edge = box(parent.closest(".card") ?? drawing);
      const within = inside(text, "left", "right", edge) && inside(text, "top", "bottom", edge);
      if (!within || text.top < box(drawing).top - 4) note("leaves its drawing", node.data);
      continue;
    }
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) {
      const wrong = rect.width && (beside(parent, rect) ?? fault(node, rect));
      if (wrong) note(wrong, node.data);
    }
    // an ellipsis stands for what is cut
    const short = styled(parent).textOverflow == "ellipsis" && parent.scrollWidth > parent.clientWidth + 1;
    if (short) note("cut", node.data);
  }
  for (const img of document.images)
    if (!img.complete || !img.naturalWidth) note("not loaded", img.src);
  return [...found];
})()"""


def find():
    """The browser's path, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab of a browser. `open` loads a page and returns its console errors and requests."""

    def __init__(self, profile):
        to_browser, from_browser = os.pipe(), os.pipe()
        # the browser reads from descriptor 3 and writes to descriptor 4
        command = f'exec "$0" "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, find(), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser[0], from_browser[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        self._out, self._in = to_browser[1], from_browser[0]
        self._buffer, self._count, self._session, self._events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def _receive(self, deadline):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser did not answer")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise EOFError("the browser ended")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def call(self, method, **parameters):
        """Send a command to the browser and wait for its answer. Events that come first are kept."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._events.append(answer)

    def evaluate(self, expression):
        """The value of an expression; of a promise, what it becomes."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return answer["result"].get("value")

    def painted(self):
        """Wait until the page was painted twice, so that what was done shows."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))")

    def resize(self, width, scheme="light", height=900):
        """Give the window a size and a theme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        # without motion, an element is where it was when it is clicked
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[{"name": k, "value": v} for k, v in features.items()])

    def open(self, url, width, scheme="light", height=900):
        """Load a page. Returns (console errors, requested addresses)."""
        self.resize(width, scheme, height)
        self._events.clear()
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + 60
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._receive(deadline))
        # wait for late events
        time.sleep(0.3)
        self.evaluate("1")
        return self._errors(), self._requests()

    def _requests(self):
        return [
            event["params"]["request"]["url"]
            for event in self._events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def _errors(self):
        errors = []
        for event in self._events:
            method, parameters = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                errors.append(parameters["exceptionDetails"]["text"])
            if method == "Runtime.consoleAPICalled":
                errors.append(str(parameters["args"]))
            if method == "Log.entryAdded":
                errors.append(parameters["entry"]["text"])
        return errors

    def since(self):
        """The console errors and requests since the page was opened."""
        self.evaluate("1")
        return self._errors(), self._requests()

    def misfits(self):
        """What a reader of the page cannot see: texts that are cut, pictures that are missing, a page too wide."""
        self.painted()
        return self.evaluate(MISFITS)

    def failures(self):
        """The requests since the page was opened that got no answer, or an error."""
        failed = []
        for event in self._events:
            method, parameters = event.get("method"), event.get("params", {})
            if method == "Network.loadingFailed":
                failed.append(parameters["errorText"])
            if method == "Network.responseReceived" and parameters["response"]["status"] >= 400:
                failed.append(parameters["response"]["url"])
        return failed

    def pictures(self):
        """The median brightness, from 0 to 1, of every picture that is shown, by its address."""
        places = self.evaluate(
            "[...document.images].map(e => [e.currentSrc, e.getBoundingClientRect()]).filter(([_, r]) => r.width)"
            ".map(([name, r]) => [name, r.x + scrollX, r.y + scrollY, r.width, r.height])"
        )
        return {name: self._brightness(*place) for name, *place in places}

    def _brightness(self, x, y, width, height):
        from matplotlib.image import imread

        clip = {"x": x, "y": y, "width": width, "height": height, "scale": 0.2}
        data = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        pixels = imread(io.BytesIO(base64.b64decode(data)), format="png")[..., :3]
        return float(statistics.median(pixels.mean(-1).flatten().tolist()))

    def centre(self, selector):
        """Scroll an element into view. Returns the middle of it."""
        middle = self.evaluate(
            f"(e => {{ e.scrollIntoView({{block: 'center', behavior: 'instant'}});"
            f"const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        self.painted()
        return middle

    def move(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector):
        x, y = self.centre(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    @contextmanager
    def fingers(self, url):
        """Open a page on a phone with a touch screen."""
        self.open(url, 420, height=SIZES[420])
        self.call("Emulation.setTouchEmulationEnabled", enabled=True)
        try:
            yield
        finally:
            self.call("Emulation.setTouchEmulationEnabled", enabled=False)

    def _touch(self, kind, *points):
        self.call("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y} for x, y in points])

    def tap(self, x, y):
        self._touch("touchStart", (x, y))
        self._touch("touchEnd")
        self.painted()

    def swipe(self, x, y, right, down):
        """Put a finger there, move it in small moves, and lift it."""
        self._touch("touchStart", (x, y))
        for share in range(1, 21):
            self._touch("touchMove", (x + right * share / 20, y + down * share / 20))
            self.painted()
        self._touch("touchEnd")
        self.painted()

    def press(self, key, selector=None):
        """Press a key, after the focus was put on an element."""
        if selector is not None:
            self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        more = {"text": "\r", "windowsVirtualKeyCode": 13} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **more)

    def trace(self, act):
        """Act while the browser keeps a record of its work. Returns the processor time of each task, in seconds."""
        self.call("Tracing.start", categories="-*,toplevel")
        act()
        self._events.clear()
        self.call("Tracing.end")
        deadline = time.monotonic() + 60
        while not any(event.get("method") == "Tracing.tracingComplete" for event in self._events):
            self._events.append(self._receive(deadline))
        events = [
            event
            for batch in self._events
            if batch.get("method") == "Tracing.dataCollected"
            for event in batch["params"]["value"]
        ]
        # the clock of the thread, because other processes may take the core for a while
        return [event["tdur"] / 1e6 for event in events if event["name"].endswith("::RunTask") and "tdur" in event]

    def screenshot(self, whole=True):
        """The page as PNG: the whole of it, or what the window shows."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def pdf(self):
        """The page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])
