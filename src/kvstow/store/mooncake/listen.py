"""Whom Mooncake's client listens to.

It listens on every interface, and whoever connects may read and write the memory that is registered with it. No setting
of its own binds it to one address, so the kernel is told to drop, on its sockets, what isn't addressed to the one that
others are told (a classic BPF program, which needs no rights).
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SO_ATTACH_FILTER: Final = 26
NET: Final = 0xFFF00000  # offsets from here are the network header's (SKF_NET_OFF)
DROP, TAKE = 0, 0xFFFFFFFF
LOAD_BYTE, LOAD_WORD, SHIFT, IF_EQUAL, RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
V4_TO, V6_TO, V6_WORDS = 16, 24, 4  # where the address is that a packet is sent to; it has so many words
Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


class _Listed(ctypes.Structure):
    """``struct sock_filter``."""

    _fields_ = (("code", ctypes.c_ushort), ("true", ctypes.c_ubyte), ("false", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("listed", ctypes.POINTER(_Listed)))


def listening() -> dict[int, int]:
    """The sockets of this process that take connections on every interface: descriptors by inode."""
    return {inode: descriptor for inode, descriptor, sock in _sockets() if _takes_any(sock)}


def _sockets() -> Iterator[tuple[int, int, socket.socket]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            link = Path("/proc/self/fd", name).readlink().name
            if link.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    yield int(link[len("socket:[") : -1]), int(name), sock
        except OSError:  # closed meanwhile
            continue


def _takes_any(sock: socket.socket) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) and sock.getsockname()[0] in ("0.0.0.0", "::")


def only_to(address: str, before: dict[int, int]) -> bool:
    """Let nobody connect to the sockets that listen now, and did not ``before``, but by ``address`` or by loopback.

    False, and nothing was done: ``address`` is a name, or none of this host's, so that what packets are addressed to
    when they arrive isn't known. Raises ``OSError`` where the kernel can't.
    """
    try:
        target = ipaddress.ip_address(address)
        family = socket.AF_INET if target.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.bind((address, 0))
    except (ValueError, OSError):
        return False
    listed = [_Listed(*one) for one in _program(target)]
    program = _Program(len(listed), (_Listed * len(listed))(*listed))
    for inode, descriptor in listening().items():
        if inode not in before:
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, bytes(program))
    return True


def _program(target: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[Instruction]:
    """Of IPv4: what is sent to loopback, or to ``target``; of IPv6: what is sent to ``target``, else to ``::1``."""
    v4 = int(target) if target.version == 4 else 0x7F000001
    v6 = target.packed if target.version == 6 else ipaddress.IPv6Address("::1").packed
    words = [int.from_bytes(v6[i : i + 4]) for i in range(0, 4 * V6_WORDS, 4)]
    compared = [
        step
        for i, word in enumerate(words)
        for step in ((LOAD_WORD, 0, 0, NET + V6_TO + 4 * i), (IF_EQUAL, 0, 2 * (V6_WORDS - i) - 1, word))
    ]
    return [
        (LOAD_BYTE, 0, 0, NET),
        (SHIFT, 0, 0, 4),
        (IF_EQUAL, 0, 6, 4),
        (LOAD_WORD, 0, 0, NET + V4_TO),
        (IF_EQUAL, 3, 0, v4),
        (SHIFT, 0, 0, 24),
        (IF_EQUAL, 1, 0, 127),
        (RETURN, 0, 0, DROP),
        (RETURN, 0, 0, TAKE),
        *compared,
        (RETURN, 0, 0, TAKE),
        (RETURN, 0, 0, DROP),
    ]
