"""Reading TOML: all mistakes at once, each with its line and what to do."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from crosswire.toml import read


class Room(msgspec.Struct, frozen=True, kw_only=True):
    size: Annotated[int, msgspec.Meta(ge=1)] = 1
    colour: Literal["red", "green"] = "red"


class House(msgspec.Struct, frozen=True, kw_only=True):
    owner: str
    rooms: dict[str, Room] = {}
    guests: list[Room] = []
    attic: Room | None = None


def explained(text: str) -> list[str]:
    house, mistakes = read(text, House)
    assert (house is None) == bool(mistakes)
    return [str(mistake) for mistake in mistakes]


def test_what_is_right_is_read() -> None:
    house, mistakes = read('owner = "anna"\n[rooms.hall]\nsize = 3\n', House)
    assert mistakes == []
    assert house == House(owner="anna", rooms={"hall": Room(size=3)})


def test_every_mistake_is_reported_with_its_line() -> None:
    text = """owner = 1
colours = 3

[rooms.hall]
size = 0
color = "red"

[[guests]]
size = 1
[[guests]]
colour = "blue"

[attic]
size = "big"
"""
    assert explained(text) == [
        "line 1: owner: Expected `str`, got `int`",
        "line 2: colours: unknown key (known: attic, guests, owner, rooms)",
        "line 5: rooms.hall.size: Expected `int` >= 1",
        "line 6: rooms.hall.color: unknown key (did you mean colour?)",
        "line 11: guests[2].colour: Invalid enum value 'blue' (one of red, green)",
        "line 14: attic.size: Expected `int`, got `str`",
    ]


def test_what_is_missing_is_reported() -> None:
    assert explained("") == ["owner is missing"]


def test_what_is_not_toml_is_reported_with_its_line() -> None:
    assert explained('owner = "anna"\nrooms = = 3\n') == ["line 2: not TOML: Invalid value"]


def test_quoted_and_dotted_keys_are_found() -> None:
    assert explained('owner = "a"\nrooms."a.b".size = 0\n') == [
        "line 2: rooms.a.b.size: Expected `int` >= 1"
    ]
