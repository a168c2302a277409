"""Workers in processes of their own: bytes go through memory that two of a host share, else through a process group of both."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .doors import Door
from .groups import REFUSE, GroupPair, Talk, Waiter
from .peers import Message, PeerLost, Post
from .shared import REFUSE as NO
from .shared import Flow, SharedPair, converse


class ProcessPeers:
    """Peers over pairs, made when two workers first meet.

    A word goes each way before anything else counts.

    Args:
        me: number of this worker.
        address: of this host.
        post: through which workers of different hosts find each other; closed with this.
        timeout_s: how long a peer may keep this worker waiting.
        alone: share no memory, as between hosts.
    """

    def __init__(self, me: int, address: str, post: Post, timeout_s: float, *, alone: bool = False) -> None:
        self._me, self._address, self._post, self._timeout_s = me, address, post, timeout_s
        self._door = None if alone else Door(me)
        self._signs: Sequence[str] = ()
        self._shared: dict[int, SharedPair] = {}
        self._groups: dict[int, GroupPair] = {}
        self._made: dict[int, int] = {}
        self._aborted = False
        self._waiter = Waiter(timeout_s, self._broken)

    @property
    def sign(self) -> str:
        """What the others need to find this one."""
        return "" if self._door is None else self._door.sign

    def introduce(self, signs: Sequence[str]) -> None:
        """The signs of all, by number."""
        self._signs = signs

    def exchange(self, peers: Collection[int], sends: Sequence[Message], receives: Sequence[Message]) -> set[int]:
        """See ``Peers``."""
        order = sorted(peers)
        for peer in order:
            self._meet(peer)
        given = {p: ([t for w, t in sends if w == p], [t for w, t in receives if w == p]) for p in order}
        talks = [Talk(p, self._groups[p], *given[p]) for p in order if p in self._groups]
        flows = [Flow(p, self._shared[p], *given[p]) for p in order if p in self._shared]
        converse(flows, self._timeout_s, self._broken)
        refused = {flow.peer for flow in flows if flow.refused}
        return refused | self._finished(talks)

    def refuse(self, peers: Collection[int]) -> None:
        """See ``Peers``."""
        order = sorted(peers)
        for peer in order:
            self._meet(peer)
        talks = [Talk(p, self._groups[p], [], [], REFUSE) for p in order if p in self._groups]
        flows = [Flow(p, self._shared[p], [], [], NO) for p in order if p in self._shared]
        converse(flows, self._timeout_s, self._broken)
        for talk in talks:
            talk.opened(self._waiter)
            self._leave(talk.peer)

    def abort(self) -> None:
        """See ``Peers``."""
        self._aborted = True
        for shared in list(self._shared.values()):
            shared.abort()

    def close(self) -> None:
        """Let go of all connections."""
        for peer in list(self._groups):
            self._leave(peer)
        for shared in self._shared.values():
            shared.close()
        self._shared.clear()
        if self._door is not None:
            self._door.close()
        self._waiter.close()
        self._post.close()

    def _broken(self) -> bool:
        return self._aborted

    def _finished(self, talks: Sequence[Talk]) -> set[int]:
        refused = {talk.peer for talk in talks if talk.opened(self._waiter) == REFUSE}
        for talk in talks:
            if talk.peer in refused:
                self._leave(talk.peer)
            else:
                talk.finish(self._waiter)
        return refused

    def _meet(self, peer: int) -> None:
        if self._aborted:
            raise PeerLost(peer)
        if peer in self._shared or peer in self._groups:
            return
        shared = (
            self._door.pair(peer, self._signs[peer], self._timeout_s, self._broken)
            if self._door is not None and not self._made.get(peer)
            else None
        )
        if shared is not None:
            self._shared[peer] = shared
            return
        number = self._made[peer] = self._made.get(peer, 0) + 1
        first, second = sorted((self._me, peer))
        subject = f"{first}-{second}-{number}"
        self._groups[peer] = self._waiter.meet(peer, int(self._me > peer), self._address, subject, self._post)

    def _leave(self, peer: int) -> None:
        self._groups.pop(peer).group.abort()
