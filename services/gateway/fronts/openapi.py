"""The OpenAPI page of the HTTP API, generated from the pydantic models of the bodies.

Pure. Tests: tests/unit/gateway/fronts/test_openapi.py.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway.api.adapters import LoadBody, UnloadBody
from services.gateway.api.anthropic_api import CountBody, MessagesBody
from services.gateway.api.embeddings import EmbeddingBody
from services.gateway.api.responses_api import ResponsesBody
from services.gateway.api.schema import ChatBody, CompletionBody
from services.gateway.api.token_routes import DetokenizeBody, TokenizeBody

BODIES: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/chat/completions": (ChatBody, "Answers a chat."),
    "/v1/completions": (CompletionBody, "Goes on from prompts."),
    "/v1/responses": (ResponsesBody, "Answers an input; nothing is stored."),
    "/v1/messages": (MessagesBody, "Answers a chat in Anthropic's form."),
    "/v1/messages/count_tokens": (CountBody, "Counts the tokens of such a chat."),
    "/v1/embeddings": (EmbeddingBody, "Embeddings of prompts."),
    "/tokenize": (TokenizeBody, "Token ids of a text or a chat."),
    "/detokenize": (DetokenizeBody, "Text of token ids."),
}
"""POST routes: the model of their body, and their description."""

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

ADAPTER_BODIES: dict[str, tuple[type[BaseModel], str]] = {
    LOAD: (LoadBody, "Loads a LoRA adapter on the workers of a model."),
    UNLOAD: (UnloadBody, "Removes a LoRA adapter."),
}
"""The same, of routes that `http.adapter_changes` opens; their answer is a text."""

PLAIN: dict[str, str] = {
    "/v1/models": "The models that are served.",
    "/tokenizer_info": "Special tokens, chat template and settings of the tokenizer.",
    "/health": "The process lives.",
    "/ready": "Whether requests can be served now.",
    "/version": "Version of the gateway.",
    "/openapi.json": "This page.",
}
"""GET routes that answer with JSON."""

_STREAMS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})

_FAILURES = {
    "400": "A field is wrong; `error.param` names it.",
    "401": "The API key is missing or not accepted.",
    "404": "The model is not served here.",
    "413": "The body is too long.",
    "415": "The body has a Content-Encoding.",
    "429": "The caller's quota is used up; see Retry-After.",
    "502": "The work was lost again and again.",
    "503": "Nobody took the request in time, or the gateway drains; see Retry-After.",
    "504": "The request ran too long.",
}

_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_OBJECT = {"application/json": {"schema": {"type": "object"}}}
_TEXT = {"text/plain": {"schema": {"type": "string"}}}


def openapi_page(version: str, *, adapter_changes: bool = False) -> dict[str, Any]:
    """The page as OpenAPI 3.1.

    Args:
        version: version of the gateway.
        adapter_changes: whether the routes that load and remove adapters are open.
    """
    bodies = {**BODIES, **(ADAPTER_BODIES if adapter_changes else {})}
    models = [(model, "validation") for model, _ in bodies.values()]
    _, definitions = models_json_schema(
        models,  # type: ignore[arg-type]
        ref_template="#/components/schemas/{model}",
    )
    schemas = {**definitions.get("$defs", {}), "Error": _ERROR}
    return {
        "openapi": "3.1.0",
        "info": {"title": "KVMesh", "version": version},
        "paths": {
            **{path: {"post": _post(path, *body)} for path, body in bodies.items()},
            **{path: {"get": _get(text, path)} for path, text in PLAIN.items()},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _post(path: str, model: type[BaseModel], summary: str) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    content: dict[str, Any] = dict(_TEXT if path in ADAPTER_BODIES else _OBJECT)
    if path in _STREAMS:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "operationId": path.strip("/").replace("/", "_"),
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
        "responses": {
            "200": {"description": "Done.", "content": content},
            **{status: _failure(text) for status, text in _FAILURES.items()},
        },
    }


def _get(summary: str, path: str) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": _OBJECT}}
    if path in ("/v1/models", "/tokenizer_info"):
        responses["401"] = _failure(_FAILURES["401"])
    if path == "/ready":
        responses["503"] = _failure("Not now.")
    return {
        "operationId": path.strip("/").replace("/", "_").replace(".", "_"),
        "summary": summary,
        "responses": responses,
    }


def _failure(text: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}
