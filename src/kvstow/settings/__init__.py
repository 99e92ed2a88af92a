"""Settings: frozen structs, parsed once. ``load`` reads this process's own, ``parse`` what it is given."""

from kvstow.settings.checks import MIN_CHUNKS, check_disk, check_host, check_pool, chunk_tokens
from kvstow.settings.lmcache import convert_lmcache, lmcache_variables, load_lmcache, parse_lmcache
from kvstow.settings.machine import HostFacts, available_bytes, host_facts
from kvstow.settings.schema import Settings, leaves
from kvstow.settings.sections.direct import Direct
from kvstow.settings.sections.disk import Disk
from kvstow.settings.sections.memory import Memory
from kvstow.settings.sources import Effective, Row, load, parse, variable
from kvstow.settings.values import Secret, format_size, parse_size, redact_url

__all__ = [
    "MIN_CHUNKS",
    "Direct",
    "Disk",
    "Effective",
    "HostFacts",
    "Memory",
    "Row",
    "Secret",
    "Settings",
    "available_bytes",
    "check_disk",
    "check_host",
    "check_pool",
    "chunk_tokens",
    "convert_lmcache",
    "format_size",
    "host_facts",
    "leaves",
    "lmcache_variables",
    "load",
    "load_lmcache",
    "parse",
    "parse_lmcache",
    "parse_size",
    "redact_url",
    "variable",
]
