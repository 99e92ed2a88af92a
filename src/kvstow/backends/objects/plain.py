"""Values of an S3 store over plain HTTP, straight into the slot.

obstore can't read into a buffer of its caller: what it has gathered is copied, and hashed when it has left the cache,
which is a third of the time of a fast network. So obstore signs a URL, and the bytes come over sockets of our own. Not
over TLS: Python takes 16 KiB of it a call, and obstore is quicker. Whatever doesn't come as it was asked for is left to
obstore, which asks again and knows what it means: a miss, a refusal, a fault.

A signed URL is a credential: it is never in a message.
"""

from __future__ import annotations

import selectors
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import obstore
from obstore.exceptions import BaseError

from kvstow.backends.base import MISSING, REJECTED, Buffer, Done, Outcome
from kvstow.backends.objects.line import AskClient, Line
from kvstow.backends.objects.options import ObjectsOptions
from kvstow.errors import StoreRefused, StoreUnavailable
from kvstow.runtime import Clock

IDLE_S: Final = 15.0  # a connection that nobody used for longer may be gone without a word
MAX_IDLE: Final = 64  # connections
SIGNED_FOR: Final = timedelta(minutes=5)  # a signature in a header is good for 15
CHANGED: Final = 412
ELSEWHERE: Final = (
    3  # hundred: whoever speaks for the store, over plain HTTP, doesn't choose whom else is asked
)


def goes_plain(options: ObjectsOptions) -> bool:
    """Whether values may come this way: from S3 (for signing, Google may have to be asked, and Azure's signatures begin
    now, which is later on a server whose clock is behind), signed, without TLS, and not through a proxy, which obstore
    would use."""
    parts = urlsplit(options.endpoint or "")
    if (
        options.bucket.kind != "s3"
        or options.anonymous
        or parts.scheme != "http"
        or parts.hostname is None
    ):
        return False
    return not {"http", "all"} & set(getproxies()) or bool(proxy_bypass(parts.hostname))


class Plain:
    """``client`` signs. Thread-safe."""

    def __init__(self, client: Any, options: ObjectsOptions, clock: Clock) -> None:
        parts = urlsplit(options.endpoint or "")
        self._address = (parts.hostname or "", parts.port or 80)
        self._client = client
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[Line] = []
        self._closed = False

    def read(self, path: str, buffer: Buffer, until_s: float) -> Outcome:
        """As a store's, one value; nothing more is asked for after ``until_s``. Raises ``AskClient``;
        ``StoreUnavailable`` where the time is over; ``StoreRefused`` for a redirection."""
        part = self._options.part_bytes
        try:
            url = obstore.sign(self._client, "GET", path, SIGNED_FOR)
        except (BaseError, OSError) as error:
            raise AskClient(type(error).__name__, always=True) from None
        try:
            with self._line() as line:
                line.ask(url, buffer, 0, part)
                length = line.head()
                if length > len(buffer):
                    return REJECTED
                if length > part:
                    self._parts(url, line, buffer[:length], until_s)
                    return Done(length)
                return Done(length, line.rest())
        except AskClient as error:
            if error.status == CHANGED:
                return MISSING
            if error.status // 100 == ELSEWHERE:
                raise StoreRefused(
                    f"{error}: it is elsewhere; set objects.endpoint to where it is"
                ) from None
            raise
        except TimeoutError:
            raise StoreUnavailable("no answer in time") from None
        except OSError as error:
            raise AskClient(type(error).__name__) from None

    def close(self) -> None:
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        for line in idle:
            line.close()

    def _parts(self, url: str, first: Line, buffer: Buffer, until_s: float) -> None:
        """Fill ``buffer``, whose first part is on its way: as many lines as may be, each for a part at a time."""
        size, tag = self._options.part_bytes, first.tag
        starts = range(size, len(buffer), size)
        left = iter(starts)

        def ask(line: Line) -> bool:
            at = next(left, None)
            if at is not None:
                line.ask(url, buffer, at, size, tag)
            return at is not None

        with selectors.DefaultSelector() as ready, ExitStack() as lines:
            ready.register(first.sock, selectors.EVENT_READ, first)
            for _ in range(min(len(starts), self._options.parallel - 1)):
                self._check(until_s)
                line = lines.enter_context(self._line())
                ask(line)
                ready.register(line.sock, selectors.EVENT_READ, line)
            while ready.get_map():
                self._check(until_s)
                for key, _ in ready.select(until_s - self._clock.monotonic()):
                    if key.data.more() and not ask(key.data):
                        ready.unregister(key.fileobj)

    def _check(self, until_s: float) -> None:
        if self._clock.monotonic() >= until_s:
            raise TimeoutError

    # --- connections ------------------------------------------------------------------------------------------------

    @contextmanager
    def _line(self) -> Iterator[Line]:
        line = self._kept() or self._connect()
        try:
            yield line
        finally:
            line.used_s = self._clock.monotonic()
            reusable = line.end()
            with self._lock:
                keep = reusable and len(self._idle) < MAX_IDLE and not self._closed
                if keep:
                    self._idle.append(line)
            if not keep:
                line.close()

    def _kept(self) -> Line | None:
        """The one that was used last, if it still can be."""
        while True:
            with self._lock:
                line = self._idle.pop() if self._idle else None
            if line is None:
                return None
            try:
                if self._clock.monotonic() - line.used_s < IDLE_S and line.quiet:
                    return line
            except OSError:
                pass
            line.close()

    def _connect(self) -> Line:
        limits = self._options
        try:
            return Line(
                *self._address,
                self._clock,
                connect_s=limits.connect_timeout_s,
                timeout_s=limits.timeout_s,
            )
        except (OSError, UnicodeError) as error:  # the latter: a host's name that can't be one
            raise AskClient(f"cannot connect: {type(error).__name__}") from None
