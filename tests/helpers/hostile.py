"""Values that answer questions, and functions that answer calls, with an error of their own."""

from __future__ import annotations


class Hostile:
    """Is no number and has no text."""

    def _refuse(self, *unused: object) -> None:
        raise RuntimeError("no")

    __index__ = __float__ = __repr__ = __str__ = __iter__ = _refuse


class Closed(Hostile):
    """Raises whatever is asked of it."""

    __eq__ = __hash__ = __bool__ = __getattr__ = Hostile._refuse


def interrupt(*_: object, **__: object) -> None:
    """Is interrupted by the user when it is called."""
    raise KeyboardInterrupt
