"""Which sequence holds which KV pages, and which pages hold prefixes that sequences can share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

SIZE = 64
"""Tokens of a page: the keys that a block of the compiled attention meets at once."""

Beginning = tuple[int, tuple[int, ...]]


class Pages:
    """Pages of `SIZE` tokens, taken by sequences and given back; full pages are found again by their tokens.

    A page that no sequence holds keeps its tokens until another sequence needs it; the page that was given back first
    is reused first.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.reset()

    def reset(self) -> None:
        """Free all pages and forget their tokens, whatever an interrupt has left."""
        self._free = list(range(self.count - 1, -1, -1))
        self._holders = [0] * self.count
        self._idle: OrderedDict[int, None] = OrderedDict()  # known pages without a holder, oldest first
        self._known: dict[Beginning, int] = {}
        self._names: dict[int, tuple[int, Beginning]] = {}  # page -> its own number and its key in `_known`
        self._named = 0

    @property
    def free(self) -> int:
        """The number of pages that a sequence can take."""
        return len(self._free) + len(self._idle)

    def take(self, tokens: Sequence[int], length: int) -> tuple[list[int], int] | None:
        """Pages for a sequence of at most `length` tokens that begins with `tokens`.

        Returns:
            (pages in order, how many of the tokens they already hold: at most all but one), or None without room.
        """
        shared = self._shared(tokens)
        new = pages_of(length) - len(shared)
        if new > self.free - sum(page in self._idle for page in shared):
            return None
        for page in shared:
            self._idle.pop(page, None)
        pages = shared + [self._unused() for _ in range(new)]
        for page in pages:
            self._holders[page] += 1
        return pages, len(shared) * SIZE

    def is_being_prefilled(self, tokens: Sequence[int], others: Iterable[Sequence[int]]) -> bool:
        """Whether others are now computing the first page of the sequence that is not known yet."""
        end = (len(self._shared(tokens)) + 1) * SIZE
        return end < len(tokens) and any(end < len(other) and other[:end] == tokens[:end] for other in others)

    def grow(self, pages: list[int], length: int) -> bool:
        """Append the pages that a sequence of `length` tokens still needs; without room, none, and return False."""
        new = pages_of(length) - len(pages)
        if new > self.free:
            return False
        for _ in range(new):
            pages.append(self._unused())
            self._holders[pages[-1]] += 1
        return True

    def filled(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Mark the full pages of `tokens`, now computed, as shareable."""
        parent = 0
        for index, start in enumerate(range(0, len(tokens) - SIZE + 1, SIZE)):
            name = (parent, tuple(tokens[start : start + SIZE]))
            page = self._known.setdefault(name, pages[index])
            if page == pages[index]:
                number, earlier = self._names.get(page, (0, name))
                if earlier != name:  # the page before it, another sequence's, has been reused since
                    del self._known[earlier]
                if not number:
                    number = self._named = self._named + 1
                self._names[page] = (number, name)
            parent = self._names[page][0]

    def release(self, pages: Sequence[int]) -> None:
        """Give back the pages of a sequence that has ended."""
        for page in reversed(pages):  # so that the end of a prefix is reused before its beginning
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._names:
                self._idle[page] = None
            else:
                self._free.append(page)

    def forget(self) -> None:
        """Forget what the pages hold, since the model now computes something else."""
        self._free += self._idle
        self._idle.clear()
        self._known.clear()
        self._names.clear()

    def _shared(self, tokens: Sequence[int]) -> list[int]:
        """The known pages with which a sequence begins; they leave out at least its last token."""
        shared: list[int] = []
        parent = 0
        for start in range(0, len(tokens) - SIZE, SIZE):
            page = self._known.get((parent, tuple(tokens[start : start + SIZE])))
            if page is None:
                break
            shared.append(page)
            parent = self._names[page][0]
        return shared

    def _unused(self) -> int:
        if self._free:
            return self._free.pop()
        page, _ = self._idle.popitem(last=False)
        del self._known[self._names.pop(page)[1]]
        return page


def pages_of(tokens: int) -> int:
    """The number of pages that so many tokens need."""
    return -(-tokens // SIZE)
