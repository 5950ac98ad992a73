"""What structured output is asked for in the programs of this folder."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city; choices, so that a model this small can only be right."""

    city: Literal["Berlin", "Lisbon"]
    is_sunny: bool
