"""The console's files, served from the package to anybody: what they show needs a token.

They are read once, so that a response takes no disk and only names of this table can be asked for.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
from importlib.resources.abc import Traversable
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["console_routes"]

_INDEX: Final = "index.html"
_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Scripts and styles come from files only: text of a peer that gets into the page can't run.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS: Final = {
    # Kept, and asked for again with its tag each time: after an upgrade no file is a stale one.
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class ConsoleFile(msgspec.Struct, frozen=True):
    """A file with its type, and a tag that changes with its content."""

    data: bytes
    content_type: str
    tag: str


@functools.cache
def console_files() -> dict[str, ConsoleFile]:
    """The files by their path in the console's folder."""
    found: dict[str, ConsoleFile] = {}

    def read(folder: Traversable, prefix: str) -> None:
        for each in folder.iterdir():
            kind = _TYPES.get(each.name.rpartition(".")[2])
            if each.is_dir():
                read(each, f"{prefix}{each.name}/")
            elif kind is not None:
                data = each.read_bytes()
                tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
                found[prefix + each.name] = ConsoleFile(data, kind, tag)

    read(importlib.resources.files("crosswire.web") / "console", "")
    return found


async def _serve(request: Request) -> Response:
    file = console_files().get(request.path_params.get("path", _INDEX))
    if file is None:
        raise HTTPException(404, "the console has no such file")
    headers = {**_HEADERS, "etag": file.tag, "content-type": file.content_type}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.data, headers=headers)


def console_routes() -> list[Route]:
    """The page at `/`, and its files below `/console/`."""
    return [
        Route("/", _serve, methods=["GET"]),
        Route("/console/{path:path}", _serve, methods=["GET"]),
    ]
