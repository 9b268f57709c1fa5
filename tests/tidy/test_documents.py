"""What the documents name exists."""

from __future__ import annotations

import re

import pytest

from tests.tidy.source import ROOT, tracked
from vllm_mooncake_ascend.cli.main import COMMANDS

README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
PAGES = tracked("*.md")
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page) -> None:
    """Every relative link of a page is a file of the repository."""
    targets = LINK.findall(page.read_text())
    assert [] == [target for target in targets if not (page.parent / target).exists()]


def test_every_command_is_in_the_readme() -> None:
    """The README's table of commands is the list of commands."""
    table = re.findall(r"^\| `(\w+)", README.partition("## Commands")[2].partition("##")[0], re.MULTILINE)
    assert list(COMMANDS) == table


def test_make_targets_that_pages_name_exist() -> None:
    """Every `make x` in a page is a target of the Makefile with its line of help."""
    named = {target for page in PAGES for target in re.findall(r"\bmake ([a-z]+)\b", page.read_text()) if target in words()}
    targets = set(re.findall(r"^([a-z]+):.*## ", MAKEFILE, re.MULTILINE))
    assert set() == named - targets


def words() -> set[str]:
    """Words that follow `make` as a command, not as English: those in backquotes or at the start of a line."""
    texts = [page.read_text() for page in PAGES]
    return {word for text in texts for word in re.findall(r"(?:^|`|\$ )make ([a-z]+)", text, re.MULTILINE)}


def test_no_session_is_left_to_fill_in() -> None:
    """The README shows real output in every place meant for it."""
    assert [] == re.findall(r"^<!-- .* -->$", README, re.MULTILINE)
