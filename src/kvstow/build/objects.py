"""The object store tier, from settings."""

from __future__ import annotations

import logging
import os
from typing import Final
from urllib.parse import urlsplit

from kvstow.backends.objects import MAX_PART_BYTES, MIN_PART_BYTES, ObjectsOptions, parse_url
from kvstow.backends.objects.options import LOOPBACK
from kvstow.build.greet import greet
from kvstow.errors import SettingsError, StoreRefused
from kvstow.layout import ChunkLayout
from kvstow.metrics import Metrics
from kvstow.runtime import Clock, ThreadExecutor
from kvstow.settings import Settings, format_size
from kvstow.tiers import Tier, TierLimits

logger = logging.getLogger("kvstow")

HUNG_MARGIN: Final = 2.5  # times a request's limit: a call ends by itself after twice that


def build_objects(
    settings: Settings,
    layout: ChunkLayout,
    *,
    clock: Clock,
    metrics: Metrics,
    root: tuple[str, str] | None = None,
) -> Tier | None:
    """The object store tier; None: not set. A store that can't be used now is logged, and asked again later.

    ``root``: as for ``greet``. Raises ``SettingsError`` when the settings can't be used, or obstore isn't installed,
    ``UnsupportedError`` where the engines that share the bucket begin elsewhere.
    """
    if settings.objects.url is None:
        return None
    options = objects_options(settings)
    try:
        from kvstow.backends.objects.store import ObjectsStore
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "obstore":
            raise
        raise SettingsError(
            "objects.url is set, and obstore isn't installed: pip install 'kvstow[objects]'"
        ) from error
    url = settings.objects.url
    try:
        store = ObjectsStore(
            options, clock, warn=lambda what: logger.warning("Object store %s: %s", url, what)
        )
    except (StoreRefused, OSError) as error:
        raise SettingsError(f"objects.url {url} can't be used: {error}") from error
    executor = ThreadExecutor("objects", threads=settings.objects.threads)
    greet("objects", f"Object store {url}", store, executor, root, options.bucket.path_of)
    limits = TierLimits(
        read_batch_bytes=1,  # a chunk a call: the threads are what is parallel
        hung_after_s=max(TierLimits().hung_after_s, HUNG_MARGIN * options.timeout_s),
    )
    return Tier(
        "objects", store, executor, layout=layout, clock=clock, metrics=metrics, limits=limits
    )


def objects_options(settings: Settings) -> ObjectsOptions:
    """What an object store is given. Raises ``SettingsError``."""
    own = settings.objects
    try:
        bucket = parse_url(own.url or "")
    except ValueError as error:
        raise SettingsError(f"objects.url: {error}") from error
    if own.endpoint is not None:
        _check_endpoint(own.endpoint, allow_http=own.allow_http)
    if own.ca_file is not None and not os.access(own.ca_file, os.R_OK):
        raise SettingsError(f"objects.ca_file {own.ca_file} can't be read")
    if not MIN_PART_BYTES <= own.part_size <= MAX_PART_BYTES:
        raise SettingsError(
            f"objects.part_size {format_size(own.part_size)}: set it to 1MiB at least, 1GiB at most"
        )
    for name, kind in (("profile", "s3"), ("account", "azure")):
        if getattr(own, name) is not None and bucket.kind != kind:
            raise SettingsError(
                f"objects.{name} is set, and objects.url isn't {'s3://' if kind == 's3' else 'az://'}"
            )
    return ObjectsOptions(
        bucket,
        endpoint=own.endpoint,
        region=own.region,
        virtual_host=own.addressing == "virtual",
        profile=own.profile,
        account=own.account,
        anonymous=own.anonymous,
        allow_http=own.allow_http,
        ca_file=own.ca_file,
        part_bytes=own.part_size,
        parallel=own.parallel,
        timeout_s=own.timeout_ms / 1e3,
        connect_timeout_s=own.connect_timeout_ms / 1e3,
        retries=own.retries,
    )


def _check_endpoint(endpoint: str, *, allow_http: bool) -> None:
    try:
        parts = urlsplit(endpoint)
        host = parts.hostname if parts.port != 0 else None  # raises ValueError for what is no port
    except ValueError:
        parts, host = urlsplit(""), None
    if not host or parts.scheme not in ("http", "https"):
        raise SettingsError("objects.endpoint: expected https://host or https://host:port")
    if "@" in parts.netloc or parts.query:
        raise SettingsError(
            "objects.endpoint has no user, password or ?: credentials come from the environment"
        )
    if parts.scheme == "http" and not allow_http and host not in LOOPBACK:
        raise SettingsError(
            f"objects.endpoint http://{host} would send KV and signatures unencrypted: set it to https://, or "
            "objects.allow_http to true"
        )
