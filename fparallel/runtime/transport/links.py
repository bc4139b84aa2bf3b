"""Links between the processes of one host: notes over a socket, tensors read from each other's memory.

A note says where tensors lie in the memory of its sender, or that those of the receiver have been read. All
links of a process are served by one thread: what a note asks for is done as it comes, whatever the ranks wait
for and compute meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fparallel.errors import ExecutionError
from fparallel.runtime.transport.host_memory import PeerMemory

OFF = "FPARALLEL_HOST_READS"  # this environment variable, set to 0, makes ranks send all messages instead
_TOKEN = 32  # bytes
_INLINE = 1024  # addresses that travel in the note; more are a table in the sender's memory

Note = tuple[int, int, int, int]
_HELLO = struct.Struct("<q")  # the sender's position in its group
_HEAD = struct.Struct("<6q")  # the note, the number of addresses, the address of their table or 0


class Link:
    """A link to one other process.

    Args:
      peer: its name for messages.
      connection: a socket that keeps the bounds of messages.
      memory: that process's.

    Attributes:
      gone: whether the process has closed its end.
    """

    def __init__(self, peer: str, connection: socket.socket, memory: PeerMemory) -> None:
        self.peer, self.connection, self.memory = peer, connection, memory
        self.gone = False

    def serve(self, receive: Callable[[Note, Sequence[int]], None], lost: Callable[[str], None]) -> None:
        """Starts the link: `receive` is called with every note, `lost` once the process is gone."""
        self.receive, self.lost = receive, lost
        pid = os.getpid()  # a fork has no thread of its parent's
        if pid not in _SERVERS:
            _SERVERS[pid] = _Server()
        _SERVERS[pid].add(self)

    def send(self, note: Note, addresses: Sequence[int] = ()) -> Tensor | None:
        """Sends a note and the addresses of tensors.

        Returns:
          What the receiver still has to read, if anything: it must live until it has answered.

        Raises:
          RuntimeError: the process is gone.
        """
        table = torch.tensor(addresses) if len(addresses) > _INLINE else None
        head = _HEAD.pack(*note, len(addresses), 0 if table is None else table.data_ptr())
        body = b"" if table is not None else struct.pack(f"<{len(addresses)}q", *addresses)
        try:
            self.connection.send(head + body)
        except OSError as error:
            raise RuntimeError(f"{self.peer} has ended: {error}") from error
        return table

    def take(self, server: _Server) -> None:
        """Hands on the next note."""
        try:
            data = self.connection.recv(_HEAD.size + 8 * _INLINE)
        except OSError:
            data = b""
        if not data:
            self.gone = True
            server.remove(self)
            self.lost(f"{self.peer} has ended")
            return
        *note, count, table = _HEAD.unpack_from(data)
        if table:
            found = torch.empty(count, dtype=torch.int64)
            self.memory.read(table, found)
            self.receive(tuple(note), found.tolist())
        else:
            self.receive(tuple(note), struct.unpack_from(f"<{count}q", data, _HEAD.size))


class _Server:
    """The thread that serves the links of this process."""

    def __init__(self) -> None:
        self.links: dict[int, Link] = {}
        self.poll = select.epoll()
        arguments = (torch.get_num_threads(),)
        threading.Thread(target=self._run, args=arguments, name="fparallel-links", daemon=True).start()

    def add(self, link: Link) -> None:
        self.links[link.connection.fileno()] = link
        self.poll.register(link.connection, select.EPOLLIN)

    def remove(self, link: Link) -> None:
        self.poll.unregister(link.connection)
        del self.links[link.connection.fileno()]

    def _run(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        with torch.no_grad():
            while True:
                for descriptor, _ in self.poll.poll():
                    link = self.links[descriptor]
                    try:
                        link.take(self)
                    except Exception as error:  # whoever waits for this peer is told; the other links go on
                        link.lost(f"the link to {link.peer} failed: {error}")


_SERVERS: dict[int, _Server] = {}  # by process


def connect(group: dist.ProcessGroup, members: Sequence[int], deadline: float) -> dict[int, Link] | None:
    """Links to all others of a group, by position; None if some are on another host or may not be read.

    Collective over the group: each member shows where a random token lies, and tries to read the others'.
    """
    me, offer, token = dist.get_rank(group), None, torch.tensor(list(secrets.token_bytes(_TOKEN)))
    with contextlib.ExitStack() as stack:
        door = _door(len(members), deadline)
        if door is not None:
            stack.enter_context(door)
            PeerMemory.permit()
            offer = (_host(), os.getpid(), token.data_ptr(), token.tolist(), door.getsockname())
        offers = _all_gather(offer, group, len(members))
        readable = offer is not None and all(
            theirs is not None and theirs[0] == offer[0] and _can_read(theirs, token) for theirs in offers
        )
        if not all(_all_gather(readable, group, len(members))):
            return None
        assert door is not None
        try:
            return _links(me, offers, members, door, deadline)
        except OSError as error:
            raise ExecutionError(
                f"rank {members[me]} cannot reach the other ranks of this host: {error}",
                fix=f"look for the rank that failed first; {OFF}=0 makes all ranks send messages instead",
            ) from error


def _door(num_members: int, deadline: float) -> socket.socket | None:
    """A socket at which the other members can call; None where the system lacks something, or it is not wanted."""
    if os.environ.get(OFF, "1") == "0" or not PeerMemory.is_supported() or not hasattr(select, "epoll"):
        return None
    try:
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door.settimeout(deadline)
        door.bind(b"\0fparallel-" + secrets.token_hex(16).encode())  # no file: it ends with the process
        door.listen(num_members)
    except OSError:
        return None
    return door


def _links(
    me: int, offers: Sequence[Any], members: Sequence[int], door: socket.socket, deadline: float
) -> dict[int, Link]:
    """Calls the members before this one, and answers those behind it; returns when all have their links."""
    found: dict[int, socket.socket] = {}
    for peer in range(me):
        found[peer] = connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(deadline)
        connection.connect(offers[peer][4])
        connection.send(_HELLO.pack(me))
    for _ in range(me + 1, len(members)):
        connection, _ = door.accept()
        connection.settimeout(deadline)
        found[_hello(connection)] = connection
    for connection in found.values():
        connection.send(_HELLO.pack(me))
    for connection in found.values():
        _hello(connection)
    return {
        peer: Link(f"rank {members[peer]}", connection, PeerMemory(offers[peer][1]))
        for peer, connection in sorted(found.items())
    }


def _hello(connection: socket.socket) -> int:
    """The position of whoever is at the other end."""
    data = connection.recv(_HELLO.size)
    if len(data) != _HELLO.size:
        raise OSError("it has ended")
    return int(_HELLO.unpack(data)[0])


def _all_gather(value: Any, group: dist.ProcessGroup, num_members: int) -> list[Any]:
    given: list[Any] = [None] * num_members
    dist.all_gather_object(given, value, group=group)
    return given


def _host() -> str:
    """What two processes share that see the same sockets: one boot of one kernel, and a network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return platform.node()


def _can_read(offer: Any, like: Tensor) -> bool:
    _, pid, address, token, _ = offer
    found = torch.zeros_like(like)
    try:
        PeerMemory(pid).read(address, found)
    except RuntimeError:
        return False
    return found.tolist() == token
