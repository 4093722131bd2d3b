"""What every section of an experiment is made of: types of numbers, and the checks."""

from collections.abc import Iterator
from functools import reduce
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from segtrain.config.messages import show

# torch counts in 64 bits.
Positive = Annotated[int, Field(gt=0, lt=2**63)]
NonNegative = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionBelow1 = Annotated[float, Field(ge=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
# Beyond these the arithmetic of sizes overflows, long after the memory of any machine.
Pixels = Annotated[int, Field(gt=0, le=100_000)]
Scale = Annotated[float, Field(gt=0, le=100)]
Size = tuple[Pixels, Pixels]
Positives = Annotated[tuple[Positive, ...], Field(min_length=1)]


class Section(BaseModel):
    """Unknown keys, wrong types, infinities and later changes are all refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if mistakes := list(self._mistakes()):
            raise ValueError("\n".join(mistakes))
        return self

    def _mistakes(self) -> Iterator[str]:
        """A line `key: message` for each option that does not fit the others."""
        yield from ()

    def _no_effect(self, *rules: tuple[str, bool, str]) -> Iterator[str]:
        """A mistake for each option that has no effect although it differs from its default.

        rules: keys, separated by blanks; whether they have an effect; what takes it from them.
        """
        for keys, effective, reason in rules:
            for key in "" if effective else keys.split():
                *parts, name = key.split(".")
                section = reduce(getattr, parts, self)
                default = type(section).model_fields[name].default
                if getattr(section, name) != default:
                    repair = f"remove it, or set it to its default, {show(default)}"
                    yield f"{key}: has no effect with {reason}; {repair}"


def option(default: Any, description: str, **limits: Any) -> Any:
    """An option of a section; `...` as default: it is required."""
    return Field(default, description=description, **limits)
