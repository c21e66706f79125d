"""Data directories to damage, with the truth about what a hub acknowledged in each.

A directory is made by a few lives of a hub: messages of many sizes to queues and topics, some of
them settled, refused, dead or held by a consumer, named subscriptions at different positions,
schedules, a Relink link, destinations that are created late. The small buffer makes several tables
and logs of little data.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from crosswire.client.native.relink import RelinkClient
from tests.store.damage.hubs import Delivered, Emp, Hub, end_with_parent

__all__ = ["REFERENCES", "Reference", "Truth", "copy_tree", "digest", "key_of", "make"]

REFERENCES: Final = ("clean", "killed", "logged", "power")
_START_S: Final = 60.0
_QUEUES: Final = tuple(f"queue/q{number:02}" for number in range(10))
_REFUSED: Final = "queue/q04"
_LINKED: Final = "queue/q06"
_HELD: Final = "queue/q07"
_TOPICS: Final = ("topic/a", "topic/b/1", "topic/b/2", "topic/c")
_SUBSCRIPTIONS: Final = {"first": "topic/a", "second": "topic/b/+", "third": "topic/#"}
_FILLERS: Final = (0, 0, 0, 40, 40, 40, 300, 300, 300, 300, 2500, 2500, 2500, 40_000)
_FILLER_WEIGHTS: Final = (*(10 for _ in _FILLERS[1:]), 1)

_CONFIG: Final = """
drain_s = 1
log = "warning"
[store]
buffer_bytes = {buffer}
[queues.q04]
retry = {{ max_attempts = 1, first_delay_s = 0.01, longest_delay_s = 0.05 }}
[queues.q05]
retry = {{ max_attempts = 0, first_delay_s = 0.01, longest_delay_s = 0.05 }}
[limits.relink]
link_s = {link_s}
[lake]
seal_s = 0.2
seal_bytes = 40_000
"""


class Truth(msgspec.Struct):
    """What must be so. A target is a queue, or the name of a subscription."""

    name: str
    digests: dict[str, str] = {}
    """Of the payload of every message that was sent, by its key."""
    sent: dict[str, str] = {}
    """The destination of every message that was sent."""
    ids: dict[str, int] = {}
    """Of every message that was acknowledged. A dead letter has another one, which nobody knows."""
    unsettled: dict[str, list[str]] = {}
    """Keys that a target must still have."""
    settled: dict[str, list[str]] = {}
    """Keys that a target must not have any more."""
    uncertain: dict[str, list[str]] = {}
    """Keys that a target may have or not: nobody was told."""
    subscriptions: dict[str, str] = {}
    schedules: list[str] = []
    newest_id: int = 0
    """The last id that was handed out."""

    @property
    def targets(self) -> list[str]:
        return sorted({*self.unsettled, *self.settled, *self.uncertain})


class Reference(msgspec.Struct, frozen=True):
    """`data` is to be damaged; `older` has earlier versions of its files."""

    path: Path
    truth: Truth

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def older(self) -> Path:
        return self.path / "older"

    @property
    def config(self) -> Path:
        return self.path / "crosswire.toml"

    @classmethod
    def load(cls, path: Path) -> Reference:
        return cls(path, msgspec.json.decode((path / "truth.json").read_bytes(), type=Truth))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def key_of(text: str) -> str:
    """Every payload begins with its key."""
    return text.partition("|")[0]


def copy_tree(source: Path, target: Path) -> None:
    """A hard copy in which holes stay holes: space set aside need not be copied. Modes stay as they
    were: a hub reports files that others may read."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copymode(source, target)
    for entry in os.scandir(source):
        if entry.is_dir(follow_symlinks=False):
            copy_tree(Path(entry.path), target / entry.name)
        elif entry.is_file(follow_symlinks=False):
            _copy_file(Path(entry.path), target / entry.name)
            shutil.copymode(entry.path, target / entry.name)


def _copy_file(source: Path, target: Path) -> None:
    size = source.stat().st_size
    if size < 1 << 20:
        shutil.copyfile(source, target)
        return
    with source.open("rb") as read, target.open("wb") as write:
        for begin, end in _data_ranges(read.fileno(), size):
            read.seek(begin)
            write.seek(begin)
            write.write(read.read(end - begin))
        write.truncate(size)


def _data_ranges(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    position = 0
    while position < size:
        try:
            begin = os.lseek(descriptor, position, os.SEEK_DATA)
        except OSError:
            return
        position = os.lseek(descriptor, begin, os.SEEK_HOLE)
        yield begin, position


# ------------------------------------------------------------------------------------------ making


class _Maker:
    def __init__(self, path: Path, name: str, seed: int) -> None:
        self.path = path
        self.random = Random(f"{seed} {name}")
        self.truth = Truth(name)
        self.data = path / "data"
        self.config = path / "crosswire.toml"
        self.count = 0
        self.hub: Hub
        self.emp: Emp
        self.waiting: dict[str, set[str]] = {}
        self.link: int | None = None

    def configure(self, buffer_bytes: int) -> None:
        # Judges wait for what a link holds: theirs is let go of soon.
        for name, link_s in (("making.toml", 60.0), ("crosswire.toml", 0.1)):
            text = _CONFIG.format(buffer=buffer_bytes, link_s=link_s)
            (self.path / name).write_text(text)

    def start(self) -> None:
        self.hub = Hub(self.data, self.path / "making.toml", self.path / "hub")
        exited = self.hub.ready(_START_S, _START_S)
        if exited is not None:
            raise RuntimeError(f"the hub did not start: {exited.stderr}")
        self.emp = Emp(self.hub.port("emp"))

    def stop(self) -> None:
        self.note_newest()
        self.emp.close()
        self.end_link()
        exited = self.hub.stop(_START_S)
        if exited.code:
            raise RuntimeError(f"the hub did not stop well: {exited.stderr}")

    def kill(self) -> None:
        self.note_newest()
        self.hub.kill()
        self.emp.close()
        self.end_link()

    def note_newest(self) -> None:
        newest = self.hub.get("/v1/state")["store"]["newest_id"]
        self.truth.newest_id = max(self.truth.newest_id, newest)

    def snapshot(self, name: str) -> None:
        """All files at one moment."""
        self.hub.pause()
        copy_tree(self.data, self.path / name)
        self.hub.go_on()

    # Messages.

    def publish(self, destinations: list[str], count: int) -> None:
        """So many messages to these destinations, acknowledged."""
        texts = self.texts(destinations, count)
        for first in range(0, len(texts), 20):
            part = texts[first : first + 20]
            bodies = [{"destination": each[1], "text": each[2]} for each in part]
            responses = self.emp.requests("$publish", bodies)
            for (key, destination, _), response in zip(part, responses, strict=True):
                assert response.succeeded, response
                identifier = self.truth.ids[key] = json.loads(response.data)["id"]
                self.truth.newest_id = max(self.truth.newest_id, identifier)
                for target in self.targets_of(destination):
                    self.waiting.setdefault(target, set()).add(key)

    def publish_and_kill(self, destinations: list[str], count: int) -> None:
        """Nobody knows which of these were taken."""
        texts = self.texts(destinations, count)
        self.note_newest()
        self.emp.send("$publish", [{"destination": each[1], "text": each[2]} for each in texts])
        self.hub.kill()
        self.emp.close()
        self.end_link()
        for key, destination, _ in texts:
            for target in self.targets_of(destination):
                self.truth.uncertain.setdefault(target, []).append(key)

    def texts(self, destinations: list[str], count: int) -> list[tuple[str, str, str]]:
        """New messages: key, destination, payload."""
        texts = []
        for _ in range(count):
            destination = self.random.choice(destinations)
            self.count += 1
            key = f"{self.truth.name}-{self.count}"
            size = self.random.choices(_FILLERS, _FILLER_WEIGHTS)[0]
            filler = base64.b64encode(self.random.randbytes(size)).decode()
            texts.append((key, destination, f"{key}|{destination}|{filler}"))
        for key, destination, text in texts:
            self.truth.digests[key] = digest(text)
            self.truth.sent[key] = destination
        return texts

    def targets_of(self, destination: str) -> list[str]:
        if destination.startswith("queue/"):
            return [destination]
        return [
            name
            for name, pattern in self.truth.subscriptions.items()
            if pattern == destination
            or pattern == "topic/#"
            or (pattern == "topic/b/+" and destination.startswith("topic/b/"))
        ]

    def subscribe(self) -> None:
        """Create the named subscriptions."""
        emp = Emp(self.hub.port("emp"))
        asked = {
            name: {"destination": pattern, "name": name, "from": "earliest", "window": 1}
            for name, pattern in _SUBSCRIPTIONS.items()
        }
        assert not emp.subscribe(asked)
        self.truth.subscriptions = dict(_SUBSCRIPTIONS)
        self.settled_by_now()
        emp.close()

    def consume(self, target: str, count: int = 0, refuse: float = 0.0) -> None:
        """Settle so many messages of a target, or all; a part of them is refused instead."""
        count = count or len(self.waiting[target])
        chosen: list[tuple[Delivered, bool]] = []

        def decide(delivered: Delivered) -> bool | None:
            if len(chosen) >= count:
                return None
            chosen.append((delivered, self.random.random() >= refuse))
            return chosen[-1][1]

        emp = Emp(self.hub.port("emp"), decide)
        asked: dict[str, Any] = {"destination": target, "window": 8}
        if target in self.truth.subscriptions:
            asked |= {"destination": self.truth.subscriptions[target], "name": target}
        assert not emp.subscribe({target: asked})
        ends = time.monotonic() + _START_S
        while len(chosen) < count:
            emp.pump(0.2)
            assert time.monotonic() < ends, f"{target} has fewer than {count} messages"
        # Answered in order: all of our settlements were taken before this.
        emp.request("$echo", {})
        self.settled_by_now()
        emp.close()
        for delivered, settled in chosen:
            key = key_of(delivered.text)
            if settled or target == _REFUSED:
                self.waiting[target].discard(key)
                self.truth.settled.setdefault(target, []).append(key)
            if not settled and target == _REFUSED:
                self.waiting.setdefault(f"{target}/dead", set()).add(key)

    def settled_by_now(self) -> None:
        """A settlement is on disk when what was sent after it is acknowledged."""
        self.publish([_QUEUES[0]], 1)

    def hold(self, target: str, count: int) -> Emp:
        """A consumer that takes messages and does nothing with them."""
        emp = Emp(self.hub.port("emp"))
        assert not emp.subscribe({target: {"destination": target, "window": count}})
        return emp

    def schedule(self, count: int) -> None:
        for number in range(count):
            response = self.emp.request(
                "$schedule",
                {
                    "destination": _QUEUES[number % len(_QUEUES)],
                    "text": f"scheduled {number}",
                    "interval_s": 100_000_000 + number,
                    "nohaste": True,
                },
            )
            assert response.succeeded, response
            self.truth.schedules.append(json.loads(response.data)["schedule"])
        self.settled_by_now()

    def open_link(self, count: int) -> None:
        """A Relink consumer in a process of its own: it consumes `count` and holds others."""
        before = self.hub.get(f"/v1/queues/{_LINKED.removeprefix('queue/')}")["length"]
        reading, writing = os.pipe()
        port = self.hub.port("relink")
        self.link = os.fork()
        if not self.link:
            try:
                # It has the output of this process, whose reader would wait for both.
                end_with_parent()
                asyncio.run(_hold_link(port, count, writing))
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as lines:
            keys = [lines.readline().strip() for _ in range(count)]
        ends = time.monotonic() + _START_S
        path = f"/v1/queues/{_LINKED.removeprefix('queue/')}"
        while self.hub.get(path)["length"] > before - count:
            assert time.monotonic() < ends, "the link's messages were not consumed"
            time.sleep(0.005)
        self.settled_by_now()
        self.waiting[_LINKED] -= set(keys)
        self.truth.settled.setdefault(_LINKED, []).extend(keys)

    def end_link(self) -> None:
        if self.link is not None:
            os.kill(self.link, 9)
            os.waitpid(self.link, 0)
            self.link = None

    def finish(self) -> None:
        self.truth.unsettled = {target: sorted(keys) for target, keys in self.waiting.items()}
        (self.path / "truth.json").write_bytes(msgspec.json.encode(self.truth))


async def _hold_link(port: int, count: int, writing: int) -> None:
    async with RelinkClient("127.0.0.1", port, f"{_LINKED}?consume") as client:
        receiver = client.receiver()
        for _ in range(count):
            message = await anext(receiver)
            message.consume()
            text = bytes(message.parts[-1]).decode()
            os.write(writing, f"{key_of(text)}\n".encode())
        await asyncio.sleep(3600)


def make(path: Path, name: str, seed: int) -> Reference:
    """Make the reference of that name in a new folder."""
    path.mkdir(parents=True)
    maker = _Maker(path, name, seed)
    maker.configure(32 << 20 if name == "logged" else 64 << 10)
    _first_life(maker)
    maker.snapshot("older")
    if name == "logged":
        # All of it is in the logs of one life.
        _second_life(maker)
        maker.kill()
    else:
        if name == "killed":
            maker.kill()
        else:
            maker.stop()
        maker.start()
        _second_life(maker)
        _end(maker, name)
    maker.finish()
    for each in ("hub.out", "hub.err", "making.toml"):
        (path / each).unlink(missing_ok=True)
    return Reference.load(path)


def _end(maker: _Maker, name: str) -> None:
    if name == "clean":
        maker.stop()
    elif name == "killed":
        held = maker.hold(_HELD, 5)
        maker.publish(list(_QUEUES[1:3]), 5)
        maker.publish_and_kill(list(_QUEUES[1:5]), 15)
        held.close()
    else:
        # What a cut leaves when all that was acknowledged is on disk and nothing else is.
        maker.note_newest()
        maker.snapshot("cut")
        maker.kill()
        shutil.rmtree(maker.data)
        (maker.path / "cut").rename(maker.data)


def _first_life(maker: _Maker) -> None:
    maker.start()
    maker.publish(list(_QUEUES[:8]), 200)
    maker.subscribe()
    maker.publish(list(_TOPICS), 80)
    maker.schedule(3)
    maker.consume(_QUEUES[1], 6)
    maker.consume("first", 4)
    maker.publish([*_QUEUES[:8], *_TOPICS], 200)
    # All of them: one that is held when its consumer leaves has had its only attempt.
    maker.consume(_REFUSED, refuse=0.5)
    maker.consume("queue/q05", 12, refuse=0.3)


def _second_life(maker: _Maker) -> None:
    maker.publish([*_QUEUES, *_TOPICS], 150)
    maker.publish([f"queue/late-{number}" for number in range(25)], 60)
    maker.consume("second", 12)
    maker.open_link(3)
    maker.consume("queue/q02", 20)
    maker.schedule(2)
    maker.publish([*_QUEUES, *_TOPICS, "queue/late-3"], 150)
    maker.consume("queue/q03", 10, refuse=0.2)
    maker.publish([*_QUEUES, *_TOPICS, "queue/last"], 40)
