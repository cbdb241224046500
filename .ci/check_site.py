"""Check the built documentation: links, no external resources, and pages in a browser.

    mkdocs build --strict
    python .ci/check_site.py site
    python .ci/check_site.py site --browser --screenshot first_page.png

The first part reads the HTML files. With ``--browser``, a headless Chromium opens every page from a
server on this machine: pages must not be empty, print errors, fail to load resources or contact
other hosts, and the search has to find ``env_info``. Needs only the standard library, and Chromium
for the second part (Debian: ``apt-get install chromium``).
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import functools
import http.server
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

SOUGHT = "env_info"
"""Term that the search has to find."""

DEADLINE_S = 60.0
"""For one page or one answer of the browser: far more than the slowest machine needs."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Page(HTMLParser):
    """References of an HTML file.

    Attributes:
        links: Targets of links.
        loaded: Addresses of scripts, styles and images, which the browser loads.
        anchors: Targets within the page.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the references of a tag."""
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and "href" in values:
            self.loaded.append(values["href"])
        elif "src" in values:
            self.loaded.append(values["src"])


def broken_references(site: Path) -> Iterator[str]:
    """Report references of a site that do not exist or are external resources."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site} has no pages"
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        for address in page.loaded:
            if urlsplit(address).netloc:
                yield f"{name} loads {address} from elsewhere"
        for address in page.links + page.loaded:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            # Relative to the root of the site with a leading slash; empty for the page itself.
            place = urlsplit(urljoin(f"/{name}", parts.path)).path if parts.path else f"/{name}"
            target = site / unquote(place).removeprefix("/")
            if target.is_dir():
                target /= "index.html"
            anchor = unquote(parts.fragment)
            if not target.is_file():
                yield f"{name} links to {address}, which is not there"
            elif anchor and target in pages and anchor not in pages[target].anchors:
                yield f"{name} links to {address}: no such place on that page"
    for name in ("llms.txt", "llms-full.md"):
        if not (site / name).is_file():
            yield f"{name} is missing"
            continue
        text = (site / name).read_text(encoding="utf-8")
        code = r"^ *```.*?^ *```$|``.*?``|`[^`\n]*`"
        prose = re.sub(code, "", text, flags=re.DOTALL | re.MULTILINE)
        for address in re.findall(r"\]\((?!\w+:)([^)#\s]+)[^)\s]*\)", prose):
            if not (site / address).is_file():
                yield f"{name} links to {address}, which is not there"
    for path in sorted(site.rglob("*.css")):
        for address in re.findall(r"url\(['\"]?(https?:[^)]*)", path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)} loads {address} from elsewhere"


# In a browser ------------------------------------------------------------------------------------


class Browser:
    """A page of a headless Chromium, driven by its DevTools protocol over two pipes.

    Args:
        program: The browser.
        folder: Folder for its files.
        window: Width and height in pixels.
    """

    def __init__(self, program: str, folder: str, window: tuple[int, int] = (1280, 900)) -> None:
        read_end, self._to = os.pipe()
        self._from, write_end = os.pipe()
        # Above 3 and 4, the descriptors of the protocol in the browser.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_end, write_end)]
        flags = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--remote-debugging-pipe", f"--user-data-dir={folder}"),
        ]
        start = f'exec "$0" "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", start, program, *flags], pass_fds=theirs, stderr=subprocess.DEVNULL
        )
        for end in (read_end, write_end, *theirs):
            os.close(end)
        self.events: list[dict[str, Any]] = []
        self._buffer, self._number, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        size = {"width": window[0], "height": window[1], "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method and wait for its result; events until then are kept in ``events``."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, event: str) -> None:
        """Wait for an event that has not been seen yet."""
        while not any(seen.get("method") == event for seen in self.events):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        """Evaluate a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']['text']}")
        return result["result"].get("value")

    def open(self, address: str) -> None:
        """Open a page, and wait until it is completely loaded."""
        self.events.clear()
        self.call("Page.navigate", url=address)
        self.wait_for("Page.loadEventFired")

    def complaints(self, origin: str) -> Iterator[str]:
        """Report problems since the page was opened."""
        for event in self.events:
            method, what = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                details = what["exceptionDetails"]
                yield f"exception: {details.get('exception', details).get('description', details)}"
            elif method == "Runtime.consoleAPICalled" and what["type"] == "error":
                yield f"console: {[value.get('value') for value in what['args']]}"
            elif method == "Log.entryAdded" and what["entry"]["level"] == "error":
                yield f"log: {what['entry']['text']}"
            elif method == "Network.loadingFailed" and not what.get("canceled"):
                yield f"a request failed: {what['errorText']}"
            elif method == "Network.responseReceived" and what["response"]["status"] >= 400:
                yield f"{what['response']['url']}: {what['response']['status']}"
            elif method == "Network.requestWillBeSent":
                address = what["request"]["url"]
                if not address.startswith((f"{origin}/", "data:", "blob:")):
                    yield f"contacts another host: {address}"

    def close(self) -> None:
        """End the browser."""
        try:
            self._session = ""
            self.call("Browser.close")
            self._process.wait(DEADLINE_S)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._to)
            os.close(self._from)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_S
        while b"\0" not in self._buffer:
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([self._from], [], [], left_s)[0]:
                raise TimeoutError(f"no answer from the browser within {DEADLINE_S:.0f} s")
            part = os.read(self._from, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without printing."""

    def log_message(self, *_: object) -> None:
        """Do not log."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve a folder on this machine; yields the address."""
    handler = functools.partial(QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


SEEN = """(() => {
    const article = document.querySelector("article");
    const pictures = [...document.querySelectorAll("article img")];
    return {
        title: article?.querySelector("h1")?.innerText ?? "",
        characters: article?.innerText.length ?? 0,
        pictures: pictures.length,
        missing: pictures.filter(picture => !picture.naturalWidth).map(picture => picture.src),
        overflow: document.documentElement.scrollWidth - window.innerWidth,
    };
})()"""

FOUND = """[...document.querySelectorAll("a.md-search-result__link")].map(link => link.href)"""


def problems_in_browser(site: Path, program: str, screenshot: Path | None) -> Iterator[str]:
    """Report problems that a reader would see."""
    names = sorted(p.relative_to(site).as_posix() for p in site.rglob("*.html"))
    with tempfile.TemporaryDirectory() as folder, served(site) as origin:
        browser = Browser(program, folder)
        try:
            for name in names:
                browser.open(f"{origin}/{name}")
                seen = browser.evaluate(SEEN)
                yield from (f"{name}: {complaint}" for complaint in browser.complaints(origin))
                yield from (f"{name}: no picture: {picture}" for picture in seen["missing"])
                if name != "404.html" and (not seen["title"] or seen["characters"] < 40):
                    yield f"{name} is empty"
                if seen["overflow"] > 0:
                    yield f"{name} is {seen['overflow']} pixels wider than the window"
            print(f"{len(names)} pages opened")
            browser.open(f"{origin}/index.html")
            if screenshot is not None:
                picture = browser.call("Page.captureScreenshot")["data"]
                screenshot.write_bytes(base64.b64decode(picture))
            browser.evaluate("document.querySelector('[name=query]').focus()")
            browser.call("Input.insertText", text=SOUGHT)
            deadline = time.monotonic() + DEADLINE_S
            found = []
            while not found and time.monotonic() < deadline:
                found = browser.evaluate(FOUND)
            print(f"the search finds {SOUGHT} in {len(found)} places, the first: {found[:3]}")
            if not found:
                yield f"the search does not find {SOUGHT}"
            yield from (f"searching: {complaint}" for complaint in browser.complaints(origin))
        finally:
            browser.close()


def main() -> int:
    """Print every problem; returns 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("site", type=Path, help="output folder of mkdocs build")
    parser.add_argument("--browser", action="store_true", help="open every page in Chromium")
    parser.add_argument("--screenshot", type=Path, help="where to save the first page, a .png")
    arguments = parser.parse_args()
    problems = list(broken_references(arguments.site))
    if arguments.browser:
        program = next(filter(None, map(shutil.which, BROWSERS)), None)
        if program is None:
            parser.error(f"none of {', '.join(BROWSERS)} is installed")
        problems += problems_in_browser(arguments.site, program, arguments.screenshot)
    for problem in problems:
        print(problem)
    n_pages = len(list(arguments.site.rglob("*.html")))
    print(f"{n_pages} pages, {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
