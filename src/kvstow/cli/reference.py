"""Reference pages of the documentation, generated from the tables in the code.

``pages`` has the text before each page's tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files

from kvstow.metrics import METRICS
from kvstow.settings.lmcache_keys import ALIASES, EXTRA_KEYS, EXTRA_MAPPED, KEYS, Fate, Key
from kvstow.settings.schema import leaves


def _intro(name: str) -> str:
    """The hand-written beginning of a page, up to the head of its first table."""
    return (files("kvstow.cli") / "pages" / f"{name}.md").read_text("utf-8")


def lmcache_page() -> str:
    """The text of ``docs/reference/lmcache.md``."""
    mapped = [Key(name, Fate.MAPPED, why) for name, why in EXTRA_MAPPED.items()]
    older = ", ".join(f"`{old}` ({new})" for old, new in ALIASES.items())
    return (
        f"{_intro('lmcache')}{_key_rows(KEYS.values())}\n\n"
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
    return _intro("settings") + "\n".join(rows) + "\n\n## Meanings\n\n" + "\n".join(meanings)


def metrics_page() -> str:
    """The text of ``docs/reference/metrics.md``."""
    rows: list[str] = []
    for name, spec in METRICS.items():
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "–"
        rows.append(f"| `{spec.exported(name)}` | {spec.kind} | {labels} | {spec.help} |")
    return _intro("metrics") + "\n".join(rows) + "\n"
