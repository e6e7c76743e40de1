"""Defines `Section`, the base class of all sections of the configuration, and the number types of their keys."""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


def _takes_number(annotation: Any) -> bool:
    """Return whether a field's type is int, float, or one of them behind Annotated or `| None`."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) in (typing.Union, Annotated):
        return any(_takes_number(part) for part in typing.get_args(annotation))
    return annotation in (int, float)


class Section(BaseModel):
    """Base class of a section of the configuration, which refuses unknown keys and infinite numbers and is immutable.

    A section is declared beside the code that reads it, and is sent to the process of that code unchanged. The
    docstring under each key is its entry in the configuration reference.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise ValueError when a key that takes a number is given `true` or `false`. pydantic would read them as 1 and
        0."""
        if isinstance(value, bool) and _takes_number(cls.model_fields[info.field_name or ""].annotation):
            raise ValueError(f"got {str(value).lower()}, expected a number")
        return value
