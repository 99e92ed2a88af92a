"""Engines whose block hashes begin elsewhere never find each other's chunks. They are told so, by one entry.

It is named after all else that KV depends on, says where the hashes of the engine that was first begin, and lives as
long as somebody uses it, and an hour more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from redis.exceptions import MovedError, ResponseError

from kvstow.backends.redis.session import Session
from kvstow.runtime import Clock

LIFETIME_MS: Final = 3_600_000
RENEWED_EVERY_S: Final = 30.0  # until then a server that lost it tells nobody


class Root:
    """``about``: all but the root, as a digest; ``word``: the root. ``differs`` hears, once, of another's word."""

    def __init__(
        self,
        prefix: bytes,
        about: str,
        word: str,
        clock: Clock,
        differs: Callable[[bytes, str], None],
    ) -> None:
        self.name = b"%sroot:%s" % (prefix, about.encode())
        self._word = word.encode()
        self._clock = clock
        self._differs = differs
        self._lock = threading.Lock()
        self._due_s = clock.monotonic()
        self._told = False

    def renew(self, session: Session) -> None:
        """Write the entry or let it live on; now and then, on whatever thread asks the server something."""
        with self._lock:
            now = self._clock.monotonic()
            if now < self._due_s:
                return
            self._due_s = now + RENEWED_EVERY_S
        found = self._ask(session, "GET", self.name)
        if found is None:
            self._ask(session, "SET", self.name, self._word, "NX", "PX", LIFETIME_MS)
            found = self._ask(session, "GET", self.name)
        else:
            self._ask(session, "PEXPIRE", self.name, LIFETIME_MS)
        if isinstance(found, bytes) and found != self._word and not self._told:
            self._told = True
            self._differs(self.name, found[:200].decode(errors="replace"))

    def _ask(self, session: Session, *command: Any) -> Any:
        """None also where the server is full, or the user may only read: then others say where theirs begin."""
        try:
            return session.run(*command)
        except MovedError:
            raise
        except ResponseError:
            return None
