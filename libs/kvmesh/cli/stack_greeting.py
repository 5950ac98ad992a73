"""The lines that `kvmesh up` prints when its stack is ready.

Tests: tests/unit/cli/test_stack_greeting.py.
"""

from __future__ import annotations

import json

from kvmesh.cli.stack import StackPaths, StackPlan

API_KEY = "KVMESH_API_KEY"
"""Environment variable from which commands and the SDK read the API key."""


def greeting(plan: StackPlan, paths: StackPaths, *, has_keys: bool) -> list[str]:
    """Returns the lines: the URL, an example request, console, logs, and how to stop.

    Args:
        has_keys: whether the gateway requires an API key.
    """
    url = f"http://{plan.http}"
    body: dict[str, object] = {"model": plan.model_name}
    if plan.has_chat:
        path = "chat/completions"
        question = "What does os.path.join do?"
        body |= {"messages": [{"role": "user", "content": question}], "temperature": 0}
    else:
        path = "completions"
        body["prompt"] = "The module"
    body |= {"max_tokens": 80, "stream": True}
    curl = f"curl -N {url}/v1/{path} -H 'content-type: application/json'"
    hints = []
    if not plan.has_chat:
        hints.append(
            "chats are refused: the model has no chat template; put its chat_template.jinja into "
            "the model folder"
        )
    if has_keys:
        curl += f' -H "authorization: Bearer ${API_KEY}"'
        hints.append(f"key: export {API_KEY}=one of yours first; kvmesh chat and bench read it too")
    return [
        "",
        f"ready: {url}  (OpenAI API; gRPC {plan.grpc})",
        "",
        f"  {curl} -d '{json.dumps(body)}'",
        "",
        *hints,
        *([f"console: http://{plan.console}/console"] if plan.console else []),
        f"logs: {paths.logs}/<process>.log",
        "stop: Ctrl-C",
    ]
