"""DSPy's modules."""

from __future__ import annotations

from typing import Any, Literal

import dspy

from scripts.clients.cases import CITIES, QUESTION, Target, run_cases


class SchemaLM(dspy.LM):
    """A model that is not in DSPy's catalog, which has to be told what it can do."""

    supports_response_schema = True

    @property
    def supported_params(self) -> set[str]:
        return {*super().supported_params, "response_format"}


def _lm(target: Target, kind: str = "chat") -> Any:
    provider = "text-completion-openai" if kind == "text" else "openai"
    return SchemaLM(
        f"{provider}/{target.model}",
        api_base=target.url,
        api_key="any",
        model_type=kind,
        max_tokens=200,
        cache=False,
        num_retries=0,
    )


def chat_responses_and_text(target: Target) -> None:
    for kind in ("chat", "responses", "text"):
        assert _lm(target, kind)(QUESTION)[0]


def a_signature_by_schema(target: Target) -> None:
    class Ask(dspy.Signature):
        """Where is the sun?"""

        question: str = dspy.InputField()
        city: Literal["Berlin", "Lisbon"] = dspy.OutputField()

    with dspy.context(lm=_lm(target), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Ask)(question=QUESTION).city in CITIES


if __name__ == "__main__":
    run_cases([chat_responses_and_text, a_signature_by_schema])
