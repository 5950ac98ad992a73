"""LLM, the command line's library, with a model of its extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from scripts.clients.cases import CITIES, QUESTION, Target, run_cases
from scripts.clients.weather import Weather


def _model(target: Target) -> object:
    folder = Path(tempfile.mkdtemp())
    told = [
        {
            "model_id": "mesh",
            "model_name": target.model,
            "api_base": target.url,
            "supports_schema": True,
            "supports_tools": True,
        }
    ]
    (folder / "extra-openai-models.yaml").write_text(json.dumps(told))  # JSON is YAML
    os.environ["LLM_USER_PATH"] = str(folder)  # noqa: TID251 it is configured so
    import llm

    return llm.get_model("mesh")


def chat(target: Target) -> None:
    model = _model(target)
    assert model.prompt(QUESTION, key="any", max_tokens=12, stream=False).text()
    assert "".join(model.prompt(QUESTION, key="any", max_tokens=12))


def structured_output(target: Target) -> None:
    answer = _model(target).prompt(QUESTION, key="any", schema=Weather, stream=False)
    assert json.loads(answer.text())["city"] in CITIES


def tools_that_may_be_called(target: Target) -> None:
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"{city}: sunny"

    conversation = _model(target).conversation()
    options = {"max_tokens": 12}
    assert conversation.chain(QUESTION, tools=[weather], key="any", options=options).text()


if __name__ == "__main__":
    run_cases([chat, structured_output, tools_that_may_be_called])
