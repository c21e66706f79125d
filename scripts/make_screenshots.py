"""Makes the pictures of docs/console.md: a hub with traffic of several protocols, and a browser.

python scripts/make_screenshots.py [--folder docs/pictures] [--seconds 20]
"""

from __future__ import annotations

import argparse
import base64
import random
import struct
import sys
import threading
import time
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from tests.console.browser import BrowserThread, ConsolePage

import crosswire
from crosswire.cli.hub import Api
from crosswire.errors import CrosswireError
from crosswire.testing import RunningHub, running_hub
from crosswire.testing.traffic import SampleTraffic, packets, write_pcap

TOKEN = "the-token-of-an-operator"
CONFIGURATION = f"""
[[users]]
name = "operator"
token = "{TOKEN}"
administer = true
produce = ["queue/#", "topic/#"]
consume = ["queue/#", "topic/#"]
call = ["service/#"]
serve = ["service/#"]

[lake]
seal_s = 0.5

[lake.tap]
listeners = ["emp", "epoxy", "micromsg2", "relink"]

[queues."shop/orders"]
retry = {{ max_attempts = 2, first_delay_s = 0.05 }}
"""
ITEMS = ("tea", "milk", "bread", "coffee", "salt")


class Traffic:
    """Producers and consumers on threads, until it is stopped."""

    def __init__(self, hub: RunningHub) -> None:
        self._hub = hub
        self._stopped = threading.Event()
        self._random = random.Random(7)
        self._threads = [
            threading.Thread(target=self._produce, args=("micromsg2", "queue/shop/orders", 25)),
            threading.Thread(target=self._produce, args=("epoxy", "queue/billing/invoices", 8)),
            threading.Thread(target=self._produce, args=("emp", "queue/mail/outgoing", 3)),
            threading.Thread(target=self._consume, args=("emp", "queue/shop/orders")),
            threading.Thread(target=self._consume, args=("micromsg2", "queue/billing/invoices")),
        ]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _connect(self, protocol: str) -> Any:
        return crosswire.connect_sync(self._hub.url(protocol), token=TOKEN)

    def _produce(self, protocol: str, destination: str, rate: float) -> None:
        with self._connect(protocol) as client:
            number = 0
            while not self._stopped.wait(self._random.expovariate(rate)):
                number += 1
                item = self._random.choice(ITEMS)
                price: float | str = round(self._random.uniform(1, 30), 2)
                if destination == "queue/shop/orders" and number % 23 == 0:
                    price = "twelve"
                body = {"order": 1000 + number, "item": item, "price": price, "currency": "EUR"}
                client.publish(destination, body, properties={"item": item, "shop": "north"})

    def _consume(self, protocol: str, destination: str) -> None:
        with self._connect(protocol) as client, client.subscribe(destination) as messages:
            while not self._stopped.is_set():
                try:
                    message = messages.receive(timeout_s=0.5)
                except CrosswireError:
                    continue
                if isinstance(message.body["price"], str):
                    message.refuse("price is no number")
                else:
                    message.settle()


_COLOURS = 256
_PIXELS = """async (address) => {
  const image = new Image();
  image.src = address;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const { data } = context.getImageData(0, 0, image.width, image.height);
  let text = "";
  for (let start = 0; start < data.length; start += 32768) {
    text += String.fromCharCode(...data.subarray(start, start + 32768));
  }
  return [image.width, image.height, btoa(text)];
}"""


def small_png(browser: Any, picture: bytes) -> bytes:
    """A picture with a palette of its most frequent colours: a third of the size. The browser,
    which is there anyway, decodes it."""
    page = browser.new_page()
    try:
        address = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        width, height, text = page.evaluate(_PIXELS, address)
    finally:
        page.close()
    pixels = np.frombuffer(base64.b64decode(text), np.uint8).reshape(-1, 4)[:, :3]
    packed = pixels.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)
    colours, index, counts = np.unique(packed, return_inverse=True, return_counts=True)
    all_colours = _channels(colours)
    palette = _palette(all_colours, counts)
    nearest = np.concatenate(
        [
            ((some[:, None] - palette[None]) ** 2).sum(axis=2).argmin(axis=1)
            for some in np.array_split(all_colours, len(all_colours) // 1024 + 1)
        ]
    ).astype(np.uint8)
    lines = np.zeros((height, width + 1), np.uint8)  # the first byte of a line is its filter: none
    lines[:, 1:] = nearest[index.reshape(height, width)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (
            (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            (b"PLTE", palette.astype(np.uint8).tobytes()),
            (b"IDAT", zlib.compress(lines.tobytes(), 9)),
            (b"IEND", b""),
        )
    )


def _palette(colours: Any, counts: Any) -> Any:
    """The most frequent colours, and of the others those that are least like any of them, such as
    that of a word on a coloured ground."""
    palette = colours[np.argsort(counts)[::-1][: _COLOURS * 3 // 4]]
    distance = np.full(len(colours), np.inf)
    for colour in palette:
        distance = np.minimum(distance, ((colours - colour) ** 2).sum(axis=1))
    while len(palette) < min(_COLOURS, len(colours)):
        colour = colours[(distance * np.log2(counts + 1)).argmax()]
        palette = np.concatenate([palette, colour[None]])
        distance = np.minimum(distance, ((colours - colour) ** 2).sum(axis=1))
    return palette


def _channels(colours: Any) -> Any:
    return np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1).astype(np.int32)


def take(browser: BrowserThread, hub: RunningHub, folder: Path) -> None:
    """All pictures; the traffic goes on meanwhile."""
    api = Api(hub.url("http"), TOKEN)
    letter = api.get("/v1/dead/letters", queue="shop/orders", limit=1)["letters"][0]
    message = letter["origin_id"]

    def edit(page: Any) -> None:
        payload = page.get_by_label("Payload (JSON)")
        payload.fill(payload.input_value().replace('"twelve"', "12"))
        page.get_by_label("Difference of the payload").wait_for()

    def search_everything(page: Any) -> None:
        # On a busy machine a request may not be enough.
        while page.get_by_text("There was no time").count():
            page.get_by_role("button", name="Refresh").click()
            page.wait_for_load_state("networkidle")

    def wait_for_tail(page: Any) -> None:
        page.locator(".tail > li").nth(12).wait_for()

    def analyze(page: Any) -> None:
        with TemporaryDirectory() as captures:
            file = Path(captures) / "shop-traffic.pcap"
            talks = SampleTraffic(connections=5, messages=60, payload_bytes=60).conversations()
            records = [each for talk in talks for each in packets(talk)]
            write_pcap(file, sorted(records, key=lambda each: each[0]))
            page.set_input_files("input[type=file]", str(file))
            page.locator(".virtual-row").filter(has_text="$publish").first.click()
        page.get_by_role("treeitem", name="destination").last.click()
        page.locator(".octet.marked").first.wait_for()
        page.evaluate("scrollTo(0, 0)")

    shots: list[tuple[str, str, dict[str, Any], Any]] = [
        ("overview-light", "/", {}, None),
        ("queue-light", "/queues/shop%2Forders", {}, None),
        ("trace-dark", f"/messages/{message}", {"color_scheme": "dark"}, search_everything),
        ("dead-letters-light", "/dead/shop%2Forders", {}, None),
        ("edit-light", f"/dead/shop%2Forders/{letter['id']}", {}, edit),
        (
            "tail-dark",
            "/tail?destination=queue/shop/orders",
            {"color_scheme": "dark"},
            wait_for_tail,
        ),
        (
            "analyzer-light",
            "/analyzer",
            {"viewport": {"width": 1400, "height": 1290}},
            analyze,
        ),
        ("phone-light", "/queues", {"viewport": {"width": 390, "height": 780}}, None),
    ]
    for name, screen, options, prepare in shots:
        options.setdefault("viewport", {"width": 1200, "height": 780})
        assert browser.browser is not None
        tab = ConsolePage(browser.browser, hub.url("http"), **options)
        try:
            tab.sign_in(TOKEN)
            tab.visit(screen)
            if prepare is not None:
                prepare(tab.page)
            path = folder / f"console-{name}.png"
            path.write_bytes(small_png(browser.browser, tab.page.screenshot()))
            print(path, f"{path.stat().st_size / 1024:.0f} KiB")
            assert tab.faults == [], tab.faults
        finally:
            tab.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("docs/pictures"))
    parser.add_argument("--seconds", type=float, default=20.0, help="of traffic before the first")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    browser = BrowserThread()
    try:
        browser.start()
        with running_hub(config=CONFIGURATION) as hub, Traffic(hub):
            time.sleep(options.seconds)
            browser.run(lambda: take(browser, hub, options.folder))
    finally:
        browser.stop()


if __name__ == "__main__":
    main()
