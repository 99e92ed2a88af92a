"""The integrity key, from its file."""

from __future__ import annotations

import os
import stat
from typing import Final

from kvstow.errors import SettingsError
from kvstow.settings import Settings

KEY_BYTES: Final = 32
MAX_FILE_BYTES: Final = 4096


def integrity_key(settings: Settings) -> bytes | None:
    """32 bytes; None: not set. Raises ``SettingsError`` for a file that is not its owner's alone, or holds no key.

    Errors and logs never show what is in the file.
    """
    path = settings.integrity_key_file
    if path is None:
        return None
    try:
        with open(
            path,
            "rb",
            opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC),
        ) as file:
            about = os.fstat(file.fileno())
            data = file.read(MAX_FILE_BYTES) if stat.S_ISREG(about.st_mode) else b""
    except OSError as error:
        raise SettingsError(f"integrity_key_file {path} can't be read: {error.strerror}") from error
    if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SettingsError(f"integrity_key_file {path} can be read by others: chmod 600 {path}")
    if len(data) == KEY_BYTES:
        return data
    try:
        key = bytes.fromhex(data.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise SettingsError(
            f"integrity_key_file {path} holds no key: 32 bytes, or 64 hexadecimal digits (openssl rand -hex 32)"
        )
    return key
