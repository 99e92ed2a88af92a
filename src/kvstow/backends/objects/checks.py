"""Checks of ``kvstow doctor`` for the object store tier."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from kvstow.backends.objects.open import check
from kvstow.backends.objects.settings import ObjectsSettings
from kvstow.backends.result import MAX_FOUND, PlannedCheck, Result, failed, ok, warning
from kvstow.errors import StoreError
from kvstow.runtime import Clock

LIMIT_S: Final = 20.0


def checks(
    section: ObjectsSettings, clock: Clock, _hash_seed: str | None
) -> Iterator[PlannedCheck]:
    yield PlannedCheck("objects", LIMIT_S, partial(check_objects, section, clock))


def check_objects(section: ObjectsSettings, clock: Clock) -> Iterator[Result]:
    """Reads a little from the bucket, with the credentials that the tier would find."""
    check(section)
    url = section.url
    try:
        from kvstow.backends.objects.store import ObjectsStore
    except ModuleNotFoundError:
        yield failed(
            "objects",
            "objects.url is set, and obstore isn't installed",
            "pip install 'kvstow[objects]'",
        )
        return
    told: list[str] = []
    began = clock.monotonic()
    try:
        store = ObjectsStore(section, clock, warn=told.append)
        store.ping()
        store.close()
    except (StoreError, OSError) as error:
        yield failed(
            "objects",
            f"{url}: {error}"[:MAX_FOUND],
            "see the bucket's name, the credentials, the endpoint",
        )
        return
    yield ok(
        "objects",
        f"{url}, answers in {(clock.monotonic() - began) * 1e3:.0f} ms, connecting included",
    )
    for what in told:
        yield warning("objects", what, "see docs/how-to/object-store.md")
