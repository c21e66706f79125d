"""Bring the loopback interface of a new network namespace up: `python -m tests.docs.loopback`."""

from __future__ import annotations

import fcntl
import socket
import struct

_SET_FLAGS, _UP = 0x8914, 1

if __name__ == "__main__":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
