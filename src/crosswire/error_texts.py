"""What peers and users may see of an error: errors of the disk name files of the server."""

from __future__ import annotations

from crosswire.errors import LakeError, LogError, StoreError, StoreFull

__all__ = ["public_text"]


def public_text(error: Exception) -> str:
    """What peers, and users who don't administer the hub, get of an error.

    Errors of the disk name files of the server, and quote its engine or the file system: that is
    for operators, in the log and over HTTP.
    """
    if isinstance(error, StoreFull):
        return "there is no room on the disk"
    if isinstance(error, StoreError):
        return "the disk can't be read or written: the hub's log has the reason"
    if isinstance(error, LakeError):
        return "a file of the lake is missing or damaged: the hub's log has the reason"
    if isinstance(error, LogError):
        return "the replicated log can't be used: the hub's log has the reason"
    return str(error)
