"""The composition root: settings in, engine out. The only package that knows every concrete part."""

from kvstow.build.cache import (
    adapter_executor,
    build_cache,
    check,
    chunk_layout,
    copy_executor,
    touch_executor,
)
from kvstow.build.codec import check_codecs
from kvstow.build.direct import (
    build_direct,
    check_direct,
    direct_executor,
    file_media,
    load_rds,
    rds_media,
)
from kvstow.build.integrity import integrity_key
from kvstow.build.plugins import resolve_plugins
from kvstow.build.tiers import asked_for, check_tiers, configured_backends, lower_tiers, open_tier

__all__ = [
    "adapter_executor",
    "asked_for",
    "build_cache",
    "build_direct",
    "check",
    "check_codecs",
    "check_direct",
    "check_tiers",
    "chunk_layout",
    "configured_backends",
    "copy_executor",
    "direct_executor",
    "file_media",
    "integrity_key",
    "load_rds",
    "lower_tiers",
    "open_tier",
    "rds_media",
    "resolve_plugins",
    "touch_executor",
]
