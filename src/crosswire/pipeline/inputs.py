"""What the user gave as input: capture files, or the folders of a hub's lake."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from crosswire.errors import InvalidInput
from crosswire.pipeline.sources.capture import is_capture

__all__ = ["Inputs", "find_inputs", "search"]


@dataclass(frozen=True)
class Inputs:
    """`taps` are `wire/` folders of lakes; `messages` and `ledgers` those of these names."""

    captures: tuple[str, ...] = ()
    taps: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    ledgers: tuple[str, ...] = ()


def find_inputs(paths: Iterable[str]) -> Inputs:
    """Look at what is there. Raises InvalidInput for what can't be read, or if there is nothing.

    A folder is a lake (or has one in `lake/`), or is searched for capture files, by their content.
    A URL is the `wire/` folder of a lake in a file system that Spark knows.
    """
    paths = list(paths)
    found = search(paths)
    if found == Inputs():
        raise InvalidInput(
            f"there is nothing to read in {', '.join(paths)}: no capture file, and no lake with "
            "wire/, messages/ or ledger/"
        )
    return found


def search(paths: Iterable[str]) -> Inputs:
    """Like `find_inputs`, for who can wait until there is something."""
    captures: dict[str, None] = {}
    taps: dict[str, None] = {}
    messages: dict[str, None] = {}
    ledgers: dict[str, None] = {}
    for name in paths:
        if "://" in name:
            taps[name] = None
            continue
        path = Path(name)
        try:
            if path.is_file():
                if not is_capture(path):
                    raise InvalidInput(f"{name} is no capture file: neither pcap nor pcapng")
                captures[str(path.resolve())] = None
                continue
            if not path.is_dir():
                raise InvalidInput(f"{name} does not exist")
            lake = next((each for each in (path, path / "lake") if _is_lake(each)), None)
            if lake is not None:
                taps |= {str(folder): None for folder in _filled(lake / "wire")}
                messages |= {str(folder): None for folder in _filled(lake / "messages")}
                ledgers |= {str(folder): None for folder in _filled(lake / "ledger")}
            elif _filled(path):
                taps[str(path.resolve())] = None
            else:
                found = [file for file in sorted(path.rglob("*")) if _may_be_capture(file)]
                captures |= {str(file.resolve()): None for file in found}
        except OSError as error:
            raise InvalidInput(f"can't read {error.filename}: {error.strerror}") from error
    return Inputs(tuple(captures), tuple(taps), tuple(messages), tuple(ledgers))


def _is_lake(folder: Path) -> bool:
    return any((folder / name).is_dir() for name in ("wire", "messages", "ledger"))


def _filled(folder: Path) -> list[Path]:
    """The folder itself, if there is a file of the lake in it."""
    return [folder.resolve()] if next(folder.glob("date=*/*.parquet"), None) else []


def _may_be_capture(file: Path) -> bool:
    try:
        return file.is_file() and not file.name.startswith(".") and is_capture(file)
    except FileNotFoundError:
        return False  # taken away while we looked
