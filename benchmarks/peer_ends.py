"""Producers and consumers of other servers on plain sockets: what `peers.py` loads them with.

Each end uses one connection, in batches, and reads no more of an answer than it has to: so that the
load costs as little as possible beside the server that it measures, as in `crosswire bench`.
A payload is a run of the letter x, which nothing else in these protocols has.
"""

from __future__ import annotations

import json
import re
import socket
import struct
from abc import ABC, abstractmethod

from crosswire.cli.bench.contract import Line, Work, consumer_of, producer_of

__all__ = ["ENDS", "Crosswire", "PeerEnd"]

SIZE_BYTES = 128
PAYLOAD = b"x" * SIZE_BYTES
PREFETCH = 2000
TIMEOUT_S = 60.0
_READ_BYTES = 1 << 18


class PeerEnd(ABC):
    """A producer or a consumer. `durable` is a queue with acknowledgements, else a topic without.

    `is_answered` is whether the producer gets something for each message that it must read.
    """

    def __init__(self, port: int, *, durable: bool) -> None:
        self.durable = self.is_answered = durable
        self.socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data = b""

    def _read(self) -> None:
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise SystemExit(f"{type(self).__name__}: the server closed the connection")
        self._data += data

    def _read_until(self, end: bytes) -> bytes:
        while (index := self._data.find(end)) < 0:
            self._read()
        found, self._data = self._data[:index], self._data[index + len(end) :]
        return found

    @abstractmethod
    def open_producer(self) -> None:
        """Make ready to send."""

    @abstractmethod
    def open_consumer(self) -> None:
        """Make ready to receive."""

    @abstractmethod
    def send(self, count: int) -> None:
        """Send this many messages."""

    @abstractmethod
    def answered(self) -> int:
        """How many messages one read acknowledges; blocks until there is something to read."""

    @abstractmethod
    def take(self) -> int:
        """How many messages one read brings; acknowledges them. Blocks as `answered` does."""

    def close(self) -> None:
        """End the connection."""
        self.socket.close()


class Crosswire(PeerEnd):
    """A hub, through one of its protocols."""

    def __init__(self, port: int, *, durable: bool, via: str = "micromsg2") -> None:
        self.durable = self.is_answered = durable
        destination = "queue/bench" if durable else "topic/bench"
        self._work = Work(via=via, destination=destination, ports={via: port}, durable=durable)

    def open_producer(self) -> None:
        self._producer = producer_of(self._work)
        self._line = Line(self._work, self._producer)
        self.is_answered = self._producer.is_answered

    def open_consumer(self) -> None:
        self._consumer = consumer_of(self._work)
        self._line = Line(self._work, self._consumer)

    def send(self, count: int) -> None:
        self._producer.send(count)
        self._line.write()

    def answered(self) -> int:
        return self._producer.answered(self._line.read())

    def take(self) -> int:
        count = self._consumer.take(self._line.read())
        self._line.write()
        return count

    def close(self) -> None:
        self._line.close()


class Redis(PeerEnd):
    """A stream with a consumer group; or publish and subscribe."""

    _ID = re.compile(rb"\$\d+\r\n(\d+-\d+)\r\n")

    @staticmethod
    def _command(*words: bytes) -> bytes:
        return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)

    def open_producer(self) -> None:
        self.is_answered = True
        add = (b"XADD", b"q", b"*", b"p", PAYLOAD)
        self._message = self._command(*(add if self.durable else (b"PUBLISH", b"t", PAYLOAD)))

    def open_consumer(self) -> None:
        if not self.durable:
            self.socket.sendall(self._command(b"SUBSCRIBE", b"t"))
            self._read_until(b":1\r\n")
            return
        self.socket.sendall(self._command(b"XGROUP", b"CREATE", b"q", b"g", b"$", b"MKSTREAM"))
        self._read_until(b"\r\n")  # or it exists
        count = b"%d" % PREFETCH
        read = (b"XREADGROUP", b"GROUP", b"g", b"c", b"COUNT", count)
        self._next = self._command(*read, b"BLOCK", b"0", b"STREAMS", b"q", b">")
        self.socket.sendall(self._next)

    def send(self, count: int) -> None:
        self.socket.sendall(self._message * count)

    def answered(self) -> int:
        self._read()
        # An id is two lines; the number of subscribers that a PUBLISH gives is one.
        lines = 2 if self.durable else 1
        parts = self._data.split(b"\r\n")
        found = (len(parts) - 1) // lines
        self._data = b"\r\n".join(parts[found * lines :])
        return found

    def take(self) -> int:
        self._read()
        whole = PAYLOAD + b"\r\n"
        if not self.durable:
            found = self._data.count(whole)
            self._data = self._data[self._data.rfind(whole) + len(whole) :] if found else self._data
            return found
        # What is read: the answer to XACK, then "*1 *2 $1 q *COUNT" and as many entries.
        header = re.search(rb"\*1\r\n\*2\r\n\$1\r\nq\r\n\*(\d+)\r\n", self._data)
        if header is None or self._data.count(whole) < int(header[1]):
            return 0
        ids = self._ID.findall(self._data)
        self._data = b""
        self.socket.sendall(self._command(b"XACK", b"q", b"g", *ids) + self._next)
        return len(ids)


class Nats(PeerEnd):
    """A JetStream stream with a durable consumer; or publish and subscribe."""

    _REPLY = re.compile(rb"MSG \S+ \d+ (\S+) \d+\r\n")

    def _connect(self) -> None:
        self._read_until(b"\r\n")
        self.socket.sendall(b'CONNECT {"verbose":false,"pedantic":false}\r\nPING\r\n')
        self._read_until(b"PONG\r\n")

    def _request(self, subject: str, **body: object) -> None:
        """A call of JetStream's API. What exists already is an error that does not matter."""
        data = json.dumps(body).encode()
        head = f"SUB _INBOX.api 9\r\nPUB {subject} _INBOX.api {len(data)}\r\n".encode()
        self.socket.sendall(head + data + b"\r\n")
        self._read_until(b"}\r\n")
        self.socket.sendall(b"UNSUB 9\r\n")

    def _read(self) -> None:
        super()._read()
        if b"PING\r\n" in self._data:
            self._data = self._data.replace(b"PING\r\n", b"")
            self.socket.sendall(b"PONG\r\n")

    def _create_stream(self) -> None:
        subject = "$JS.API.STREAM.CREATE.bench"
        self._request(subject, name="bench", subjects=["js.bench"], storage="file")

    def open_producer(self) -> None:
        self._connect()
        if self.durable:
            self._create_stream()
            self.socket.sendall(b"SUB _INBOX.p 1\r\n")
        reply = b"js.bench _INBOX.p" if self.durable else b"bench"
        self._message = b"PUB %s %d\r\n%s\r\n" % (reply, SIZE_BYTES, PAYLOAD)

    def open_consumer(self) -> None:
        self._connect()
        if not self.durable:
            self.socket.sendall(b"SUB bench 1\r\nPING\r\n")
            self._read_until(b"PONG\r\n")
            return
        self._create_stream()
        self.socket.sendall(b"SUB deliver.bench 1\r\n")
        config = {
            "durable_name": "bench",
            "deliver_subject": "deliver.bench",
            "ack_policy": "all",
            "max_ack_pending": PREFETCH,
        }
        subject = "$JS.API.CONSUMER.DURABLE.CREATE.bench.bench"
        self._request(subject, stream_name="bench", config=config)

    def send(self, count: int) -> None:
        self.socket.sendall(self._message * count)

    def answered(self) -> int:
        self._read()
        if b'"error"' in self._data:
            raise SystemExit(f"JetStream: {self._data!r}")
        found = self._data.count(b"}\r\n")
        if found:
            self._data = self._data[self._data.rfind(b"}\r\n") + 3 :]
        return found

    def take(self) -> int:
        self._read()
        whole = PAYLOAD + b"\r\n"
        found = self._data.count(whole)
        if found:
            end = self._data.rfind(whole) + len(whole)
            if self.durable:
                # The last one acknowledges those before it.
                reply = self._REPLY.findall(self._data[:end])[-1]
                self.socket.sendall(b"PUB %s 4\r\n+ACK\r\n" % reply)
            self._data = self._data[end:]
        return found


class Mosquitto(PeerEnd):
    """MQTT 3.1.1 with QoS 0. It has no acknowledgement that waits for the disk."""

    def _packet(self, kind: int, body: bytes) -> bytes:
        size = bytearray()
        left = len(body)
        while True:
            left, byte = left >> 7, left & 0x7F
            size.append(byte | (0x80 if left else 0))
            if not left:
                return bytes([kind]) + bytes(size) + body

    def _connect(self, name: bytes) -> None:
        body = b"\x00\x04MQTT\x04\x02\x00\x00" + len(name).to_bytes(2) + name
        self.socket.sendall(self._packet(0x10, body))
        while len(self._data) < 4:
            self._read()
        if self._data[3]:
            raise SystemExit("Mosquitto refuses the connection")
        self._data = self._data[4:]

    def open_producer(self) -> None:
        self._connect(b"producer")
        self._message = self._packet(0x30, b"\x00\x05bench" + PAYLOAD)

    def open_consumer(self) -> None:
        self._connect(b"consumer")
        self.socket.sendall(self._packet(0x82, b"\x00\x01\x00\x05bench\x00"))
        while len(self._data) < 5:
            self._read()
        self._data = self._data[5:]
        self._size = len(self._packet(0x30, b"\x00\x05bench" + PAYLOAD))

    def send(self, count: int) -> None:
        self.socket.sendall(self._message * count)

    def answered(self) -> int:
        raise NotImplementedError

    def take(self) -> int:
        self._read()
        found, rest = divmod(len(self._data), self._size)
        self._data = self._data[len(self._data) - rest :]
        return found


class RabbitMq(PeerEnd):
    """AMQP 0-9-1: a quorum queue with publisher confirms, which are sent after an fsync; or a
    classic queue that is not durable, without any acknowledgement."""

    _HEAD = struct.Struct(">BHI")

    def _method(self, channel: int, kind: tuple[int, int], arguments: bytes) -> bytes:
        return self._frame(1, channel, struct.pack(">HH", *kind) + arguments)

    def _frame(self, kind: int, channel: int, body: bytes) -> bytes:
        return self._HEAD.pack(kind, channel, len(body)) + body + b"\xce"

    def _frames(self) -> list[bytes]:
        """What the whole frames have of methods, without those of content."""
        data, at, found = self._data, 0, []
        while at + 7 <= len(data):
            kind, _, size = self._HEAD.unpack_from(data, at)
            if at + 8 + size > len(data):
                break
            if kind == 1:
                found.append(data[at + 7 : at + 7 + size])
            at += 8 + size
        self._data = data[at:]
        return found

    def _call(self, channel: int, kind: tuple[int, int], arguments: bytes) -> None:
        self.socket.sendall(self._method(channel, kind, arguments))
        self._wait_for(kind[0], kind[1] + 1)

    def _wait_for(self, *kind: int) -> None:
        while True:
            for body in self._frames():
                found = struct.unpack_from(">HH", body)
                if found == kind:
                    return
                if found in ((10, 50), (20, 40)):
                    raise SystemExit(f"RabbitMQ refuses: {body!r}")
            self._read()

    def _connect(self) -> None:
        self.socket.sendall(b"AMQP\x00\x00\x09\x01")
        self._wait_for(10, 10)
        login = b"\x00guest\x00guest"
        start = bytes(4) + b"\x05PLAIN" + len(login).to_bytes(4) + login + b"\x05en_US"
        self.socket.sendall(self._method(0, (10, 11), start))
        self._wait_for(10, 30)
        self.socket.sendall(self._method(0, (10, 31), struct.pack(">HIH", 10, 131_072, 0)))
        self._call(0, (10, 40), b"\x01/\x00\x00")
        self._call(1, (20, 10), b"\x00")
        arguments, flags = b"", 0
        if self.durable:
            arguments, flags = b"\x0cx-queue-typeS" + (6).to_bytes(4) + b"quorum", 2
        name = b"\x05bench"
        declare = bytes(2) + name + bytes([flags]) + len(arguments).to_bytes(4) + arguments
        self._call(1, (50, 10), declare)

    def open_producer(self) -> None:
        self._connect()
        if self.durable:
            self._call(1, (85, 10), b"\x00")
        self._message = (
            self._method(1, (60, 40), bytes(2) + b"\x00\x05bench\x00")
            + self._frame(2, 1, struct.pack(">HHQHB", 60, 0, SIZE_BYTES, 0x1000, 1 + self.durable))
            + self._frame(3, 1, PAYLOAD)
        )
        self._confirmed = 0
        self._single: set[int] = set()

    def open_consumer(self) -> None:
        self._connect()
        self._call(1, (60, 10), struct.pack(">IHB", 0, PREFETCH if self.durable else 0, 0))
        flags = 0 if self.durable else 2
        self._call(1, (60, 20), bytes(2) + b"\x05bench\x01c" + bytes([flags]) + bytes(4))

    def send(self, count: int) -> None:
        self.socket.sendall(self._message * count)

    def answered(self) -> int:
        self._read()
        before = self._confirmed + len(self._single)
        for body in self._frames():
            method, tag, multiple = struct.unpack_from(">IQB", body)
            if method != 60 << 16 | 80:
                raise SystemExit(f"RabbitMQ does not confirm: {body!r}")
            if multiple:
                self._confirmed = max(self._confirmed, tag)
                self._single = {each for each in self._single if each > tag}
            else:
                self._single.add(tag)
        while self._confirmed + 1 in self._single:
            self._confirmed += 1
            self._single.remove(self._confirmed)
        return self._confirmed + len(self._single) - before

    def take(self) -> int:
        self._read()
        # A delivery counts when its body is there: the method may be in one read, that in the next.
        found = self._data.count(PAYLOAD + b"\xce")
        if not found:
            return 0
        cut = self._data.rfind(PAYLOAD + b"\xce") + SIZE_BYTES + 1
        rest, self._data = self._data[cut:], self._data[:cut]
        deliveries = self._frames()
        self._data = rest
        if self.durable:
            last = deliveries[-1]
            tag = struct.unpack_from(">Q", last, 5 + last[4])[0]
            self.socket.sendall(self._method(1, (60, 80), struct.pack(">QB", tag, 1)))
        return found


ENDS: dict[str, type[PeerEnd]] = {
    "Redis": Redis,
    "NATS": Nats,
    "Mosquitto": Mosquitto,
    "RabbitMQ": RabbitMq,
}
"""By the name of the server."""
