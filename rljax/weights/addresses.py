"""Which addresses servers may bind to, and which of them a machine has."""

from __future__ import annotations

import ipaddress
import socket


def private_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address of this machine that a server with weights may bind to.

    Raises:
      ValueError: it is no address, or one that more than a private network may reach.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ValueError(f"host must be an IP address of this machine, got {host!r}") from None
    address = getattr(address, "ipv4_mapped", None) or address
    private = address.is_private and not (address.is_unspecified or address.is_reserved)
    if not (address.is_loopback or private):
        raise ValueError(f"host must be a loopback or private address, got {host}: weights are not for everybody")
    return address


def own_address(host: str, leader: str) -> str:
    """The address of this machine for whoever reaches ``host``, an address of process 0's machine.

    That is ``host`` itself where it is this machine's, too, and else the address of the interface through which this
    machine reaches ``host``. Nothing is sent to find it.

    Args:
      host: an address of loopback, or a private one.
      leader: address or name by which this machine reaches process 0's.

    Raises:
      ValueError: there is none that may be used; one line.
    """
    if private_address(host).is_loopback:
        own, there = _way_to(leader)
        if own != there:
            raise ValueError(
                f"publish.host = {host} is reached on the machine of process 0 alone, and this process runs on another "
                f"({own}): give a private address of process 0's machine, with a key"
            )
        return host
    own, there = _way_to(host)
    if own != there:
        try:
            private_address(own)
        except ValueError:
            raise ValueError(
                f"{own}, from which this machine reaches {host}, is no private address: give this process a "
                "publish.host of its own on its command line"
            ) from None
    return own


def _way_to(host: str) -> tuple[str, str]:
    """Addresses of this machine and of ``host`` between which packets would go; the same one where that is here."""
    try:
        (family, kind, _, _, place), *_ = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0]), str(place[0])
    except OSError as error:
        raise ValueError(f"this machine knows no way to {host}: {error}") from error
