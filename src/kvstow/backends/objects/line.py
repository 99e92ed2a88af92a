"""A connection over which parts of objects come by HTTP, straight into the buffer that they are for.

Only what a GET of a range needs: status 206, the range that was asked for, a length. All else is ``AskClient``.
"""

from __future__ import annotations

import io
import re
import socket
import struct
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Final

from xxhash import xxh3_128

from kvstow.backends.base import Buffer
from kvstow.errors import StoreUnavailable
from kvstow.layout import HEADER_BYTES
from kvstow.runtime import Clock

PIECE_BYTES: Final = 1 << 20  # taken by one call of the system, and in the cache when it returns
PART_PIECE_BYTES: Final = 256 << 10  # while others of a value's parts wait for their turn
WAIT_ALL_BYTES: Final = 64 << 10  # what is no larger is the head: no more of it may come than has
PARTIAL: Final = 206
MAY_PASS: Final = (404, 408, 409, 412, 416, 425, 429)  # of what is below 500

assert io.DEFAULT_BUFFER_SIZE <= WAIT_ALL_BYTES

_RANGE: Final = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")
_STRONG_TAG: Final = re.compile(r'"[!#-~]{1,200}"')


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

    def __init__(
        self, host: str, port: int, clock: Clock, *, connect_s: float, timeout_s: float
    ) -> None:
        self._http = HTTPConnection(host, port, timeout=connect_s)
        self._http.connect()
        self._http.auto_open = 0
        self.sock = self._http.sock = _Timely(self._http.sock, clock, timeout_s)
        self.tag = ""
        self.used_s = 0.0
        self._clock = clock
        self._timeout_s = timeout_s
        self._answer: HTTPResponse | None = None
        self._start = self._room = self._length = self._at = 0
        self._target = memoryview(b"")

    def end(self) -> bool:
        """Let go of the buffer. Returns whether the answer was taken to its end, and another request may follow."""
        self._target = memoryview(b"")
        return self._answer is not None and self._answer.isclosed() and not self._answer.will_close

    @property
    def quiet(self) -> bool:
        """Whether the server neither hung up nor sent what nobody asked for."""
        with suppress(BlockingIOError):
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return False
        return True

    def close(self) -> None:
        self._http.close()

    def ask(self, url: str, buffer: Buffer, start: int, size: int, tag: str = "") -> None:
        """Begin to read ``size`` bytes of an object, of this ``tag`` if it has one, from ``start`` on to where they
        belong in ``buffer``. It isn't touched where the object is longer."""
        self.sock.until_s = self._clock.monotonic() + self._timeout_s
        self._target, self._start, self._room = buffer[start : start + size], start, len(buffer)
        self._at, self._answer = 0, None
        where = url.partition("://")[2].partition("/")[2]
        fields = {"Range": f"bytes={start}-{start + len(self._target) - 1}"}
        try:
            self._http.request(
                "GET", f"/{where}", headers=fields | ({"If-Match": tag} if tag else {})
            )
        except BlockingIOError:
            raise TimeoutError from None
        except (
            HTTPException
        ) as error:  # the server closes after each answer, so parts don't come this way
            raise AskClient(type(error).__name__, always=True) from None

    def head(self) -> int:
        """Wait until the answer begins. Returns the object's length: only so much will be filled."""
        if self._answer is None:
            try:
                answer = self._http.getresponse()
            except HTTPException as error:
                raise AskClient(type(error).__name__) from None
            if answer.status != PARTIAL:
                always = 200 <= answer.status < 500 and answer.status not in MAY_PASS
                raise AskClient(f"status {answer.status}", status=answer.status, always=always)
            self._fit(answer)
            tag = _STRONG_TAG.fullmatch(answer.headers.get("etag", ""))
            self.tag, self._answer = tag[0] if tag else "", answer
        return self._length

    def rest(self) -> bytes:
        """Take all. Returns XXH3-128 of what came behind a frame's header page."""
        checksum, hashed = xxh3_128(), min(HEADER_BYTES, len(self._target))
        while True:
            whole = self.more(PIECE_BYTES)
            checksum.update(self._target[hashed : self._at])
            hashed = max(hashed, self._at)
            if whole:
                return checksum.digest()

    def more(self, size: int = PART_PIECE_BYTES) -> bool:
        """Take ``size`` bytes, or up to twice as many that are the last: of what remains, most has not been read ahead,
        and will make the socket readable. Returns whether all of the target is filled."""
        self.head()
        assert self._answer is not None
        left = len(self._target) - self._at
        got = self._answer.readinto(self._target[self._at :][: left if left < 2 * size else size])
        if not got:
            raise ConnectionResetError("hung up")
        self._at += got
        return self._at == len(self._target)

    def _fit(self, answer: HTTPResponse) -> None:
        """Whether the answer is the range that was asked for, bytes as they are, or as much of it as there is."""
        given = [_RANGE.fullmatch(text) for text in answer.headers.get_all("content-range", ())]
        lengths = answer.headers.get_all("content-length", ())
        if len(given) != 1 or given[0] is None or len(lengths) != 1 or answer.length is None:
            raise AskClient("an answer without length or range", always=True)
        if "transfer-encoding" in answer.headers or "content-encoding" in answer.headers:
            raise AskClient("an answer that is coded", always=True)
        start, end, self._length = (int(number) for number in given[0].groups())
        due = min(len(self._target), self._length - start)
        if start != self._start or not due == end + 1 - start == answer.length > 0:
            raise AskClient("another range than was asked for")
        self._target = self._target[:due]


class _Timely(socket.socket):
    """Reads end in ``timeout_s``, and none begins after ``until_s``. Takes ``sock`` over.

    The system waits: with a timeout of its own, Python would ask twice for each bit that is there.
    """

    def __init__(self, sock: socket.socket, clock: Clock, timeout_s: float) -> None:
        super().__init__(fileno=sock.detach())
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.setsockopt(socket.SOL_SOCKET, option, limit)
        self.settimeout(None)
        self.until_s = 0.0
        self._clock = clock

    def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:  # type: ignore[override]
        if self._clock.monotonic() > self.until_s:
            raise TimeoutError
        try:
            return super().recv_into(
                buffer, nbytes, socket.MSG_WAITALL if len(buffer) > WAIT_ALL_BYTES else flags
            )
        except BlockingIOError:
            raise TimeoutError from None
