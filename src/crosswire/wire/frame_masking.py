"""Masks the secrets of single frames, for readers that may have joined a connection late.

`masking.Mask` follows a connection from its first byte. Who joins later knows frames, not what
preceded them, so each frame is judged by itself: with the same rules, and covered as a whole where
these can't decide.
"""

from __future__ import annotations

import re
from typing import Final

from crosswire.wire.contract import Decoder, Frame, FrameError, Unsynchronized
from crosswire.wire.emp.mask import EmpMask
from crosswire.wire.epoxy.mask import EpoxyMask
from crosswire.wire.masking import COVER, Mask
from crosswire.wire.micromsg2.frames import Handshake
from crosswire.wire.micromsg2.mask import MicroMsg2Mask
from crosswire.wire.zmtp.decoder import ZmtpDecoder
from crosswire.wire.zmtp.frames import Command
from crosswire.wire.zmtp.layout import COMMAND_HELLO, MECHANISM_PLAIN

__all__ = ["mask_frame"]

_AUTH: Final = re.compile(rb"x-auth:([^;]*)", re.IGNORECASE)


def mask_frame(protocol: str, item: Frame | FrameError, data: bytes, decoder: Decoder) -> bytes:
    """The bytes of an item that this decoder has given, with secrets covered by asterisks."""
    if isinstance(item, Unsynchronized):
        # Of what is no frame nobody knows whether there is a secret in it.
        return COVER * len(data)
    if protocol == "emp":
        return _judged(EmpMask(), data)
    if protocol == "epoxy":
        return _judged(EpoxyMask(), data)
    if protocol == "micromsg2":
        if isinstance(item, Handshake):
            return _judged(MicroMsg2Mask(), data)
        if isinstance(item, FrameError):
            return _AUTH.sub(lambda found: found[0][:7] + COVER * len(found[1]), data)
    if protocol == "emqp":
        return _mask_zmtp(item, data, decoder)
    return data


def _judged(mask: Mask, data: bytes) -> bytes:
    return mask.feed(data) + mask.rest()


def _mask_zmtp(item: Frame | FrameError, data: bytes, decoder: Decoder) -> bytes:
    """PLAIN's HELLO has a password. CURVE's has keys only, but its form does not show which it is
    if the greeting was missed."""
    if isinstance(item, Command) and item.name == COMMAND_HELLO:
        start = len(data) - len(item.body)
        return data[:start] + COVER * len(item.body)
    if isinstance(item, FrameError) and isinstance(decoder, ZmtpDecoder):
        is_secret = decoder.mechanism in (MECHANISM_PLAIN, None)
        return COVER * len(data) if is_secret and decoder.stage != "traffic" else data
    return data
