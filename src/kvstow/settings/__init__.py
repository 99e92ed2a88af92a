"""Settings: frozen structs, parsed once. ``load`` reads this process's own, ``parse`` what it is given."""

from kvstow.fields.values import Secret, format_size, parse_size, redact_url
from kvstow.settings.checks import check_host, check_pool, chunk_tokens
from kvstow.settings.lmcache import convert_lmcache, lmcache_variables, load_lmcache, parse_lmcache
from kvstow.settings.machine import HostFacts, available_bytes, host_facts
from kvstow.settings.schema import Settings, leaves
from kvstow.settings.sections.direct import DirectSettings
from kvstow.settings.sections.memory import MemorySettings
from kvstow.settings.sources import Effective, Row, load, parse, parse_section, variable

__all__ = [
    "DirectSettings",
    "Effective",
    "HostFacts",
    "MemorySettings",
    "Row",
    "Secret",
    "Settings",
    "available_bytes",
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
    "parse_section",
    "parse_size",
    "redact_url",
    "variable",
]
