"""The exception tree is drawn as it is."""

from __future__ import annotations

import re

from crosswire import errors


def drawn() -> dict[str, str]:
    """Each class of the picture with its parent."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"((?:[│ ]   )*(?:[├└]── )?)([A-Z][A-Za-z]+)(?:  |$)", line):
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            parents[found[2]] = path[depth - 1] if depth else "Exception"
    return parents


def test_the_picture_has_every_class_below_its_base() -> None:
    classes = [getattr(errors, name) for name in errors.__all__]
    assert drawn() == {each.__name__: each.__bases__[0].__name__ for each in classes}


def test_every_class_is_exported() -> None:
    defined = [name for name, each in vars(errors).items() if isinstance(each, type)]
    assert sorted(defined) == sorted(errors.__all__)
