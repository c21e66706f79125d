"""Bond: schemas, .bond files, Fast Binary, Compact Binary, marshalling and Simple JSON.

    from crosswire.bond import idl, marshal

    calc = idl.load("calc.bond")
    Params = calc.struct("examples.calc.Params")
    data = marshal.marshal(Params.python_class(x=67, y=87), Params)
    marshal.unmarshal(data, Params).x                                   # 67

`hub_module()` has the structs of the hub's own services, `epoxy_module()` those of Epoxy and of
Bond Comm's errors, `core_module()` Bond's own (`bond.SchemaDef`, `bond.Void`).

Inside, modules import only those below them:

    schemadef
    idl · marshal · bonded · json
    syntax · compact · fast
    lexer · binary
    codegen · tree · explain
    dialect · scalars
    schema
    classes · datatypes · values
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from crosswire.bond import bonded as _bonded  # noqa: F401 - every Bonded needs its codec
from crosswire.bond import idl
from crosswire.bond.schema import Module

__all__ = ["core_module", "epoxy_module", "hub_module"]


@cache
def hub_module() -> Module:
    """`crosswire.Hub`, `crosswire.Subscriber`, `crosswire.Blob`."""
    return _packaged("crosswire.bond")


@cache
def epoxy_module() -> Module:
    """`bond.comm.epoxy.*` and `bond.comm.Error`, `InternalServerError`, `AggregateError`."""
    return _packaged("epoxy.bond")


@cache
def core_module() -> Module:
    """`bond.SchemaDef` and what it consists of, `bond.Void`, `bond.Box<T>`."""
    return _packaged("bond.bond")


def _packaged(name: str) -> Module:
    text = resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
    return idl.parse(text, name)
