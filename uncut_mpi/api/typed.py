"""Overloads for type checkers alone: a program pays nothing for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import overload as overload
else:

    def overload(function: Any) -> Any:
        """Stand in for that of typing, which keeps each function, and so all modules that it knows, to the very end."""
        return function
