"""Reference pages of the documentation, generated from the tables in the code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvstow.metrics import METRICS
from kvstow.settings.lmcache_keys import ALIASES, EXTRA_KEYS, EXTRA_MAPPED, KEYS, Fate, Key
from kvstow.settings.schema import leaves

_SETTINGS: Final = """\
# Settings

<!-- Generated: `kvstow reference settings > docs/reference/settings.md` -->

Settings come from four sources. Each is stronger than those before it:

1. the defaults below;
2. a YAML file, named by the variable `KVSTOW_CONFIG_FILE`;
3. variables `KVSTOW_…`;
4. vLLM's `--kv-transfer-config`, under `kv_connector_extra_config`.

The same two settings, in each:

```yaml
# KVSTOW_CONFIG_FILE=/etc/kvstow.yaml
chunk_size: 256
memory:
  size: 20GB
```

```bash
export KVSTOW_CHUNK_SIZE=256 KVSTOW_MEMORY_SIZE=20GB
```

```json
{"kv_connector": "KVStowConnector", "kv_role": "kv_both",
 "kv_connector_extra_config": {"chunk_size": 256, "memory.size": "20GB"}}
```

In YAML and JSON a key of a section is written nested or with a dot. `kvstow config` shows every setting and where its
value came from; vLLM's log shows them once at start.

- **Sizes are per engine**: all tensor and pipeline parallel ranks together, not each. Every data parallel engine has
  its own.
- A **size** is a number of bytes, or a number with a unit: `kB MB GB TB PB` are powers of 1,000, `KiB MiB GiB TiB PiB`
  powers of 1,024. `20GB` is 20,000,000,000 bytes; `20GiB` is 21,474,836,480.
- In a variable `null` stands for "not set", where the setting allows that.
- An unknown key or variable, a wrong type, an empty value and a key that is given twice are errors: vLLM does not
  start, and the message names the source, the key and the nearest valid one. Variables that Kubernetes makes for
  services (`KVSTOW_…_SERVICE_HOST`, `KVSTOW_…_PORT` and the like) are left alone.

| setting | variable | value | default |
|---|---|---|---|
"""

_METRICS: Final = """\
# Metrics

<!-- Generated: `kvstow reference metrics > docs/reference/metrics.md` -->

All are on vLLM's `/metrics`, with vLLM's labels `model_name` and `engine` and those below. `tier` is `memory` for the
host pool, or the name of a lower tier. Chunks found in the pool and restored from it have `tier="memory"`, whatever
tier they were fetched from before; what a fetch read has the lower tier's name.

Beside them vLLM's own `vllm:external_prefix_cache_queries` and `vllm:external_prefix_cache_hits` count tokens asked of
and restored by kvstow.

| metric | kind | labels | meaning |
|---|---|---|---|
"""

_LMCACHE: Final = """\
# LMCache's keys

<!-- Generated: `kvstow reference lmcache > docs/reference/lmcache.md` -->

What becomes of each key of LMCache's configuration (0.5), in `LMCACHE_CONFIG_FILE`, as `LMCACHE_…` variable, or as
`lmcache.…` in `kv_connector_extra_config`, when kvstow runs under the name of [LMCache's
connector](../how-to/from-lmcache.md).

- **mapped**: it becomes a [setting](settings.md) of kvstow's.
- **refused**: asking for it stops the start, because without it vLLM would do something else than you count on. Its off
  value is fine.
- **warned**: kvstow goes on without it, and a warning in the log says why. It changes neither results nor what is kept.
- **ignored**: it has no effect, and one line in the log says why.

A key that LMCache doesn't have is ignored too, with a warning that names the nearest.

| key | | |
|---|---|---|
"""


def lmcache_page() -> str:
    """The text of ``docs/reference/lmcache.md``."""
    mapped = [Key(name, Fate.MAPPED, why) for name, why in EXTRA_MAPPED.items()]
    older = ", ".join(f"`{old}` ({new})" for old, new in ALIASES.items())
    return (
        f"{_LMCACHE}{_key_rows(KEYS.values())}\n\n"
        "## Keys of `extra_config`\n\n| key | | |\n|---|---|---|\n"
        f"{_key_rows([*mapped, *EXTRA_KEYS.values()])}\n\n"
        f"## Older names\n\n{older}.\n"
    )


def _key_rows(keys: Iterable[Key]) -> str:
    return "\n".join(f"| `{key.name}` | {key.fate} | {key.why} |" for key in keys)


def settings_page() -> str:
    """The text of ``docs/reference/settings.md``."""
    rows = [
        f"| `{leaf.key}` | `{leaf.variable}` | {leaf.accepts} | `{leaf.show(leaf.default)}` |"
        for leaf in leaves()
    ]
    meanings = [f"### `{leaf.key}`\n\n{leaf.description}\n" for leaf in leaves()]
    return _SETTINGS + "\n".join(rows) + "\n\n## Meanings\n\n" + "\n".join(meanings)


def metrics_page() -> str:
    """The text of ``docs/reference/metrics.md``."""
    rows: list[str] = []
    for name, spec in METRICS.items():
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "–"
        rows.append(f"| `{spec.exported(name)}` | {spec.kind} | {labels} | {spec.help} |")
    return _METRICS + "\n".join(rows) + "\n"
