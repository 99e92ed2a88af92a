"""Whom Mooncake's client listens to.

It listens on every interface, and whoever connects may read and write the memory that is registered with it. No setting
of its own binds it to one address, so the kernel is told to drop, on its sockets, what isn't addressed to the one that
others are told (a classic BPF program, which needs no rights).
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import stat
from collections.abc import Container, Iterator
from itertools import islice
from typing import Final, NamedTuple

SO_ATTACH_FILTER: Final = 26
NET: Final = 0xFFF00000  # offsets from here are the network header's (SKF_NET_OFF)
DROP, TAKE = 0, 0xFFFFFFFF
LOAD_BYTE, LOAD_WORD, SHIFT, IF_EQUAL, RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
V4_TO, V6_TO, V6_WORDS = (
    16,
    24,
    4,
)  # where the address is that a packet is sent to; it has so many words
LOCAL, STATE, INODE, LISTENS = 1, 3, 9, "0A"  # of /proc/net/tcp: columns, and a state
Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


class _Listed(ctypes.Structure):
    """``struct sock_filter``."""

    _fields_ = (
        ("code", ctypes.c_ushort),
        ("true", ctypes.c_ubyte),
        ("false", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    )


class _Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("listed", ctypes.POINTER(_Listed)))


class Listening(NamedTuple):
    descriptor: int
    port: int


def listening() -> dict[int, Listening]:
    """The sockets of this process that take connections on every interface, by inode. They are looked at only: a socket
    object made of a descriptor would change whether it blocks, for everybody, where a default timeout is set."""
    ports = dict(_everywhere())
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode) and status.st_ino in ports:
                found[status.st_ino] = Listening(int(name), ports[status.st_ino])
    return found


def _everywhere() -> Iterator[tuple[int, int]]:
    """Of all processes: inode and port of what listens on every interface."""
    for table in ("tcp", "tcp6"):
        with (
            contextlib.suppress(FileNotFoundError),
            open(f"/proc/self/net/{table}") as lines,
        ):  # there may be no IPv6
            for line in islice(lines, 1, None):
                fields = line.split()
                address, _, port = fields[LOCAL].partition(":")
                if fields[STATE] == LISTENS and not address.strip("0"):
                    yield int(fields[INODE]), int(port, 16)


def only_to(address: str, ports: Container[int], before: Container[int]) -> list[int] | None:
    """Let nobody connect but by ``address`` or by loopback to the sockets that listen now on one of ``ports``, and did
    not ``before`` (inodes). Returns on which.

    None, and nothing was done: ``address`` is a name, or none of this host's, so that what packets are addressed to
    when they arrive isn't known. Raises ``OSError`` where the kernel can't.
    """
    try:
        target = ipaddress.ip_address(address)
        family = socket.AF_INET if target.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.bind((address, 0))
    except (ValueError, OSError):
        return None
    program = _program(target)
    chosen = [
        one for inode, one in listening().items() if inode not in before and one.port in ports
    ]
    for one in chosen:
        _attach(one.descriptor, program)
    return sorted(one.port for one in chosen)


def _attach(descriptor: int, program: list[Instruction]) -> None:
    listed = (_Listed * len(program))(*(_Listed(*one) for one in program))
    argument = _Program(len(program), listed)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setsockopt(
        descriptor,
        socket.SOL_SOCKET,
        SO_ATTACH_FILTER,
        ctypes.byref(argument),
        ctypes.sizeof(argument),
    ):
        raise OSError(ctypes.get_errno(), "SO_ATTACH_FILTER")


def _program(target: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[Instruction]:
    """Of IPv4: what is sent to loopback, or to ``target``; of IPv6: what is sent to ``target``, else to ``::1``."""
    v4 = int(target) if target.version == 4 else 0x7F000001
    v6 = target.packed if target.version == 6 else ipaddress.IPv6Address("::1").packed
    words = [int.from_bytes(v6[i : i + 4]) for i in range(0, 4 * V6_WORDS, 4)]
    compared = [
        step
        for i, word in enumerate(words)
        for step in (
            (LOAD_WORD, 0, 0, NET + V6_TO + 4 * i),
            (IF_EQUAL, 0, 2 * (V6_WORDS - i) - 1, word),
        )
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
