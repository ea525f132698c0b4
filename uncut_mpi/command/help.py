"""What a command line that asks for help raises."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn


class HelpRequested(Exception):
    """
    The command line asked for help or the version; carries the text, for one rank to print.

    Attributes
    ----------
    text : str
        The answer, ending in a newline.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def telling(text_of: Callable[[Any], str]) -> type[argparse.Action]:
    """Return what a flag does that asks for a text, of the parser."""

    class Telling(argparse.Action):
        def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> NoReturn:
            raise HelpRequested(text_of(parser))

    return Telling
