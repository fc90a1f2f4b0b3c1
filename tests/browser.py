"""A real browser without a window: Debian's Chromium, driven over HTTP (W3C WebDriver)."""

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
]


class Browser:
    """Opens files, and tells what happened: ``with Browser(folder) as browser``.

    Parameters
    ----------
    folder : Path
        Empty; what the browser remembers goes there.
    """

    def __init__(self, folder):
        self._folder = folder

    def __enter__(self):
        # Port 0 lets the driver choose one that is free, and it says which.
        command = [DRIVER, "--port=0"]
        self._driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for line in self._driver.stdout:
            if "started successfully on port" in line:
                self._address = f"http://127.0.0.1:{int(line.split()[-1].rstrip('.'))}"
                break
        options = {"args": [*FLAGS, f"--user-data-dir={self._folder}"], "binary": BROWSER}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        try:
            started = self._ask("/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._end()
            raise
        self._address += f"/session/{started['sessionId']}"
        self._ask("/url", {"url": "about:blank"})
        return self

    def __exit__(self, *_):
        try:
            self._ask("", method="DELETE")
        finally:
            self._end()

    def _end(self):
        self._driver.terminate()
        self._driver.wait(20)
        self._driver.stdout.close()

    def show(self, path, width, height, dark):
        """Open a file in a window of this size; return what went wrong on the console, and what was asked for."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._protocol("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._protocol("Emulation.setEmulatedMedia", {"features": features})
        for kind in ("browser", "performance"):
            self._ask("/se/log", {"type": kind})  # what came before is of another page
        self._ask("/url", {"url": path.as_uri()})
        console = [entry["message"] for entry in self._ask("/se/log", {"type": "browser"})]
        events = [json.loads(entry["message"])["message"] for entry in self._ask("/se/log", {"type": "performance"})]
        asked = [
            event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
        ]
        return console, [url for url in asked if url != path.as_uri() and not url.startswith("data:")]

    def ask(self, script):
        """Run a function's body in the page and return its result."""
        return self._ask("/execute/sync", {"script": script, "args": []})

    def press(self, key):
        """Press a key, such as ``Tab`` or ``Enter``."""
        code = {"Tab": 9, "Enter": 13, " ": 32}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        self._protocol("Input.dispatchKeyEvent", {"type": "keyDown", "key": key, "windowsVirtualKeyCode": code, **text})
        self._protocol("Input.dispatchKeyEvent", {"type": "keyUp", "key": key, "windowsVirtualKeyCode": code})

    def picture(self, path):
        """Write the whole page as PNG."""
        shot = self._protocol("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))

    def _protocol(self, name, parameters):
        return self._ask("/goog/cdp/execute", {"cmd": name, "params": parameters})

    def _ask(self, path, body=None, method="POST"):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        for attempt in range(5):
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.load(answer)["value"]
            except urllib.error.HTTPError as error:
                raise RuntimeError(json.load(error)["value"]["message"]) from error
            except urllib.error.URLError:
                if attempt == 4:
                    raise
                time.sleep(0.2)
        return None
