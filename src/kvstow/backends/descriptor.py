"""The descriptor of a backend: how its tier is named, configured, checked and opened.

Every backend folder has one, ``BACKEND`` in ``backend.py``; ``kvstow.backends.registry`` lists them. A plug-in may
give one too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from msgspec import Struct

from kvstow.backends.base import Store
from kvstow.backends.limits import TierLimits
from kvstow.backends.result import PlannedCheck
from kvstow.fields.codec import RAW
from kvstow.key import ChunkKey
from kvstow.layout import ChunkLayout
from kvstow.runtime import Clock

S = TypeVar("S", bound=Struct)


@dataclass(frozen=True, slots=True)
class HashRoot:
    """The start of this engine's chain of block hashes.

    Engines with equal ``group`` but another ``word`` never find each other's chunks.

    Attributes:
        group: Digest of everything else that KV depends on.
        word: The root itself, for people: ``seed 0``.
    """

    group: str
    word: str


@dataclass(frozen=True, slots=True)
class OpenContext:
    """Facts about the engine that a backend may need to open its store.

    Attributes:
        layout: Layout of the chunks that the tier will hold.
        clock: Clock of the process.
        engine_index: Index of this engine among the data parallel engines of its host.
        integrity_key: Key of the MAC in every frame. None: frames carry checksums only.
        describe: Fields that describe a namespace to people.
        namespace: The engine's namespace. None: unknown.
        root: The start of its block hashes. None: unknown.
        set_variables: Sets environment variables that are not set yet, for a client library.
    """

    layout: ChunkLayout
    clock: Clock
    engine_index: int = 0
    integrity_key: bytes | None = None
    describe: Callable[[bytes], Mapping[str, object]] = lambda _: {}
    namespace: bytes | None = None
    root: HashRoot | None = None
    set_variables: Callable[[Mapping[str, str]], object] = lambda _: None


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """An open store, and how its tier calls it.

    Attributes:
        store: The store.
        shown: The store's place in log messages, without passwords.
        limits: Limits of the tier.
        retries: Whether a failed call is repeated once in a while before it counts as failed.
        write_limit_bytes_s: Bytes written each second at most. None: no limit.
        checks_root: Whether opening has compared the root with that of the store's other engines.
        name_of: The name of a key's value in the store, for messages.
    """

    store: Store
    shown: str
    limits: TierLimits = field(default_factory=TierLimits)
    retries: bool = False
    write_limit_bytes_s: int | None = None
    checks_root: bool = False
    name_of: Callable[[ChunkKey], str] = lambda key: key.digest().hex()


@dataclass(frozen=True, slots=True)
class Backend(Generic[S]):
    """One kind of store.

    The section's fields ``codec`` and ``threads``, where it has them, are those of the tier.

    Attributes:
        name: Name of the tier, and of its settings section.
        section: Type of the settings section. Each field has a default.
        open: Opens the store. It may block for seconds. Raises ``SettingsError`` if it can't, or if the client
            library is missing; a server that can't be reached now is no error.
        switch: The field that asks for the tier by not being None. Plug-ins need none.
        check: Checks a section for ``kvstow config`` and before opening; the second argument is the size of a
            chunk's frame in bytes, 0 while it is unknown. Needs no client library. Raises ``SettingsError``.
        checks: Checks of ``kvstow doctor``, planned from the section, a clock and the value of PYTHONHASHSEED.
        pins_memory: Whether the tier locks the host pool's pages in memory.
    """

    name: str
    section: type[S]
    open: Callable[[S, OpenContext], OpenedStore]
    switch: str = ""
    check: Callable[[S, int], None] = lambda _section, _frame_bytes: None
    checks: Callable[[S, Clock, str | None], Iterable[PlannedCheck]] = lambda *_: ()
    pins_memory: Callable[[S], bool] = lambda _section: False

    @property
    def switch_key(self) -> str:
        """Key of the setting that asks for the tier."""
        return f"{self.name}.{self.switch}"

    @property
    def title(self) -> str:
        """Name of the tier in a sentence."""
        return self.name.capitalize()

    def wanted(self, section: S) -> bool:
        """Whether the section asks for the tier."""
        return bool(getattr(section, self.switch))


class ConfiguredBackend(NamedTuple):
    """A backend that settings ask for, with its section. ``name`` is the tier's."""

    name: str
    backend: Backend[Any]
    section: Struct
    default_threads: int = 4

    @property
    def codec(self) -> str:
        """Name of the tier's codec."""
        return str(getattr(self.section, "codec", RAW))

    @property
    def threads(self) -> int:
        """Calls of the tier that run at the same time."""
        return int(getattr(self.section, "threads", self.default_threads))
