"""The laws of a run over many hosts. They know what really happens, and what each rank was told."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.ports import Total
from paceline.lab.faulttest.watched import Violation

Who = tuple[int, int]
"""A rank, and which incarnation of it."""
Batch = int


class Sent(NamedTuple):
    """What a message says of itself: who sent it to whom, and its number among those of its tag."""

    src: Who
    dst: Who
    tag: int
    number: int


class Laws:
    """What has happened in a run, and whether it may.

    Args:
        workers: the number of workers.
        now_s: the virtual time.

    Attributes:
        sites: how often each event happened that a good campaign must have covered.
        lost: when the registrar struck an incarnation off, or a fault ended it.
        left: the incarnations that came to their end.
        entered: the last incarnation of each rank that has entered.
    """

    def __init__(self, workers: int, now_s: Callable[[], float]) -> None:
        self._workers, self._now_s = workers, now_s
        self.sites: Counter[str] = Counter()
        self.lost: dict[Who, float] = {}
        self.left: set[Who] = set()
        self.entered: Counter[int] = Counter()
        self._trace = hashlib.blake2b(digest_size=16)
        self._sums: defaultdict[tuple[int, Sequence[int]], dict[int, Any]] = defaultdict(dict)
        self._sent: defaultdict[tuple[Who, Who, int], int] = defaultdict(int)
        self._taken: defaultdict[tuple[Who, Who, int], int] = defaultdict(int)
        self._heard: defaultdict[tuple[Who, int], int] = defaultdict(int)
        self._read: dict[tuple[Who, int, int], tuple[int, int]] = {}
        self._holders: dict[Batch, Who] = {}
        self._used: defaultdict[Batch, list[Who]] = defaultdict(list)
        self._pushes: Counter[int] = Counter()
        self._replies: dict[int, tuple[int, int, float, float]] = {}
        self._outcomes: dict[int, bool] = {}
        self._came: defaultdict[int, set[Who]] = defaultdict(set)
        self._sent_before: Counter[tuple[int, Who, Who]] = Counter()
        self.state_lost = False
        self._alone_s = -1.0

    def check(self, holds: bool, law: str, text: str) -> None:
        """Fail unless the law holds."""
        if not holds:
            raise Violation(law, f"{text} (at {self._now_s():.4f} s)")

    def note(self, who: Who, text: str) -> None:
        """Note what a rank did, and when."""
        self._trace.update(f"{self._now_s()!r} {who} {text}\n".encode())

    @property
    def trace_hash(self) -> str:
        """A digest of all that was noted."""
        return self._trace.hexdigest()

    def lose(self, who: Who) -> None:
        """Hear that an incarnation has ended before its time."""
        self.lost.setdefault(who, self._now_s())

    def leave(self, who: Who) -> None:
        """Hear that an incarnation comes to its end."""
        self.left.add(who)
        ended = {*self.left, *self.lost}
        workers = [(rank, self.entered[rank]) for rank in range(self._workers)]
        if not any(number and (rank, number) not in ended for rank, number in workers):
            self._alone_s = self._now_s()

    def was_lost(self, who: Who) -> bool:
        """Whether an incarnation has ended before its time, or another one has followed it."""
        return who in self.lost or self.entered[who[0]] > who[1]

    # Collectives ---------------------------------------------------------------------------------

    def summed(
        self, index: int, group: Sequence[int], who: Who, total: Total, x: Tensor, due: Tensor
    ) -> None:
        """A rank has got a sum: all get the same bits, and every contribution counts once."""
        self.note(who, f"sum {index} {group} {x.sum().item()!r}")
        self.check(
            total == Total(len(group), 1) and torch.allclose(x, due, rtol=1e-5, atol=1e-5),
            "sums",
            f"rank {who[0]} got another sum of {index} over {group}: weight {total.weight}",
        )
        self._finish_sum(index, group, who, x.numpy().tobytes())

    def raised(self, index: int, group: Sequence[int], who: Who, lost: Sequence[int]) -> None:
        """A rank has heard of losses instead."""
        self.note(who, f"sum {index} {group} lost {lost}")
        self.sites["sum raised"] += 1
        for rank in lost:
            self.check(
                self.was_lost((rank, 1)),
                "nobody is lost in vain",
                f"rank {who[0]} raises the loss of rank {rank}, which is here",
            )
        self._finish_sum(index, group, who, frozenset(lost))

    def _finish_sum(self, index: int, group: Sequence[int], who: Who, own: Any) -> None:
        """Whoever raised names all those lost who have the sum; all others have the same bits."""
        outcomes = self._sums[index, group]
        outcomes[who[0]] = own
        for rank, other in outcomes.items():
            if isinstance(own, frozenset) and isinstance(other, frozenset):
                continue
            if isinstance(own, frozenset) or isinstance(other, frozenset):
                lost, taker = (own, rank) if isinstance(own, frozenset) else (other, who[0])
                holds = taker in lost
            else:
                holds = own == other
            self.check(
                holds,
                "one outcome",
                f"of sum {index} over {group} ranks {who[0]} and {rank} have different outcomes",
            )

    # Messages ------------------------------------------------------------------------------------

    def sent(self, src: Who, dst: Who, tag: int) -> Sent:
        """A rank is about to send a message."""
        self._sent[src, dst, tag] += 1
        return Sent(src, dst, tag, self._sent[src, dst, tag])

    def refused(self, message: Sent) -> None:
        """A message was not sent: there was no room."""
        self._sent[message[:3]] -= 1
        self.sites["post refused"] += 1

    def received(self, message: Sent, who: Who, tag: int, known: int) -> None:
        """A rank has received a message: the next one with its tag, of an incarnation that counts.

        Args:
            message: what it says of itself.
            who: the receiver.
            tag: that it was asked for.
            known: the last incarnation of the sender that the receiver was told of.
        """
        self.note(who, f"got {message}")
        src, dst, its_tag, number = message
        self.check((dst, its_tag) == (who, tag), "messages", f"{who} got {message} with tag {tag}")
        heard = max(known, self._heard[who, src[0]])
        self.check(src[1] >= heard, "fence", f"{who} got {message} after incarnation {heard}")
        self._heard[who, src[0]] = src[1]
        last = self._taken[src, dst, tag]
        self.check(number == last + 1, "messages", f"{who} got {message} after number {last}")
        self._taken[src, dst, tag] = number

    def counts(self, src: Who, dst: Who, tags: Iterable[int]) -> list[int]:
        """How many messages one has sent another, by tag."""
        return [self._sent[src, dst, tag] for tag in tags]

    def missing(self, src: Who, dst: Who, tag: int, count: int) -> int:
        """How many of so many messages one has not received yet."""
        return count - self._taken[src, dst, tag]

    # Windows -------------------------------------------------------------------------------------

    def read(self, who: Who, owner: int, window: int, seen: tuple[int, int], x: Tensor) -> None:
        """A rank has read a window: what was published, and nothing older than before."""
        self.note(who, f"read {owner} {window} {seen}")
        incarnation, number = seen
        value = float(1000 * incarnation + number)
        self.check(x.unique().tolist() == [value], "windows", f"{who} read {x.tolist()} for {seen}")
        before = self._read.get((who, owner, window), (0, 0))
        if window == 0:
            self.check(seen >= before, "windows", f"{who} read {seen} of {owner} after {before}")
        self._read[who, owner, window] = seen

    # Servers -------------------------------------------------------------------------------------

    def pushed(self, worker: int) -> None:
        """A worker pushes to the server."""
        self._pushes[worker] += 1

    def replied(self, who: Who, number: int, pushes: float) -> None:
        """A worker has got the reply to a push: each that was replied to counts once."""
        self.note(who, f"reply {number} {pushes}")
        made = self._pushes[who[0]]
        _, last, before, _ = self._replies.get(who[0], (0, 0, 0.0, 0.0))
        if not self.state_lost and not self.was_lost(who):
            self.check(  # a push without a reply may count, or not
                1 <= pushes - before <= made - last,
                "a push counts once",
                f"{who}: {pushes:.0f} counted of {made}; {before:.0f} of {last} at the last reply",
            )
        self._replies[who[0]] = number, made, pushes, self._now_s()

    def succeeded(self, who: Who, ledger: Sequence[int]) -> None:
        """A server has taken up the state of the one before it.

        That has every push that was replied to, unless another rank was lost since the reply, which
        may have had the only copy, or all workers have left.
        """
        self.note(who, f"succeeds {ledger}")
        self.sites["server followed"] += 1
        for worker, (number, _, _, at_s) in self._replies.items():
            others = [at for (rank, _), at in self.lost.items() if rank != who[0]]
            excused = any(time_s >= at_s - 0.5 for time_s in [*others, self._alone_s])
            self.state_lost = self.state_lost or (excused and ledger[worker] < number)
            self.check(
                excused or self.state_lost or ledger[worker] >= number,
                "what was replied to outlives the server",
                f"{who} knows push {ledger[worker]} of rank {worker}, which got reply {number}",
            )

    # Batches -------------------------------------------------------------------------------------

    def drew(self, who: Who, batch: Batch) -> None:
        """A rank has drawn a batch: nobody has it who is here, and nobody has used it for good."""
        self.note(who, f"drew {batch}")
        if self.was_lost(who):  # an old reply: this rank does not know yet that it is lost
            return
        holder = self._holders.get(batch)
        if holder is not None:
            self.sites["batch given again"] += 1
            self.check(self.was_lost(holder), "batches", f"{who} drew {batch}, which {holder} has")
        self._holders[batch] = who

    def used(self, who: Who, batch: Batch) -> None:
        """A rank has used a batch."""
        self.note(who, f"used {batch}")
        self._used[batch].append(who)

    def _check_batches(self, given: int, returned: Iterable[Batch]) -> None:
        back = {*returned}
        for batch in range(given):
            users = self._used[batch]
            stayed = [who for who in users if who in self.left and who not in self.lost]
            self.check(len(stayed) <= 1, "batches", f"{batch} was used by {stayed}")
            self.check(
                bool(users) or batch in back, "batches", f"{batch} was neither used nor taken back"
            )
            self.check(
                not stayed or batch not in back,
                "batches",
                f"{batch} was taken back, but {stayed} have used it",
            )

    # Rendezvous ----------------------------------------------------------------------------------

    def came(self, who: Who, number: int) -> None:
        """A rank comes to a rendezvous."""
        self.note(who, f"comes to {number}")
        self._came[number].add(who)
        for (src, dst, _), count in self._sent.items():
            if src == who:
                self._sent_before[number, src, dst] += count

    def met(self, who: Who, number: int, outcome: bool, members: Iterable[Who]) -> None:
        """A rendezvous has one outcome; it is held only if all have come."""
        self.note(who, f"met {number} {outcome}")
        self.sites["met" if outcome else "not met"] += 1
        first = self._outcomes.setdefault(number, outcome)
        self.check(
            first == outcome, "rendezvous", f"{who}: {outcome} at {number}, another has {first}"
        )
        absent = {*members} - self._came[number]
        self.check(
            not (outcome and absent), "rendezvous", f"{number} was held without {sorted(absent)}"
        )

    def arrived(self, who: Who, number: int, waiting: Counter[Who]) -> None:
        """At a rendezvous that is held, all that its members have sent this one has arrived."""
        for src in sorted(self._came[number]):
            sent = self._sent_before[number, src, who]
            taken = (count for (s, dst, _), count in self._taken.items() if (s, dst) == (src, who))
            got = sum(taken) + waiting[src]
            self.check(got >= sent, "rendezvous", f"{who} has {got} of {sent} messages of {src}")

    # The end -------------------------------------------------------------------------------------

    def ended(self, given: int, returned: Iterable[Batch]) -> None:
        """The run is over: the registrar has given out so many batches, and has these back."""
        self._check_batches(given, returned)
