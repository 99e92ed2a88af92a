"""Large values over a client's socket: ``sendmsg`` from the slot, ``recv_into`` the slot, no copy in between.

Only what GET and SET need of the protocol (RESP 2): bulk strings, nil, simple strings and errors. A reply is read to
its end or the connection isn't used again.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from xxhash import xxh3_128

from kvstow.layout import HEADER_BYTES
from kvstow.runtime import Clock
from kvstow.store.base import Buffer

HEAD_BYTES: Final = 512  # the most of a value that is copied, because it came with the head of its reply
SKIP_BYTES: Final = 64 << 10
LARGE_BYTES: Final = 128 << 10
PIECE_BYTES: Final = 1 << 20  # of a large value, taken by one call of the system, and in the cache when it returns
LONGEST_LINE: Final = 4096


class Passing:
    """XXH3-128 of a frame's bytes behind its header page, as they come."""

    def __init__(self) -> None:
        self._skip = HEADER_BYTES
        self._checksum = xxh3_128()

    def update(self, piece: Buffer) -> None:
        skip = min(self._skip, len(piece))
        self._skip -= skip
        self._checksum.update(piece[skip:])

    def digest(self) -> bytes:
        return self._checksum.digest()


class Wire:
    """``parse_error`` makes an exception of an error reply's text. A command, its bytes included, may take
    ``timeout_s`` (looked at between two calls of the system, of which none takes longer than the socket's own
    timeout)."""

    def __init__(
        self, sock: socket.socket, parse_error: Callable[[str], Exception], clock: Clock, timeout_s: float
    ) -> None:
        self._sock = sock
        self._large = not isinstance(sock, ssl.SSLSocket) and sock.family != socket.AF_UNIX
        if self._large:
            limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, limit)
        self._parse_error = parse_error
        self._clock = clock
        self._timeout_s = timeout_s
        self._until_s = 0.0
        self._buffer = memoryview(bytearray(HEAD_BYTES))
        self._at = self._end = 0
        self.begin()

    def begin(self) -> None:
        """The next command's time begins."""
        self._until_s = self._clock.monotonic() + self._timeout_s

    @property
    def idle(self) -> bool:
        """Every byte that came was asked for."""
        return self._at == self._end

    @contextlib.contextmanager
    def _waiting_in_the_system(self) -> Iterator[None]:
        """A call waits, at most ``timeout_s``, until it has done all of what it was asked for; Python else asks twice
        for each bit that is there."""
        timeout = self._sock.gettimeout()
        self._sock.settimeout(None)
        try:
            yield
        except BlockingIOError as error:
            raise TimeoutError(f"nothing for {self._timeout_s:g} s") from error
        finally:
            self._sock.settimeout(timeout)

    # --- sending ----------------------------------------------------------------------------------------------------

    def send(self, buffers: Sequence[Buffer | bytes]) -> None:
        """All of ``buffers``. A server that refuses a command before it has all of it says why, and hangs up: then
        what it said is raised, not the broken pipe."""
        try:
            self._send([memoryview(buffer) for buffer in buffers if len(buffer)])
        except ConnectionError:
            with contextlib.suppress(OSError):
                self.stored()
            raise

    def get(self, names: Sequence[bytes]) -> None:
        """Ask for these values; their replies are still to be taken."""
        self.begin()
        self._send([memoryview(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name) for name in names))])

    def _send(self, left: list[memoryview]) -> None:
        if isinstance(self._sock, ssl.SSLSocket):  # it has no sendmsg
            for view in left:
                self._sock.sendall(view)
                self._check_time()
            return
        large = self._large and sum(map(len, left)) >= LARGE_BYTES
        with self._waiting_in_the_system() if large else contextlib.nullcontext():
            while left:
                sent = self._sock.sendmsg(left)
                self._check_time()
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if sent:
                    left[0] = left[0][sent:]

    # --- receiving -------------------------------------------------------------------------------------------------

    def bulk(self) -> int | None:
        """Head of a bulk string: how many bytes follow, to be taken with ``take`` and ``skip``, then ``end``.

        None: there is no such value. Raises an error reply's exception, which is a whole reply too.
        """
        line = self._line()
        if line[:1] != b"$":
            raise self._parse_error(f"ERR unexpected reply of type {line[:1]!r}")
        return None if line == b"$-1" else int(line[1:])

    def stored(self) -> bool:
        """Reply of SET: False where NX forbade it."""
        line = self._line()
        if line == b"$-1":
            return False
        if line != b"+OK":
            raise self._parse_error(f"ERR unexpected reply of type {line[:1]!r}")
        return True

    def take(self, view: Buffer, passing: Passing | None = None) -> None:
        """The next ``len(view)`` bytes; they are also seen by ``passing``."""
        size = len(view)
        at = min(size, self._end - self._at)
        view[:at] = self._buffer[self._at : self._at + at]
        self._at += at
        if passing is not None:
            passing.update(view[:at])
        if self._large and size - at >= LARGE_BYTES:
            with self._waiting_in_the_system():
                while size - at >= LARGE_BYTES:
                    end = min(at + PIECE_BYTES, size - HEAD_BYTES)  # the last ones come with what is behind them
                    at += self._came(self._sock.recv_into(view[at:end], 0, socket.MSG_WAITALL), view[at:], passing)
        while at < size:
            at += self._came(self._receive(view[at:]), view[at:], passing)

    def _came(self, got: int, view: Buffer, passing: Passing | None) -> int:
        if not got:
            raise ConnectionResetError("the server hung up")
        if passing is not None:
            passing.update(view[:got])
        self._check_time()
        return got

    def _receive(self, view: Buffer) -> int:
        """Into ``view``; what came beyond it, the end of this reply and the head of the next, into the empty buffer:
        two calls of the system a value instead of three."""
        if isinstance(self._sock, ssl.SSLSocket):
            return self._sock.recv_into(view)
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
            raise ConnectionResetError("the reply is out of step")

    def _line(self) -> bytes:
        line = b""
        while True:
            got = bytes(self._buffer[self._at : self._end])
            stop = (line + got).find(b"\r\n")
            if stop >= 0:
                self._at += stop + 2 - len(line)
                line = (line + got)[:stop]
                break
            line += got
            if len(line) > LONGEST_LINE:
                raise ConnectionResetError("the server doesn't speak RESP")
            self._at, self._end = 0, self._sock.recv_into(self._buffer)
            if not self._end:
                raise ConnectionResetError("the server hung up")
            self._check_time()
        if line[:1] == b"-":
            raise self._parse_error(line[1:].decode(errors="replace"))
        return line

    def _check_time(self) -> None:
        if self._clock.monotonic() > self._until_s:
            raise TimeoutError(f"not done in {self._timeout_s:g} s")
