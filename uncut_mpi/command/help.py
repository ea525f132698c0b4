"""What a command line that asks for help raises."""

from __future__ import annotations


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
