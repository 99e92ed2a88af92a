"""A connection over which parts of objects come by HTTP/1.1, straight into the buffer that they are for.

Only what a GET of a range needs: status 206, the range that was asked for, a length. All else is ``AskClient``.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from xxhash import xxh3_128

from kvstow.errors import StoreUnavailable
from kvstow.layout import HEADER_BYTES
from kvstow.runtime import Clock
from kvstow.store.base import Buffer

PIECE_BYTES: Final = 1 << 20  # taken by one call of the system, and in the cache when it returns
HEAD_BYTES: Final = 16 << 10  # the longest head of an answer
FIRST_BYTES: Final = 4 << 10  # asked for at once while the head comes: the most of a value that is copied
PARTIAL: Final = 206
MAY_PASS: Final = (404, 408, 409, 412, 416, 425, 429)  # of what is below 500

_STATUS: Final = re.compile(rb"HTTP/1\.([01]) (\d{3})( .*)?")
_RANGE: Final = re.compile(rb"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")
_NUMBER: Final = re.compile(rb"\d{1,15}")
_STRONG_TAG: Final = re.compile(rb'"[!#-~]{1,200}"')


class AskClient(StoreUnavailable):
    """The bytes don't come this way. ``always``: nor will others, if they come by the client. ``status`` of an answer
    that was one."""

    def __init__(self, why: str, *, status: int = 0, always: bool = False) -> None:
        super().__init__(why)
        self.status = status
        self.always = always


class Line:
    """One request at a time. A request, its bytes included, may take ``timeout_s`` (looked at between two calls of the
    system, of which none takes longer). Timeouts are ``TimeoutError``, other faults ``OSError`` or ``AskClient``."""

    def __init__(self, sock: socket.socket, clock: Clock, timeout_s: float) -> None:
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, limit)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)  # the system waits: Python would ask twice for each bit that is there
        self.sock = sock
        self.tag = ""
        self.used_s = 0.0
        self._clock = clock
        self._timeout_s = timeout_s
        self._until_s = 0.0
        self._head = bytearray(HEAD_BYTES)
        self._came = 0  # bytes of the head
        self._answered = False
        self._start = self._room = self._length = self._at = 0
        self._target = memoryview(b"")
        self._keep = True

    def end(self) -> bool:
        """Let go of the buffer. Returns whether the answer was taken to its end, and another request may follow."""
        whole = self._answered and self._keep and self._at == len(self._target)
        self._target = memoryview(b"")
        return whole

    @property
    def quiet(self) -> bool:
        """Whether the server neither hung up nor sent what nobody asked for."""
        with suppress(BlockingIOError):
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return False
        return True

    def close(self) -> None:
        self.sock.close()

    def ask(self, url: str, buffer: Buffer, start: int, size: int, tag: str = "") -> None:
        """Begin to read ``size`` bytes of an object, of this ``tag`` if it has one, from ``start`` on to where they
        belong in ``buffer``. It isn't touched where the object is longer."""
        self._until_s = self._clock.monotonic() + self._timeout_s
        self._target, self._start, self._room = buffer[start : start + size], start, len(buffer)
        self._at, self._came, self._answered = 0, 0, False
        host, _, where = url.partition("://")[2].partition("/")
        last = start + len(self._target) - 1
        lines = [f"GET /{where} HTTP/1.1", f"Host: {host}", f"Range: bytes={start}-{last}"]
        lines += [f"If-Match: {tag}"] if tag else []
        try:
            self.sock.sendall("\r\n".join([*lines, "", ""]).encode())
        except BlockingIOError:
            raise TimeoutError from None

    def head(self) -> int:
        """Wait until the answer begins. Returns the object's length: only so much will be filled."""
        while not self._answered:
            self.more()
        return self._length

    def rest(self) -> bytes:
        """Take all. Returns XXH3-128 of what came behind a frame's header page."""
        checksum, hashed = xxh3_128(), min(HEADER_BYTES, len(self._target))
        while True:
            if self._at > hashed:
                checksum.update(self._target[hashed : self._at])
                hashed = self._at
            if self._at == len(self._target):
                return checksum.digest()
            self.more(socket.MSG_WAITALL)

    def more(self, flags: int = 0) -> bool:
        """One call of the system. Returns whether all of the target is filled."""
        into = self._target[self._at : self._at + PIECE_BYTES]
        if not self._answered:
            flags, into = 0, memoryview(self._head)[self._came : self._came + FIRST_BYTES]
        try:
            got = self.sock.recv_into(into, 0, flags)
        except BlockingIOError:
            raise TimeoutError from None
        if not got:
            raise ConnectionResetError("hung up")
        if self._clock.monotonic() > self._until_s:
            raise TimeoutError
        if self._answered:
            self._at += got
        else:
            self._came += got
            self._begin()
        return self._answered and self._at == len(self._target)

    def _begin(self) -> None:
        """Once the head is whole: what it says, and what came behind it."""
        end = self._head.find(b"\r\n\r\n", 0, self._came)
        if end < 0:
            if self._came == HEAD_BYTES:
                raise AskClient(f"a head of more than {HEAD_BYTES} bytes", always=True)
            return
        first, *lines = bytes(self._head[:end]).split(b"\r\n")
        status = _STATUS.fullmatch(first)
        if status is None:
            raise AskClient("no HTTP")
        if (code := int(status[2])) != PARTIAL:
            raise AskClient(f"status {code}", status=code, always=200 <= code < 500 and code not in MAY_PASS)
        fields: dict[bytes, bytes] = {}
        for line in lines:
            name, _, value = line.partition(b":")
            fields[name.lower()] = fields.get(name.lower(), b"") + value.strip()  # what comes twice fits nowhere
        self._fit(fields)
        self._keep = status[1] == b"1" and b"close" not in fields.get(b"connection", b"").lower()
        tag = _STRONG_TAG.fullmatch(fields.get(b"etag", b""))
        self.tag = tag[0].decode() if tag else ""
        body = memoryview(self._head)[end + 4 : self._came]
        if len(body) > len(self._target):
            raise AskClient("more bytes came than the store had said")
        if self._length <= self._room:
            self._target[: len(body)] = body
            self._at = len(body)
        self._answered = True

    def _fit(self, fields: Mapping[bytes, bytes]) -> None:
        """Whether the answer is the range that was asked for, bytes as they are, or as much of it as there is."""
        given = _RANGE.fullmatch(fields.get(b"content-range", b""))
        length = _NUMBER.fullmatch(fields.get(b"content-length", b""))
        if given is None or length is None or b"transfer-encoding" in fields or b"content-encoding" in fields:
            raise AskClient("an answer without length or range", always=True)
        start, end, self._length = (int(number) for number in given.groups())
        due = min(len(self._target), self._length - start)
        if start != self._start or not due == end + 1 - start == int(length[0]) > 0:
            raise AskClient("another range than was asked for")
        self._target = self._target[:due]
