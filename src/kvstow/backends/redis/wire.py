"""Bytes over a client's socket: ``sendmsg`` from the slot, ``recv_into`` the slot, no copy in between.

Only what is needed of the protocol (RESP 2): bulk strings, nil, integers, simple strings and errors, each of a length
and within a time that are bounded, whatever the server says. A reply is read to its end or the connection isn't used
again.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from typing import Final

from xxhash import xxh3_128

from kvstow.backends.base import Buffer
from kvstow.layout import HEADER_BYTES
from kvstow.runtime import Clock

HEAD_BYTES: Final = (
    512  # the most of a value that is copied, because it came with the head of its reply
)
SKIP_BYTES: Final = 64 << 10
LARGE_BYTES: Final = 128 << 10
PIECE_BYTES: Final = (
    1 << 20
)  # of a large value, taken by one call of the system, and in the cache when it returns
LONGEST_LINE: Final = 4096
LONGEST_VALUE: Final = 512 << 20  # no server keeps longer ones
LONGEST_NUMBER: Final = 20
LONGEST_REPLY: Final = 64 << 10  # of a small command

Reply = bytes | int | None


class Passing:
    """XXH3-128 of a frame's bytes behind its header page, as they come."""

    def __init__(self) -> None:
        self._skip = HEADER_BYTES
        self._checksum = xxh3_128()

    def update(self, piece: Buffer) -> None:
        if self._skip:
            skip = min(self._skip, len(piece))
            self._skip -= skip
            piece = piece[skip:]
        self._checksum.update(piece)

    def digest(self) -> bytes:
        return self._checksum.digest()


class Wire:
    """``parse_error`` makes an exception of an error reply's text. A command, its bytes included, may take
    ``timeout_s`` (looked at between two calls of the system, of which none takes longer than that).

    A socket without TLS waits in the system from now on, where a call does all of what it was asked for; with a
    timeout of Python's own each bit that is there costs two calls, and the interpreter's lock twice.
    """

    def __init__(
        self,
        sock: socket.socket,
        parse_error: Callable[[str], Exception],
        clock: Clock,
        timeout_s: float,
    ) -> None:
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        if not self._tls:
            limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, limit)
            sock.settimeout(None)
        self._parse_error = parse_error
        self._now = clock.monotonic
        self._timeout_s = timeout_s
        self._until_s = 0.0
        self._bytes = bytearray(HEAD_BYTES)
        self._buffer = memoryview(self._bytes)
        self._at = self._end = 0
        self.begin()

    def begin(self) -> None:
        """The next command's time begins."""
        self._until_s = self._now() + self._timeout_s

    @property
    def idle(self) -> bool:
        """Every byte that came was asked for."""
        return self._at == self._end

    # --- sending ----------------------------------------------------------------------------------------------------

    def send(self, buffers: Sequence[Buffer | bytes]) -> None:
        """All of ``buffers``. A server that refuses a command before it has all of it says why, and hangs up: then
        what it said is raised, not the broken pipe."""
        try:
            self._send(buffers)
        except ConnectionError:
            with contextlib.suppress(OSError):
                self.stored()
            raise

    def get(self, names: Sequence[bytes], before: bytes = b"") -> None:
        """Ask for these values; their replies are still to be taken, behind that of what goes ``before``."""
        self.begin()
        self._send(
            [
                before
                + b"".join(
                    b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name) for name in names
                )
            ]
        )

    def _send(self, buffers: Sequence[Buffer | bytes]) -> None:
        if self._tls:  # it has no sendmsg
            for buffer in buffers:
                self._sock.sendall(buffer)
                self._check_time()
            return
        size = sum(map(len, buffers))
        try:
            sent = self._sock.sendmsg(buffers)
            if sent == size:
                return
            left = [memoryview(buffer) for buffer in buffers if len(buffer)]
            while True:
                self._check_time()
                size -= sent
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if not size:
                    return
                left[0] = left[0][sent:]
                sent = self._sock.sendmsg(left)
        except BlockingIOError as error:
            raise self._late() from error

    # --- receiving -------------------------------------------------------------------------------------------------

    def bulk(self) -> int | None:
        """Head of a bulk string: how many bytes follow, to be taken with ``take`` and ``skip``, then ``end``.

        None: there is no such value. Raises an error reply's exception, which is a whole reply too.
        """
        line = self._line()
        if line[:1] != b"$":
            raise _out_of_step()
        return _length(line, LONGEST_VALUE)

    def stored(self) -> bool:
        """Reply of SET: False where NX forbade it."""
        line = self._line()
        if line == b"+OK":
            return True
        if line != b"$-1":
            raise _out_of_step()
        return False

    def reply(self) -> Reply:
        """Of a small command. Raises an error reply's exception."""
        line = self._line()
        if line[:1] == b"+":
            return line[1:]
        if line[:1] == b":":
            return _number(line)
        if line[:1] != b"$":
            raise _out_of_step()
        length = _length(line, LONGEST_REPLY)
        if length is None:
            return None
        value = bytearray(length)
        self.take(memoryview(value))
        self.end()
        return bytes(value)

    def take(self, view: Buffer, passing: Passing | None = None) -> None:
        """The next ``len(view)`` bytes; they are also seen by ``passing``."""
        size = len(view)
        at = min(size, self._end - self._at)
        if at:
            view[:at] = self._buffer[self._at : self._at + at]
            self._at += at
            if passing is not None:
                passing.update(view[:at])
        while at < size:
            try:
                if self._tls:
                    got = self._sock.recv_into(view[at:])
                elif size - at >= LARGE_BYTES:  # the last bytes come with what is behind them
                    got = self._sock.recv_into(
                        view[at : min(at + PIECE_BYTES, size - HEAD_BYTES)], 0, socket.MSG_WAITALL
                    )
                else:
                    got = self._receive(view[at:])
            except BlockingIOError as error:
                raise self._late() from error
            if not got:
                raise ConnectionResetError("the server hung up")
            if passing is not None:
                passing.update(view[at : at + got])
            at += got
            self._check_time()

    def _receive(self, view: Buffer) -> int:
        """Into ``view``; what came beyond it, the end of this reply and the head of the next, into the empty buffer:
        two calls of the system a value instead of three."""
        got = self._sock.recvmsg_into([view, self._buffer])[0]
        self._at, self._end = 0, max(0, got - len(view))
        return min(got, len(view))

    def skip(self, size: int) -> None:
        scratch = memoryview(bytearray(min(size, SKIP_BYTES)))
        while size:
            piece = scratch[: min(size, SKIP_BYTES)]
            self.take(piece)
            size -= len(piece)

    def end(self) -> None:
        """The end of a bulk string."""
        if self._line():
            raise _out_of_step()

    def _line(self) -> bytes:
        stop = self._bytes.find(b"\r\n", self._at, self._end)
        if stop >= 0:
            line = bytes(self._buffer[self._at : stop])
            self._at = stop + 2
        else:
            line = self._line_to_come()
        if line[:1] == b"-":
            try:
                raise self._parse_error(line[1:].decode(errors="replace"))
            except ValueError:  # of one that names another node, and doesn't
                raise _out_of_step() from None
        return line

    def _line_to_come(self) -> bytes:
        line = b""
        while True:
            line += self._buffer[self._at : self._end]
            stop = line.find(b"\r\n")
            if stop >= 0:
                self._at = self._end - (len(line) - stop - 2)
                return line[:stop]
            if len(line) > LONGEST_LINE:
                raise _out_of_step()
            try:
                self._at, self._end = 0, self._sock.recv_into(self._buffer)
            except BlockingIOError as error:
                raise self._late() from error
            if not self._end:
                raise ConnectionResetError("the server hung up")
            self._check_time()

    def _check_time(self) -> None:
        if self._now() > self._until_s:
            raise self._late()

    def _late(self) -> TimeoutError:
        return TimeoutError(f"not done in {self._timeout_s:g} s")


def _out_of_step() -> ConnectionResetError:
    return ConnectionResetError("what the server said is no answer to what it was asked")


def _length(line: bytes, most: int) -> int | None:
    """Of a bulk string, by its first line."""
    length = _number(line)
    if not -1 <= length <= most:
        raise _out_of_step()
    return None if length < 0 else length


def _number(line: bytes) -> int:
    digits = line[1:]
    if not digits.removeprefix(b"-").isdigit() or len(digits) > LONGEST_NUMBER:
        raise _out_of_step()
    return int(digits)
