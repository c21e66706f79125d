"""Kinds of files, and kinds of damage to one of them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

import msgspec

__all__ = ["DAMAGES", "FILE_WEIGHTS", "Damaged", "damage", "file_kind"]

FILE_WEIGHTS: Final = {
    "table": 30,
    "log": 30,
    "MANIFEST": 10,
    "own": 14,
    "lake": 8,
    "CURRENT": 3,
    "OPTIONS": 2,
    "IDENTITY": 1,
    "other": 2,
}
"""How often a file of each kind is chosen. `own` is what our store keeps beside the engine's files;
`other` the engine's files that it can do without."""

_NOTHING: Final = 0.02
_TWO: Final = 0.06

_NAMES: Final = (
    (r"store/\d+\.sst", "table"),
    (r"store/\d+\.log", "log"),
    (r"store/MANIFEST-\d+", "MANIFEST"),
    (r"store/CURRENT", "CURRENT"),
    (r"store/OPTIONS-\d+", "OPTIONS"),
    (r"store/IDENTITY", "IDENTITY"),
    (r"store/(LOCK|LOG.*|rocksdict-config\.json)", "other"),
    (r"lake/.*", "lake"),
)


class Damaged(msgspec.Struct, frozen=True):
    """What was done to which file. `path` is relative to the data directory."""

    kind: str
    file_kind: str
    path: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} {self.path}: {self.detail}"


def file_kind(path: str) -> str:
    """Of a path relative to a data directory."""
    for pattern, kind in _NAMES:
        if re.fullmatch(pattern, path):
            return kind
    return "own"


def damage(data: Path, older: Path, random: Random) -> list[Damaged]:
    """Do one kind of damage to one file, both at random; sometimes nothing, or to two files."""
    dice = random.random()
    if dice < _NOTHING:
        return []
    first = _damage(data, older, random, FILE_WEIGHTS)
    if dice > 1 - _TWO:
        # What one file is a copy or a check of, the other may be needed for.
        second = _damage(data, older, random, {**FILE_WEIGHTS, "own": 60}, first.path)
        return [first, second]
    return [first]


def _damage(
    data: Path, older: Path, random: Random, all_weights: dict[str, int], but: str = ""
) -> Damaged:
    files: dict[str, list[str]] = {}
    for file in sorted(data.rglob("*")):
        if file.is_file():
            path = str(file.relative_to(data))
            if path == but:
                continue
            files.setdefault(file_kind(path), []).append(path)
    weights = [all_weights[kind] for kind in files]
    while True:
        chosen = random.choices(list(files), weights)[0]
        path = random.choice(files[chosen])
        kind = random.choice(list(DAMAGES))
        detail = DAMAGES[kind](data / path, older / path, random)
        # None: that can't be done to this file, or it would have changed nothing.
        if detail is not None:
            return Damaged(kind, chosen, path, detail)


def _offset(size: int, random: Random) -> int:
    """Anywhere, and rather often close to the end, where the latest is."""
    if random.random() < 0.3:
        return max(size - 1 - random.randrange(min(size, 300)), 0)
    return random.randrange(size)


def _rewrite(path: Path, change: Callable[[bytearray], str | None]) -> str | None:
    before = path.read_bytes()
    content = bytearray(before)
    if not before:
        return None
    detail = change(content)
    if detail is None or content == before:
        return None
    path.write_bytes(content)
    return detail


def _flip(path: Path, _older: Path, random: Random) -> str | None:
    def change(content: bytearray) -> str:
        offset, bit = _offset(len(content), random), random.randrange(8)
        content[offset] ^= 1 << bit
        return f"bit {bit} of byte {offset} of {len(content)}"

    return _rewrite(path, change)


def _flips(path: Path, _older: Path, random: Random) -> str | None:
    def change(content: bytearray) -> str:
        offsets = [random.randrange(len(content)) for _ in range(random.randint(2, 20))]
        for offset in offsets:
            content[offset] ^= 1 << random.randrange(8)
        return f"bits of the bytes {sorted(offsets)} of {len(content)}"

    return _rewrite(path, change)


def _cut(path: Path, _older: Path, random: Random) -> str | None:
    def change(content: bytearray) -> str:
        size, offset = len(content), _offset(len(content), random)
        del content[offset:]
        return f"after {offset} of {size} bytes"

    return _rewrite(path, change)


def _zero(path: Path, _older: Path, random: Random) -> str | None:
    def change(content: bytearray) -> str:
        offset = _offset(len(content), random)
        end = min(offset + random.choice((1, 16, 512, 4096)), len(content))
        content[offset:end] = bytes(end - offset)
        return f"bytes {offset} to {end} of {len(content)}"

    return _rewrite(path, change)


def _swap(path: Path, _older: Path, random: Random) -> str | None:
    def change(content: bytearray) -> str | None:
        size = random.choice((8, 64, 512, 4096))
        if len(content) < 2 * size:
            return None
        one = random.randrange(len(content) - 2 * size + 1)
        two = random.randrange(one + size, len(content) - size + 1)
        first, second = content[one : one + size], content[two : two + size]
        content[one : one + size], content[two : two + size] = second, first
        return f"{size} bytes at {one} and {two} of {len(content)}"

    return _rewrite(path, change)


def _repeat(path: Path, _older: Path, random: Random) -> str | None:
    def change(content: bytearray) -> str:
        begin = _offset(len(content), random)
        end = min(begin + random.choice((1, 64, 4096, 65536)), len(content))
        content[end:end] = content[begin:end]
        return f"bytes {begin} to {end} come twice"

    return _rewrite(path, change)


def _copy(path: Path, _older: Path, random: Random) -> str | None:
    """The same content under another name: of a file beside it, or of one to come."""
    number = re.match(r"\d+", path.name)
    others = [each for each in path.parent.iterdir() if file_kind_of(each) == file_kind_of(path)]
    others.remove(path)
    if number is not None and (not others or random.random() < 0.5):
        named = f"{int(number[0]) + random.randint(1, 30):06}{path.suffix}"
        others = [path.with_name(named)]
    if not others or not path.stat().st_size:
        return None
    other = random.choice(sorted(others))
    if other.exists() and other.read_bytes() == path.read_bytes():
        return None
    shutil.copyfile(path, other)
    return f"also as {other.name}"


def file_kind_of(path: Path) -> str:
    return file_kind(f"{path.parent.name}/{path.name}")


def _remove(path: Path, _older: Path, _random: Random) -> str:
    path.unlink()
    return "removed"


def _empty(path: Path, _older: Path, _random: Random) -> str | None:
    def change(content: bytearray) -> str:
        size = len(content)
        content.clear()
        return f"none of {size} bytes left"

    return _rewrite(path, change)


def _stale(path: Path, older: Path, _random: Random) -> str | None:
    """A version of the same file from some time ago."""
    if not older.exists() or older.read_bytes() == path.read_bytes():
        return None
    shutil.copyfile(older, path)
    return f"an older version with {older.stat().st_size} bytes"


DAMAGES: Final[dict[str, Callable[[Path, Path, Random], str | None]]] = {
    "flip": _flip,
    "flips": _flips,
    "cut": _cut,
    "zero": _zero,
    "remove": _remove,
    "swap": _swap,
    "stale": _stale,
    "empty": _empty,
    "repeat": _repeat,
    "copy": _copy,
}
"""Each damages the first file, whose older version is the second; gives what it did, or None if it
can't do that to this file."""
