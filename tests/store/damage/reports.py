"""What a hub and its commands report about damage, and which messages that covers."""

from __future__ import annotations

import json
import re
from typing import Final

__all__ = ["Reports"]

# Without a destination in it, such a report covers all of them: nobody knows what is missing.
_GENERAL: Final = re.compile(
    r"\blog\b.*\b(missing|lost|verif\w+|holes?|cut|short\w*|damaged|unreadable|can't be read)|"
    r"\b(missing|lost|verif\w+)\b.*\blog\b|"
    r"\b(tables?|manifest|current)\b.*\b(missing|lost|removed|older)|(any|every|all) destinations?",
    re.IGNORECASE | re.DOTALL,
)
_STOPPED: Final = re.compile(r"\bstopped\b|was refused", re.IGNORECASE)
_AGAIN: Final = re.compile(r"again|twice|repeat|redeliver|duplicate", re.IGNORECASE)
_WORD: Final = re.compile(r"[\w/-]+")
_DESTINATION: Final = re.compile(r"\b(queue|topic)/[\w/-]+")
_RANGES: Final = re.compile(r"\bids? (?:from )?(\d+) (?:to|-|and) (\d+|any)", re.IGNORECASE)
_SINGLE: Final = re.compile(r"\b(?:message|id) (\d+)\b")


class _Statement:
    """A report, taken apart once: some stores have a thousand of them."""

    __slots__ = ("is_general", "is_stop", "ranges", "words")

    def __init__(self, entry: str) -> None:
        self.words = set(_WORD.findall(entry))
        self.ranges = _ranges(entry)
        self.is_stop = _STOPPED.search(entry) is not None
        self.is_general = not _DESTINATION.search(entry) and _GENERAL.search(entry) is not None

    def is_about(self, identifier: int) -> bool:
        """Is an id (0: unknown) one of those that it names, if it names any?"""
        if not self.ranges or not identifier:
            return True
        return any(low <= identifier <= high for low, high in self.ranges)


class Reports:
    """Single statements, without what differs when they are repeated."""

    def __init__(self) -> None:
        self.entries: dict[str, None] = {}
        self._by_word: dict[str, list[_Statement]] = {}
        self._general: list[_Statement] = []

    def __bool__(self) -> bool:
        return bool(self.entries)

    def add(self, text: str) -> None:
        text = text.strip()
        if text and text not in self.entries:
            self.entries[text] = None
            self._index(text)

    def _index(self, text: str) -> None:
        statement = _Statement(text)
        for word in statement.words:
            self._by_word.setdefault(word, []).append(statement)
        if statement.is_general:
            self._general.append(statement)

    def add_answer(self, answer: object, path: str = "") -> None:
        """Members of an answer that are about damage and say that there is some."""
        if isinstance(answer, dict):
            for key, value in answer.items():
                if "damage" in key.lower():
                    if value not in (None, False, 0, "", [], {}, "ok", "none"):
                        self._add_value(f"{path}{key}", value)
                else:
                    self.add_answer(value, f"{path}{key}.")
        elif isinstance(answer, list):
            for value in answer:
                self.add_answer(value, path)
        elif isinstance(answer, str) and "damage" in answer.lower():
            self.add(f"{path.rstrip('.')}: {answer}")

    def _add_value(self, path: str, value: object) -> None:
        for each in value if isinstance(value, list) else [value]:
            self.add(f"{path}: {each if isinstance(each, str) else json.dumps(each)}")

    def add_log(self, log: str) -> None:
        """Lines of the log at the level of a warning or above, and what is no line of the log."""
        for line in log.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                self.add(f"stderr: {line}")
                continue
            if isinstance(entry, dict) and entry.get("level") in ("warning", "error", "critical"):
                fields = {k: v for k, v in entry.items() if k not in ("time", "level", "logger")}
                self.add(f"logged: {', '.join(f'{key} {fields[key]}' for key in fields)}")

    def add_result(self, command: str, output: str) -> None:
        """What `crosswire store verify --json` or `repair --json` found and could not restore."""
        result = json.loads(output)
        for finding in result.get("findings", []):
            self.add(f"{command}: {', '.join(str(each) for each in finding.values() if each)}")
        for destination, ids in result.get("lost", {}).items():
            for identifier in ids:
                self.add(f"{command}: message {identifier} of {destination} is lost")
        if result.get("unsure"):
            self.add(f"{command}: {result['unsure']} messages may be delivered again")

    def forget(self) -> None:
        """Start anew: a repair has to say itself what it could not repair."""
        self.entries, self._by_word, self._general = {}, {}, []

    def mentions(self, word: str) -> bool:
        return any(word in each for each in self.entries)

    def says_again(self) -> bool:
        """Does any of them say that messages may be delivered again?"""
        return any(_AGAIN.search(each) for each in self.entries)

    def coverage(self, names: set[str], identifier: int) -> str:
        """What is said about a message by names of its destination and by its id (0: unknown).

        `named`, `general` (of the log, or of any destination), `stopped` (its queue is, until it is
        repaired), `vague` (something is damaged), or nothing.
        """
        found = {"vague"} if self.entries else {""}
        for statement in [each for name in names for each in self._by_word.get(name, ())]:
            if statement.is_stop:
                found.add("stopped")
            elif statement.is_about(identifier):
                found.add("named")
        if any(statement.is_about(identifier) for statement in self._general):
            found.add("general")
        # What is stopped must go on after a repair, whatever else is said.
        return next(each for each in ("stopped", "named", "general", "vague", "") if each in found)


def _ranges(entry: str) -> list[tuple[int, int]]:
    """The ids that a report names."""
    ranges = [
        (int(low), 1 << 63 if high == "any" else int(high)) for low, high in _RANGES.findall(entry)
    ]
    return ranges + [(int(each), int(each)) for each in _SINGLE.findall(entry)]
