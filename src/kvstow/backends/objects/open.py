"""Opening of the object store tier's store."""

from __future__ import annotations

import logging
import os
from typing import Final
from urllib.parse import urlsplit

from kvstow.backends.descriptor import OpenContext, OpenedStore
from kvstow.backends.limits import TierLimits
from kvstow.backends.objects.bucket import LOOPBACK, MAX_PART_BYTES, MIN_PART_BYTES
from kvstow.backends.objects.settings import ObjectsSettings
from kvstow.errors import SettingsError, StoreRefused
from kvstow.fields.values import format_size

logger = logging.getLogger("kvstow")

HUNG_MARGIN: Final = 2.5  # times a request's limit; a call ends by itself after twice that


def check(section: ObjectsSettings, _frame_bytes: int = 0) -> None:
    """Refuses settings that can't be used. Raises ``SettingsError``."""
    try:
        bucket = section.bucket
    except ValueError as error:
        raise SettingsError(f"objects.url: {error}") from error
    if section.endpoint is not None:
        _check_endpoint(section.endpoint, allow_http=section.allow_http)
    if section.ca_file is not None and not os.access(section.ca_file, os.R_OK):
        raise SettingsError(f"objects.ca_file {section.ca_file} can't be read")
    if not MIN_PART_BYTES <= section.part_size <= MAX_PART_BYTES:
        raise SettingsError(
            f"objects.part_size {format_size(section.part_size)}: set it to 1MiB at least, 1GiB at most"
        )
    for name, kind in (("profile", "s3"), ("account", "azure")):
        if getattr(section, name) is not None and bucket.kind != kind:
            raise SettingsError(
                f"objects.{name} is set, and objects.url isn't {'s3://' if kind == 's3' else 'az://'}"
            )


def open_store(section: ObjectsSettings, context: OpenContext) -> OpenedStore:
    """Makes the store, which connects when it is first called.

    Raises ``SettingsError`` when the settings can't be used, or obstore isn't installed.
    """
    check(section)
    try:
        from kvstow.backends.objects.store import ObjectsStore
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "obstore":
            raise
        raise SettingsError(
            "objects.url is set, and obstore isn't installed: pip install 'kvstow[objects]'"
        ) from error
    url = section.url

    def warn(text: str) -> None:
        logger.warning("Object store %s: %s", url, text)

    try:
        store = ObjectsStore(section, context.clock, warn=warn)
    except (StoreRefused, OSError) as error:
        raise SettingsError(f"objects.url {url} can't be used: {error}") from error
    limits = TierLimits(
        read_batch_bytes=1,  # one chunk a call: the tier's threads read in parallel
        hung_after_s=max(TierLimits().hung_after_s, HUNG_MARGIN * section.timeout_s),
    )
    return OpenedStore(store, f"Object store {url}", limits=limits, name_of=section.bucket.path_of)


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
