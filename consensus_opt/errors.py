"""Errors that only happen between ranks.

Bad arguments raise ``ValueError`` or ``TypeError`` where they are given. What is left are the two
things that a single process cannot know: that ranks disagree, and that a peer is gone.
"""

from __future__ import annotations


class EndOfDataError(RuntimeError):
    """Another worker has run out of data, and all stop: see ``ConsensusOptimizer.join``.

    Attributes:
        of: The rounds that stop.
    """

    def __init__(self, message: str, of: object = None) -> None:
        super().__init__(message)
        self.of = of


class RankMismatchError(RuntimeError):
    """Ranks were started with different parameters, methods or clocks."""


class PeerError(RuntimeError):
    """A peer died, or did not answer within the timeout.

    Attributes:
        ranks: The ranks that did not answer, as far as they are known.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
