"""The schemas that tests share: those of the vectors, by the full name of a struct."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from crosswire.bond import bonded, core_module, epoxy_module, idl
from crosswire.bond import compact as compact  # registers its dialects
from crosswire.bond import fast as fast
from crosswire.bond.dialect import Dialect
from crosswire.bond.schema import Module, StructDef

VECTORS = Path(__file__).parent.parent / "vectors"
COMPAT = VECTORS / "bond_compat"


@cache
def _modules() -> tuple[Module, ...]:
    files = (idl.load(VECTORS / "samples.bond"), idl.load(VECTORS / "calc.bond"))
    return (*files, epoxy_module(), core_module())


def struct(name: str) -> StructDef:
    return next(module.structs[name] for module in _modules() if name in module.structs)


def vectors() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((VECTORS / "bond.json").read_text())
    return found


def dialects() -> list[Dialect]:
    return list(bonded.DIALECTS.values())
