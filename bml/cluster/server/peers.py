"""The addresses and incarnations of all servers, and whether they share one machine."""

from __future__ import annotations

from collections.abc import Mapping

from bml.cluster.spec.job import Contact, Contacts, JobSpec
from bml.protocol.step.slices import LAN_RATE, on_one_host, rate_of, slice_nbytes
from bml.protocol.wire.messages import View
from bml.topology.errors import FabricError
from bml.transport.choice import Opened


class Peers:
    """The contacts and incarnations of all servers; `contact` is this server's own."""

    def __init__(self, spec: JobSpec, contact: Contact, opened: Opened):
        self.contact = contact
        self.contacts: dict[int, Contact] = {}
        self.incarnations: dict[int, int] = {}
        """The incarnation of each server that has joined; the others are in their first, 0."""
        self.one_host = False
        """Whether all servers share one machine."""
        self._opened = opened
        self._nic_rate = spec.nic_rate
        self._zero_copy = spec.zero_copy
        self._rate = spec.nic_rate or LAN_RATE

    def start(self, contacts: Contacts) -> None:
        """Take the contacts of all. Raises FabricError if they do not use one transport."""
        others = {server: contact.transport for server, contact in contacts.items()}
        if set(others.values()) != {self._opened.name}:
            raise FabricError(f"servers fell back to different transports: {others}; ask for tcp everywhere")
        self.contacts = dict(contacts)
        hosts = [host for contact in contacts.values() for host, _ in contact.nics]
        self.one_host = on_one_host(hosts)
        if self._nic_rate is None:
            self._rate = rate_of(hosts, self._zero_copy)
        self._meet(self.contacts)

    def installed(self, view: View) -> Mapping[int, Contact]:
        """A view is in force; returns the contacts of its members."""
        for each in view.joined:
            self.contacts[each.server] = Contact.decode(each.contact)
        self.incarnations = {each.server: each.number for each in view.joined}
        members = {server: self.contacts[server] for server in view.members}
        self._meet(members)
        return members

    def at(self, peer: int, level: int) -> tuple[tuple[str, int], int]:
        """The address (host, port) of a peer's NIC, and the incarnation of that peer."""
        return self.contacts[peer].nics[level], self.incarnations.get(peer, 0)

    @property
    def rate(self) -> float:
        """The rate that is assumed for NICs, in bytes per second: from it follows the length of slices."""
        return self._rate

    def slice_nbytes(self, nbytes: int) -> int:
        """How large the slices of a vector of `nbytes` bytes are, in bytes; all servers choose alike."""
        return slice_nbytes(nbytes, self._rate)

    def _meet(self, contacts: Mapping[int, Contact]) -> None:
        if self._opened.zero_copy is not None:
            pages = {server: contact.registration_page for server, contact in contacts.items()}
            self._opened.zero_copy.meet(pages)
