"""Who trains on what: groups to ranks at equal token cost, then to the fewest microbatches that fit, as pure functions.

Every rank holds every rollout's lengths, so every rank computes the whole plan and takes its own part of it.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from r1.types import Rollout

BALANCE = 1.03
"""The heaviest rank may have this times the mean."""
PARTNERS = 4
"""Light ranks that the heaviest one looks at for a trade."""


@dataclass(kw_only=True, slots=True)
class Piece:
    """Rollouts of one group that are packed together behind one copy of their prompt."""

    rollouts: list[Rollout]
    masked: bool = False  # only keeps this rank in step with the others; trains on nothing

    @property
    def tokens(self) -> int:
        """Packed tokens: the prompt once, and each response but its last token, which predicts nothing."""
        return len(self.rollouts[0].prompt_ids) + sum(len(r.response_ids) - 1 for r in self.rollouts)

    def halves(self) -> tuple["Piece", "Piece"]:
        """Two pieces of about equal tokens; the prompt is then computed twice."""
        order = sorted(self.rollouts, key=lambda r: (-len(r.response_ids), r.sample))
        return (Piece(rollouts=sorted(order[::2], key=lambda r: r.sample)),
                Piece(rollouts=sorted(order[1::2], key=lambda r: r.sample)))  # fmt: skip


def split_to(pieces: Sequence[Piece], limit: float) -> list[Piece]:
    """Halve pieces until each has at most limit tokens or one rollout."""
    done, queue = [], list(pieces)
    while queue:
        piece = queue.pop(0)
        if piece.tokens > limit and len(piece.rollouts) > 1:
            queue[:0] = piece.halves()
        else:
            done.append(piece)
    return done


def assign(pieces: Sequence[Piece], homes: Sequence[int], num_ranks: int) -> list[list[Piece]]:
    """Pieces of each rank, with the heaviest rank within BALANCE of the mean where the sizes allow.

    A piece starts on its home, the rank that sampled it and holds its prompt's pictures, and moves only to even out
    the load: the heaviest rank gives one to a light rank, or changes one for a smaller, each time what levels the two
    best. Where no whole piece does, one response of a piece moves, and its prompt is computed twice.
    """
    ranks = [_Load() for _ in range(num_ranks)]
    for piece, home in zip(pieces, homes, strict=True):
        ranks[home].add(piece.tokens, piece)
    while True:
        heavy = max(ranks, key=lambda r: r.tokens)
        if heavy.tokens <= BALANCE * sum(r.tokens for r in ranks) / num_ranks:
            break
        lights = heapq.nsmallest(PARTNERS, ranks, key=lambda r: r.tokens)
        if not (_trade(heavy, lights) or _split(heavy, lights)):
            break
    return [[piece for _, piece in rank.pieces] for rank in ranks]


@dataclass(kw_only=True, slots=True)
class _Load:
    """What a rank has, with its tokens beside each piece: they are looked at many times."""

    tokens: int = 0
    pieces: list[tuple[int, Piece]] = field(default_factory=list)

    def add(self, tokens: int, piece: Piece) -> None:
        self.pieces.append((tokens, piece))
        self.tokens += tokens

    def take(self, place: int) -> tuple[int, Piece]:
        tokens, piece = self.pieces.pop(place)
        self.tokens -= tokens
        return tokens, piece


def _trade(heavy: _Load, lights: Sequence[_Load]) -> bool:
    """Have heavy give a piece to one of lights, for a smaller one or none; False where that levels too little."""
    best: tuple[float, _Load, int, int | None] | None = None
    for light in lights:
        gap = heavy.tokens - light.tokens
        returns = [(0, None), *((tokens, j) for j, (tokens, _) in enumerate(light.pieces))]
        for i, (given, _) in enumerate(heavy.pieces):
            for back, j in returns:
                moved = given - back
                fuller = heavy.tokens - min(moved, gap - moved)  # of the two, afterwards
                if 10 * min(moved, gap - moved) > gap and (best is None or fuller < best[0]):
                    best = fuller, light, i, j
    if best is None:
        return False
    _, light, i, j = best
    given = heavy.take(i)
    if j is not None:
        heavy.add(*light.take(j))
    light.add(*given)
    return True


def _split(heavy: _Load, lights: Sequence[_Load]) -> bool:
    """Move one response of heavy's pieces to one of lights, behind a prompt of its own; False where that is no use."""
    best: tuple[int, _Load, int, int] | None = None
    for light in lights:
        for i, (_, piece) in enumerate(heavy.pieces):
            for k, rollout in enumerate(piece.rollouts if len(piece.rollouts) > 1 else ()):
                tokens = len(rollout.response_ids) - 1
                fuller = max(heavy.tokens - tokens, light.tokens + len(rollout.prompt_ids) + tokens)
                if fuller < heavy.tokens and (best is None or fuller < best[0]):
                    best = fuller, light, i, k
    if best is None:
        return False
    _, light, i, k = best
    _, piece = heavy.take(i)
    rest = Piece(rollouts=piece.rollouts[:k] + piece.rollouts[k + 1 :])
    moved = Piece(rollouts=[piece.rollouts[k]])
    heavy.add(rest.tokens, rest)
    light.add(moved.tokens, moved)
    return True


def first_fit(pieces: Sequence[Piece], max_tokens: int) -> list[list[Piece]]:
    """Microbatches of at most max_tokens, by first-fit decreasing; a single rollout above it stands alone."""
    bins: list[list[Piece]] = []
    free: list[int] = []
    for piece in sorted(split_to(pieces, max_tokens), key=lambda p: (-p.tokens, p.rollouts[0].group)):
        slot = next((i for i, room in enumerate(free) if piece.tokens <= room), None)
        if slot is None:
            bins.append([])
            free.append(max_tokens)
            slot = len(bins) - 1
        bins[slot].append(piece)
        free[slot] -= piece.tokens
    return bins


def even_out(bins: list[list[Piece]], count: int, max_tokens: int) -> list[list[Piece]]:
    """The pieces in count bins of about equal tokens (longest first, each to the lightest); as given where one is full.

    A small microbatch costs a GPU nearly as much as a middling one: launches, and gathered and reduced weights.
    """
    pieces = [piece for members in bins for piece in members]
    if len(pieces) < count:
        return bins
    even: list[list[Piece]] = [[] for _ in range(count)]
    loads = [0] * count
    for piece in sorted(pieces, key=lambda p: (-p.tokens, p.rollouts[0].group, p.rollouts[0].sample)):
        slot = loads.index(min(loads))
        even[slot].append(piece)
        loads[slot] += piece.tokens
    return even if max(loads) <= max_tokens else bins


def level(bins: list[list[Piece]], count: int, spare: Rollout) -> list[list[Piece]]:
    """Exactly count microbatches, by splitting the largest; a masked copy of spare where nothing is left to split."""
    bins = list(bins)
    while len(bins) < count:
        largest = max(range(len(bins)), key=lambda i: sum(p.tokens for p in bins[i]), default=None)
        if largest is None or (len(bins[largest]) == 1 and len(bins[largest][0].rollouts) == 1):
            bins.append([Piece(rollouts=[spare], masked=True)])
        elif len(bins[largest]) == 1:
            one, two = bins[largest][0].halves()
            bins[largest : largest + 1] = [[one], [two]]
        else:
            bins[largest : largest + 1] = [bins[largest][::2], bins[largest][1::2]]
    return bins


def plan_minibatch(
    rollouts: Sequence[Rollout], homes: Sequence[int], num_ranks: int, max_tokens: int
) -> list[list[list[Piece]]]:
    """plan[rank][microbatch] is a list of pieces; every rank gets the same number of microbatches.

    Args:
        rollouts: of whole groups, in (group, sample) order; the same on every rank.
        homes: for each rollout, the rank that sampled it.
        max_tokens: packed tokens a microbatch may have.

    FSDP's collectives pair up because the counts are equal; they are the fewest that fit the fullest rank.
    """
    groups: dict[int, Piece] = {}
    home_of: dict[int, int] = {}
    for rollout, home in zip(rollouts, homes, strict=True):
        groups.setdefault(rollout.group, Piece(rollouts=[])).rollouts.append(rollout)
        home_of[rollout.group] = home
    mean = sum(p.tokens for p in groups.values()) / num_ranks
    pieces = split_to(list(groups.values()), min(max_tokens, mean))
    ranks = assign(pieces, [home_of[p.rollouts[0].group] for p in pieces], num_ranks)
    bins = [first_fit(rank, max_tokens) for rank in ranks]
    count = max(len(b) for b in bins)
    spare = min(rollouts, key=lambda r: (len(r.prompt_ids) + len(r.response_ids), r.group, r.sample))
    return [level(even_out(b, count, max_tokens), count, spare) for b in bins]
