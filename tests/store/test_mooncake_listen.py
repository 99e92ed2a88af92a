"""Whom sockets that listen on every interface let in, once they were told; Mooncake itself isn't needed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from kvstow.backends.mooncake.listen import Listening, listening, only_to

ANSWER_S = 0.3  # what is dropped isn't answered; on one host all else is, at once


def own_address() -> str:
    """One of this host's beside loopback; skips where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this host has no address but loopback")
        return str(sock.getsockname()[0])


def lets_in(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


@pytest.fixture
def before() -> dict[int, Listening]:
    return listening()


@pytest.fixture
def ports(before: dict[int, Listening]) -> Iterator[list[int]]:
    """One that takes IPv4, one that takes both, as Mooncake's client has."""
    with (
        socket.create_server(("0.0.0.0", 0)) as one,
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as two,
    ):
        yield [one.getsockname()[1], two.getsockname()[1]]


def test_of_loopback_nobody_else_is_let_in(before: dict[int, Listening], ports: list[int]) -> None:
    own = own_address()
    assert all(lets_in(own, port) for port in ports)
    assert only_to("127.0.0.1", ports, before) == sorted(ports)
    assert [lets_in("127.0.0.1", port) for port in ports] == [True, True]
    assert [lets_in(own, port) for port in ports] == [False, False]
    assert lets_in("::1", ports[1])


def test_by_an_address_of_this_host_and_by_loopback(
    before: dict[int, Listening], ports: list[int]
) -> None:
    own = own_address()
    assert only_to(own, ports, before)
    assert all(lets_in(address, port) for address in ("127.0.0.1", own) for port in ports)


def test_of_ipv6_only_the_one_address(before: dict[int, Listening], ports: list[int]) -> None:
    assert only_to("::1", ports, before)
    assert lets_in("::1", ports[1])
    assert lets_in("127.0.0.1", ports[1])
    assert not lets_in(own_address(), ports[1])


@pytest.mark.parametrize("address", ["localhost", "myhost.internal", "203.0.113.7", ""])
def test_a_name_or_another_hosts_address_changes_nothing(
    address: str, before: dict[int, Listening], ports: list[int]
) -> None:
    assert only_to(address, ports, before) is None
    assert all(lets_in("127.0.0.1", port) for port in ports)


def test_sockets_that_listened_before_are_left_alone(ports: list[int]) -> None:
    own = own_address()
    assert only_to("127.0.0.1", ports, listening()) == []
    assert all(lets_in(own, port) for port in ports)


def test_what_listens_on_one_address_is_none_of_them(before: dict[int, Listening]) -> None:
    with socket.create_server(("127.0.0.1", 0)):
        assert listening() == before


def test_what_began_to_listen_meanwhile_on_another_port_is_left_alone(
    before: dict[int, Listening], ports: list[int]
) -> None:
    own = own_address()
    assert only_to("127.0.0.1", ports[:1], before) == ports[:1]
    assert [lets_in(own, port) for port in ports] == [False, True]


def test_no_descriptor_changes_whether_it_blocks(
    before: dict[int, Listening], ports: list[int]
) -> None:
    one, other = socket.socketpair()
    with one, other:
        mine = [
            one.fileno(),
            *(listener.descriptor for listener in listening().values() if listener.port in ports),
        ]
        assert all(os.get_blocking(descriptor) for descriptor in mine)
        assert len(mine) == 3
        socket.setdefaulttimeout(5.0)
        try:
            only_to("127.0.0.1", ports, before)
        finally:
            socket.setdefaulttimeout(None)
        assert all(os.get_blocking(descriptor) for descriptor in mine)


def test_a_kernel_that_cannot_is_an_error(
    before: dict[int, Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstow.backends.mooncake.listen.SO_ATTACH_FILTER", 9999)
    with (
        socket.create_server(("0.0.0.0", 0)) as server,
        pytest.raises(OSError, match="SO_ATTACH_FILTER"),
    ):
        only_to("127.0.0.1", [server.getsockname()[1]], before)
