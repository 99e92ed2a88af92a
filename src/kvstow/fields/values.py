"""Values of settings as users write and read them: sizes in bytes, secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from posixpath import normpath
from typing import Final
from urllib.parse import urlsplit

MAX_BYTES: Final = (1 << 63) - 1
LEAST_PLAIN_BYTES: Final = 64 << 10  # no setting is useful below, and LMCache counts in GB
MASK: Final = "****"

_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SIZE: Final = re.compile(
    r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*(?:([kmgtp]?)(i?)b?)\s*", re.IGNORECASE | re.ASCII
)
_USER_INFO: Final = re.compile(r":.*@", re.DOTALL)  # as in user:password@host
_SECRET_PARAMETER: Final = re.compile(
    r"((?:password|passwd|secret|token|key)[^=&]*=)[^&]*", re.IGNORECASE
)


def parse_size(value: object) -> int:
    """Bytes of an integer, or of text such as ``20GB``, ``512 MiB``, ``1.5TB``.

    ``kB MB GB TB PB`` are powers of 1,000; ``KiB MiB GiB TiB PiB`` powers of 1,024; case and the final B do
    not matter. Raises ValueError, its message saying what was expected, for anything else: negative, above
    2**63 - 1, not a whole number of bytes.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("expected a size: bytes, or text such as 20GB or 512MiB")
    text = repr(value) if isinstance(value, float) else str(value)
    match = _SIZE.fullmatch(text if not text.endswith(".0") else text[:-2])
    if match is None or (match[3] and not match[2]):
        raise ValueError("expected a size: bytes, or text such as 20GB (10^9) or 20GiB (2^30)")
    unit = 1024 if match[3] else 1000
    size = Decimal(match[1]) * unit ** _POWERS[match[2].lower()]
    if size != int(size) or size > MAX_BYTES:
        raise ValueError("expected a whole number of bytes below 2^63")
    return int(size)


def parse_setting_size(value: object) -> int:
    """Returns the bytes of a setting, as ``parse_size``.

    Raises ValueError for a plain number from 1 to ``LEAST_PLAIN_BYTES`` - 1: the user meant GB, as in LMCache.
    """
    size = parse_size(value)
    plain = str(value).strip()
    if 0 < size < LEAST_PLAIN_BYTES and not plain[-1].isalpha():
        raise ValueError(f"expected a unit; a plain number is bytes. {plain}GB?")
    return size


def format_size(size: int) -> str:
    """``size`` in the largest unit, of 1,000 or of 1,024, that divides it or shows four digits: ``5GB``."""
    for base, infix in ((1024, "i"), (1000, "")):
        for power, letter in ((5, "P"), (4, "T"), (3, "G"), (2, "M")):
            if size >= base**power and size % base**power == 0:
                return f"{size // base**power}{letter}{infix}B"
    return format_bytes(size)


def format_bytes(size: int) -> str:
    """Formats counted bytes in decimal units, such as ``133.1MB``."""
    for power, letter in ((5, "P"), (4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if size >= 1000**power:
            return f"{size / 1000**power:.4g}{letter}B"
    return f"{size}B"


def round_up_to_mb(size: int) -> str:
    """Returns ``size`` rounded up to whole megabytes, as text that a setting accepts: ``17MB``."""
    return f"{-(-size // 10**6)}MB"


def parse_paths(value: object) -> tuple[str, ...]:
    """Absolute paths of a list, or of text in which commas separate them. Raises ValueError."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ValueError("expected paths: a list, or text with commas between them")
    paths = tuple(part.strip() for part in parts)
    if not all(path.startswith("/") for path in paths):
        raise ValueError("expected absolute paths")
    if len({normpath(path) for path in paths}) < len(paths):
        raise ValueError("expected each path once")
    return paths


class Secret:
    """A value that is shown masked: of a URL only its password, anything else entirely.

    Neither ``str``, ``repr``, f-strings nor an error message give it away; ``reveal`` does.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The value itself, for the client that needs it and nobody else."""
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return redact_url(self._value) if "://" in self._value else MASK

    __repr__ = __str__


class Options(Secret):
    """Options by name, as JSON; shown masked entirely, whatever is in them."""

    __slots__ = ()

    def __str__(self) -> str:
        return MASK

    __repr__ = __str__


def parse_names(value: object) -> tuple[str, ...]:
    """Words of a list, or of text in which commas separate them. Raises ValueError."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(
        isinstance(part, str) and part.strip() for part in parts
    ):
        raise ValueError("expected names: a list, or text with commas between them")
    return tuple(part.strip() for part in parts)


def parse_options(value: object) -> Options:
    """A mapping of names to mappings, or JSON of one. Raises ValueError, never with what is in it."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(parsed)
    except (ValueError, TypeError, RecursionError):
        parsed = text = ""
    if not isinstance(parsed, Mapping) or not all(
        isinstance(inner, Mapping) for inner in parsed.values()
    ):
        raise ValueError(
            "expected options under each name, as in {sqlite: {path: /mnt/chunks.db}}; in text, as JSON"
        )
    return Options(text)


def masked(text: str) -> str:
    """``text`` as it may be shown, wherever it was written: a URL as by ``redact_url``, and nothing of what is like
    ``user:password@host``."""
    if "://" in text:
        return redact_url(text)
    return MASK if _USER_INFO.search(text) else text


def redact_url(url: str) -> str:
    """``url`` without its password and without the values of parameters that are called password, token or key."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return MASK
    user, at, host = parts.netloc.rpartition("@")
    # A password with a slash in it, say, not percent-encoded.
    if "@" in parts.path + parts.query + parts.fragment:
        return f"{parts.scheme}://{MASK}"
    if at:
        name, colon, _ = user.partition(":")
        host = f"{name}:{MASK}@{host}" if colon else f"{name}@{host}"
    query = _SECRET_PARAMETER.sub(rf"\1{MASK}", parts.query)
    return f"{parts.scheme}://{host}{parts.path}{'?' if query else ''}{query}{'#' + MASK if parts.fragment else ''}"
