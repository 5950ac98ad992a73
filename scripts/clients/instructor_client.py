"""Modes of Instructor.

Only those that leave nothing to a small model.
"""

from __future__ import annotations

from collections.abc import Callable

import instructor
import openai

from scripts.clients.cases import CITIES, QUESTION, Target, run_cases
from scripts.clients.weather import Weather


def _mode(mode: instructor.Mode) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        plain = openai.OpenAI(base_url=target.url, api_key="any")
        client = instructor.from_openai(plain, mode=mode)
        told = client.chat.completions.create(
            model=target.model,
            messages=[{"role": "user", "content": QUESTION}],
            response_model=Weather,
            max_retries=0,
        )
        assert told.city in CITIES

    run.__name__ = f"mode_{mode.name}"
    return run


if __name__ == "__main__":
    modes = (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT)
    run_cases([_mode(mode) for mode in modes])
