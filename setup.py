"""Build the package: everything but its description is in setup.cfg."""

import configparser
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)]+)\)")


def described() -> str:
    """Return the README for a package index, which has no files beside it.

    A relative link leads to this version in the repository, which ``project_urls`` of setup.cfg names as ``Source``.
    Where nothing is named, its words are left, and of a picture nothing.
    """
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    urls = settings.get("metadata", "project_urls", fallback="")
    [version] = re.findall(r'__version__ = "(.+)"', (ROOT / "mpicomp" / "_version.py").read_text())
    source = re.search(r"^\s*Source\s*=\s*(\S+?)/?$", urls, re.MULTILINE)

    def absolute(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if source is None:
            return "" if picture else words
        return f"{picture}[{words}]({source[1]}/{'raw' if picture else 'blob'}/v{version}/{target})"

    return LINK.sub(absolute, (ROOT / "README.md").read_text())


setup(long_description=described(), long_description_content_type="text/markdown")
