"""`kvmesh chat`: a conversation with a running stack.

Tests: tests/unit/cli/test_chat.py, tests/e2e/test_chat_and_top.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, TextIO

import aiohttp

from kvmesh.cli.chat_api import Answer, ChatApi, ChatError, Conversation
from kvmesh.cli.chat_flags import LINE_COMMANDS, parser
from kvmesh.cli.https import trust
from kvmesh.cli.stack_state import gateway_urls

MAX_SILENCE_S = 120.0


def main(argv: Sequence[str]) -> int:
    """Answers until the input ends; returns exit code 1 if an answer failed."""
    arguments = parser().parse_args(argv)
    arguments.url = gateway_urls(arguments)
    try:
        with asyncio.Runner() as runner:
            return _run(arguments, runner)
    except ChatError as error:
        print(f"kvmesh chat: {error}", file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace, runner: asyncio.Runner) -> int:
    options = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    session = runner.run(_new_session(arguments.tls_ca))
    try:
        api = ChatApi(session, arguments.url, arguments.api_key, options)
        model = arguments.model or runner.run(api.first_model())
        is_terminal = sys.stdin.isatty() and not arguments.prompt
        if is_terminal:
            print(f"{model} at {', '.join(arguments.url)}; /help for commands, Ctrl-D to leave")
        chat = Chat(
            api,
            model,
            Conversation(arguments.system),
            as_json=arguments.json,
            goes_on=not arguments.prompt,
        )
        failed = chat.run(_questions(arguments.prompt, sys.stdin, is_terminal), runner)
        return 1 if failed and not is_terminal else 0
    finally:
        runner.run(session.close())


async def _new_session(ca: str) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=MAX_SILENCE_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust(ca)), timeout=timeout)


def _questions(prompt: str, stdin: TextIO, is_terminal: bool) -> Iterator[str]:
    """Returns the lines to answer."""
    if prompt:
        return iter([prompt])
    if not is_terminal:
        return iter(stdin)
    with contextlib.suppress(ImportError):  # line editing, where Python has it
        importlib.import_module("readline")
    return _typed()


def _typed() -> Iterator[str]:
    while True:
        try:
            yield input("\n> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


class Chat:
    """The loop of questions and answers.

    Args:
        goes_on: whether Ctrl-C ends only the answer, not the conversation.
    """

    def __init__(
        self,
        api: ChatApi,
        model: str,
        conversation: Conversation,
        *,
        as_json: bool,
        goes_on: bool = True,
    ) -> None:
        self._api = api
        self._model = model
        self._conversation = conversation
        self._as_json = as_json
        self._goes_on = goes_on
        self._last = Answer()
        self._failed = False

    def run(self, lines: Iterable[str], runner: asyncio.Runner) -> bool:
        """Answers line by line; returns whether any answer failed.

        Raises:
            KeyboardInterrupt: Ctrl-C during an answer that ends the conversation; a message says
                how much of the answer arrived.
        """
        for line in lines:
            text = line.strip()
            if text in ("/exit", "/quit"):
                break
            if text.startswith("/"):
                print(self.command(text))
            elif text:
                self._ask(text, runner)
        return self._failed

    def command(self, line: str) -> str:
        """Carries out a line that begins with a slash; returns what to print."""
        name, _, rest = line.partition(" ")
        match name:
            case "/undo":
                return "taken back" if self._conversation.undo() else "nothing to take back"
            case "/reset":
                self._conversation.reset()
                return "forgotten"
            case "/system":
                self._conversation.system = rest.strip()
                return "system message set" if rest.strip() else "no system message"
            case "/stats":
                return described(self._last)
            case "/help":
                return LINE_COMMANDS.rstrip()
            case _:
                return f"no command {name}; /help lists them"

    def _ask(self, text: str, runner: asyncio.Runner) -> None:
        self._conversation.ask(text)
        self._last = answer = Answer()
        try:
            runner.run(self._print(answer))
        except ChatError as error:
            self._failed = True
            self._conversation.undo()
            print(f"\nkvmesh chat: {error}", file=sys.stderr)
            return
        except KeyboardInterrupt:
            answer.finish_reason = "stopped"
            self._end(answer, " [stopped]" if self._goes_on else "")
            if not self._goes_on:
                print(f"kvmesh chat: {_what_was_cut(answer)}", file=sys.stderr)
                raise
        else:
            self._end(answer, "")
        self._conversation.answered(answer.text)

    def _end(self, answer: Answer, mark: str) -> None:
        """Ends the line of an answer, or prints the answer as JSON."""
        print(json.dumps(as_json(answer)) if self._as_json else mark, flush=True)

    async def _print(self, answer: Answer) -> None:
        async with aclosing(self._api.stream(self._model, self._conversation, answer)) as pieces:
            was_thinking = False
            async for thinking, text in pieces:
                if self._as_json:
                    continue
                if thinking and sys.stdout.isatty():  # a pipe gets only the answer
                    print(f"{_DIM}{thinking}{_PLAIN}", end="", flush=True)
                    was_thinking = True
                if text:
                    print(f"\n\n{text}" if was_thinking else text, end="", flush=True)
                    was_thinking = False


_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def _what_was_cut(answer: Answer) -> str:
    """Returns how much of a stopped answer has arrived."""
    if answer.text:
        return f"the answer is cut off after {len(answer.text)} characters"
    thinking = f"; it had thought {len(answer.thinking)} characters" if answer.thinking else ""
    return f"no word of the answer has come yet{thinking}"


def as_json(answer: Answer) -> dict[str, Any]:
    """Returns an answer as JSON values."""
    return {
        "content": answer.text,
        "reasoning": answer.thinking,
        "finish_reason": answer.finish_reason,
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "cached_tokens": answer.cached_tokens,
        },
        "ttft_ms": round(answer.ttft_s * 1000, 1),
        "elapsed_ms": round(answer.elapsed_s * 1000, 1),
        "worker": answer.worker,
    }


def described(answer: Answer) -> str:
    """Returns an answer's token counts and times as text."""
    if not answer.elapsed_s:
        return "no answer yet"
    after_first_s = answer.elapsed_s - answer.ttft_s
    speed = (answer.completion_tokens - 1) / after_first_s if after_first_s > 0 else 0.0
    return (
        f"prompt {answer.prompt_tokens} tokens ({answer.cached_tokens} cached), "
        f"answer {answer.completion_tokens} tokens, first token {answer.ttft_s * 1000:.0f} ms, "
        f"then {speed:.0f} tokens/s" + (f", on {answer.worker}" if answer.worker else "")
    )
