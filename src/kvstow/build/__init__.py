"""The composition root: settings in, engine out. The only package that knows every concrete part."""

from kvstow.build.cache import (
    adapter_executor,
    build_cache,
    check,
    chunk_layout,
    copy_executor,
    touch_executor,
)
from kvstow.build.codec import codec_names
from kvstow.build.direct import (
    build_direct,
    check_direct,
    direct_executor,
    file_media,
    load_rds,
    rds_media,
)
from kvstow.build.disk import build_disk
from kvstow.build.integrity import integrity_key
from kvstow.build.mooncake import build_mooncake, mooncake_options
from kvstow.build.objects import build_objects, objects_options
from kvstow.build.policies import POLICIES
from kvstow.build.redis import build_redis, redis_options
from kvstow.build.tiers import asked_for, lower_tiers

__all__ = [
    "POLICIES",
    "adapter_executor",
    "asked_for",
    "build_cache",
    "build_direct",
    "build_disk",
    "build_mooncake",
    "build_objects",
    "build_redis",
    "check",
    "check_direct",
    "chunk_layout",
    "codec_names",
    "copy_executor",
    "direct_executor",
    "file_media",
    "integrity_key",
    "load_rds",
    "lower_tiers",
    "mooncake_options",
    "objects_options",
    "rds_media",
    "redis_options",
    "touch_executor",
]
