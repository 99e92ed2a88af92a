"""The lower tiers that settings ask for, the nearest first."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstow.backends.base import Store
from kvstow.backends.descriptor import ConfiguredBackend, HashRoot, OpenContext, OpenedStore
from kvstow.backends.registry import BACKENDS
from kvstow.build.codec import coders
from kvstow.build.plugins import plugin_names, resolve_plugins
from kvstow.errors import StoreRefused, StoreUnavailable, UnsupportedError
from kvstow.metrics import Metrics
from kvstow.runtime import ThreadExecutor
from kvstow.settings import Settings
from kvstow.tiers import Tier
from kvstow.tiers.hash_root import RootCheck, entry_key
from kvstow.tiers.limit import WriteLimit
from kvstow.tiers.retry import Retry

if TYPE_CHECKING:
    from kvstow.codec.frames import FrameCoder
    from kvstow.codec.shape import KVShape


logger = logging.getLogger("kvstow")

FIRST_CALL_S: Final = 3.0
NO_ROOT: Final = HashRoot("", "")


def asked_for(settings: Settings) -> Mapping[str, str]:
    """Maps each tier that keeps KV after this process to the setting that asks for it."""
    asked: dict[str, str] = {}
    if settings.direct.engine in ("auto", "file") and settings.direct.path:
        asked["direct"] = "direct.path"
    for backend in BACKENDS:
        if backend.wanted(settings.backends[backend.name]):
            asked[backend.name] = backend.switch_key
    return asked | dict.fromkeys(plugin_names(settings), "plugins.stores")


def check_tiers(settings: Settings, frame_bytes: int) -> None:
    """Checks the section of each backend that is asked for.

    ``frame_bytes`` is the size of a chunk's frame, 0 while it is unknown. Raises ``SettingsError``.
    """
    for tier in configured_backends(settings):
        tier.backend.check(tier.section, frame_bytes)


def configured_backends(settings: Settings) -> list[ConfiguredBackend]:
    """Returns the backends of kvstow's own that are asked for."""
    return [
        ConfiguredBackend(backend.name, backend, settings.backends[backend.name])
        for backend in BACKENDS
        if backend.wanted(settings.backends[backend.name])
    ]


def lower_tiers(
    settings: Settings,
    shapes: Sequence[Sequence[KVShape]],
    context: OpenContext,
    *,
    metrics: Metrics,
    not_persistent: str | None,
) -> list[Tier]:
    """Opens the tiers that settings ask for.

    ``shapes[g][s]`` describes the KV of shard ``s`` of group ``g``. ``not_persistent`` says why this KV must not
    outlive the process; None: it may.

    Raises ``UnsupportedError`` where a tier would keep KV that must not be kept, where a codec does not suit the KV,
    and where engines that share a store have another hash root; ``SettingsError`` where settings can't be used.
    """
    for name, setting in asked_for(settings).items():
        if not_persistent is not None:
            raise UnsupportedError(
                f"{setting} is set, but this KV can't be kept in tier {name}: {not_persistent}"
            )
    configured = [*configured_backends(settings), *resolve_plugins(settings)]
    codecs = {each.name: each.codec for each in configured}
    coder_of = coders(codecs, context.layout, shapes)
    return [open_tier(each, context, metrics, coder_of[each.name]) for each in configured]


def open_tier(
    configured: ConfiguredBackend,
    context: OpenContext,
    metrics: Metrics,
    coder: FrameCoder | None = None,
) -> Tier:
    """Checks the section of one tier, and opens it. Raises what ``lower_tiers`` raises."""
    name, backend, section, _ = configured
    backend.check(section, context.layout.max_frame_bytes)
    opened = backend.open(section, context)
    executor = ThreadExecutor(name, threads=configured.threads)
    store = opened.store
    if opened.retries:
        store = Retry(store, context.clock, random.Random(os.urandom(16)))
    if not opened.checks_root:
        store = _make_first_call(name, opened, store, context, executor)
    if opened.write_limit_bytes_s is not None:
        store = WriteLimit(store, context.clock, bytes_s=opened.write_limit_bytes_s)
    return Tier(
        name,
        store,
        executor,
        layout=context.layout,
        clock=context.clock,
        metrics=metrics,
        limits=opened.limits,
        coder=coder,
        integrity_key=context.integrity_key,
    )


def _make_first_call(
    name: str, opened: OpenedStore, store: Store, context: OpenContext, executor: ThreadExecutor
) -> Store:
    """Calls the store once, and compares the hash root with that of the engines that share it.

    Returns the store, which goes on comparing. Waits at most ``FIRST_CALL_S``: a later answer is logged only. Raises
    ``UnsupportedError`` if the roots differ.
    """
    root = context.root
    differences: list[str] = []
    ended: list[bool] = []
    checked: Store = store
    first_call: Callable[[], object] = partial(store.contains, [entry_key(NO_ROOT)])
    if root is not None:
        own = root.word
        entry = opened.name_of(entry_key(root))

        def on_difference(other: str) -> None:
            text = _other_root(name, other, own, entry)
            differences.append(text)
            logger.error("%s: %s", opened.shown, text)

        checked = root_check = RootCheck(store, root, context.clock, on_difference)
        first_call = root_check.check

    def call() -> None:
        try:
            first_call()
        except (StoreUnavailable, StoreRefused) as error:
            logger.warning(
                "%s can't be used now, kvstow goes on without it: %s", opened.shown, error
            )
        ended.append(True)

    executor.submit(call, lambda _value, _error: None, urgent=True)
    executor.wait(FIRST_CALL_S)
    executor.poll()
    if differences:
        executor.close(FIRST_CALL_S)
        store.close()
        raise UnsupportedError(f"tier {name}: {differences[0]}")
    if not ended:
        logger.warning(
            "%s can't be used now, kvstow goes on without it: no answer within %g s",
            opened.shown,
            FIRST_CALL_S,
        )
    return checked


def _other_root(tier: str, other: str, own: str, entry: str) -> str:
    return (
        f"the block hashes of the engines that share it begin with another root ({other}; here {own}): nothing would "
        "be shared. Give PYTHONHASHSEED the same value on all of them, or on none. If none of those runs any more, set "
        f"another prefix for {tier}, or remove the entry {entry}"
    )
