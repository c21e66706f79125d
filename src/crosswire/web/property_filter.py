"""Filters on properties over HTTP, as people write them or in the hub's own form."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from crosswire.errors import InvalidFilter
from crosswire.filter_text import wire_filter
from crosswire.hub.filters import Predicate
from crosswire.hub.subscriptions import predicate

__all__ = ["FilterText", "property_predicate"]

FilterText: TypeAlias = Annotated[str, msgspec.Meta(max_length=10_000)]
"""A filter. The event loop parses it: it must not be long."""


def property_predicate(text: str) -> Predicate | None:
    """A filter such as `price > 10; name = acme` as a function of properties; None for no filter.

    Raises InvalidFilter, with the position of the term that is wrong.
    """
    wire = wire_filter(text)
    if text and not wire:
        # Every message would pass, and all of them be deleted, moved or sent again.
        raise InvalidFilter("a filter without terms: leave it out to select everything")
    return predicate(wire)
