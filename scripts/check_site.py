"""Check a built documentation site: every local link has its target, and nothing is loaded from elsewhere.

``python scripts/check_site.py build/docs``; standard library only.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: What a browser loads by itself: tag -> attribute. A link that a reader may follow is none of these.
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """Ids, links and loaded addresses of one page."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loaded = set(), [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids.update(filter(None, (found.get("id"), found.get("name"))))
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        # <link rel=canonical> and the like name an address without loading it.
        names_only = tag == "link" and found.get("rel") not in ("stylesheet", "icon", "preload")
        if LOADED.get(tag) in found and not names_only:
            self.loaded.append(found[LOADED[tag]])


def faults(root):
    """One line for each broken link and each address that is loaded from elsewhere."""
    pages = {path: Page(path) for path in sorted(root.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(root)
        for address in page.links + page.loaded:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if address in page.loaded and parts.scheme != "data":
                    found.append(f"{name}: loads {address}")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                found.append(f"{name}: no file for {address}")
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].ids
            ):
                found.append(f"{name}: no place for {address}")
    for style in root.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        found += [
            f"{style.relative_to(root)}: loads from elsewhere"
            for word in ("url(http", "url(//", "@import")
            if word in text.replace('"', "").replace("'", "")
        ]
    if not pages:
        found.append(f"{root} has no page")
    return found


if __name__ == "__main__":
    said = faults(Path(sys.argv[1]).resolve())
    print(
        "\n".join(said) or "docs: every local link has its target, nothing is loaded from elsewhere"
    )
    sys.exit(bool(said))
