"""Check the links of the built pages: ``python docs/links.py docs/_build``.

Links inside the site have to lead to a file, and to something of that name in it. Those to elsewhere are listed, and
not followed; ``sphinx-build -b linkcheck docs docs/_build/linkcheck`` follows them.
"""

import argparse
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The names that a page has, and the links that go out of it."""

    def __init__(self, text):
        super().__init__()
        self.names, self.links = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.names |= {found[key] for key in ("id", "name") if found.get(key)}
        self.links |= {found[key] for key in ("href", "src") if found.get(key)}


def check(site):
    """Return what is wrong with links inside a site, and the addresses of those to elsewhere."""
    pages = {path: _Page(path.read_text()) for path in sorted(Path(site).resolve().rglob("*.html"))}
    wrong, elsewhere = [], set()
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                elsewhere |= {link.partition("#")[0]} if parts.scheme in ("http", "https") else set()
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            name = unquote(parts.fragment)
            if not target.exists():
                wrong.append(f"{path.name}: {link}: there is no such file")
            elif name and target in pages and name not in pages[target].names:
                wrong.append(f"{path.name}: {link}: there is nothing of that name")
    return wrong, sorted(elsewhere)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Check the links of the built pages.")
    parser.add_argument("site", help="the folder of the pages: sphinx-build docs docs/_build makes docs/_build")
    arguments = parser.parse_args()
    if not any(Path(arguments.site).rglob("*.html")):
        parser.error(f"'{arguments.site}' has no page; build them with: sphinx-build docs docs/_build")
    wrong, elsewhere = check(arguments.site)
    print("\n".join([*wrong, "", "not followed:", *elsewhere]))
    sys.exit(bool(wrong))
