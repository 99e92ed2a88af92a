"""The composition root: settings in, engine out. The only package that knows every concrete part."""

from kvstow.build.cache import build_cache, check, chunk_layout
from kvstow.build.codec import check_codecs
from kvstow.build.direct import build_direct, check_direct, file_media
from kvstow.build.integrity import integrity_key
from kvstow.build.plugins import resolve_plugins
from kvstow.build.tiers import asked_for, check_tiers, configured_backends, lower_tiers, open_tier

__all__ = [
    "asked_for",
    "build_cache",
    "build_direct",
    "check",
    "check_codecs",
    "check_direct",
    "check_tiers",
    "chunk_layout",
    "configured_backends",
    "file_media",
    "integrity_key",
    "lower_tiers",
    "open_tier",
    "resolve_plugins",
]
