"""What stands in an HTML page, as a parser of the standard library reads it."""

from __future__ import annotations

from html.parser import HTMLParser

ESCAPED = {"lt", "gt", "amp", "#34", "#39"}  # all entities that our pages need


class Tree(HTMLParser):
    """Every element with the names of its attributes, in order, and what else is no text, as written."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=False)
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.entities: set[str] = set()
        self.other: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, tuple(sorted(name for name, _ in attrs))))

    def handle_entityref(self, name):
        self.entities.add(name)

    def handle_charref(self, name):
        self.entities.add(f"#{name}")

    def handle_comment(self, data):
        self.other.append(data)

    def handle_pi(self, data):
        self.other.append(data)

    unknown_decl = handle_comment
