"""Values that are copied and unpickled as they are made."""

from __future__ import annotations

import dataclasses
from typing import Any


class Remade:
    """A dataclass that is copied and unpickled by its constructor, which makes its arrays read-only there too."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]
