"""Flags of `kvmesh chat`, and the commands within a conversation.

Tests: tests/unit/cli/test_chat.py.
"""

from __future__ import annotations

import argparse

from kvmesh.cli.flags import add_flag, add_switch, count, new_parser, not_negative
from kvmesh.cli.https import add_ca_flag
from kvmesh.cli.stack_state import add_state_flag, add_url_flag

LINE_COMMANDS = """\
/undo     remove the last question and its answer
/reset    forget the conversation
/system   set the system message: /system You answer in one sentence.
/stats    show tokens and times of the last answer
/help     show this list
/exit     exit (as Ctrl-D does); Ctrl-C stops an answer
"""
_EPILOG = f"""\
On a terminal, it reads your lines until Ctrl-D, and Ctrl-C stops an answer. The model's reasoning
is shown dimmed, on a terminal only. From a pipe, each line is one question. With --prompt, it asks
one question and exits. If a gateway dies during an answer, the answer continues at the gateway that
responds first. Lines that begin with a slash are commands:

{LINE_COMMANDS}
examples:
  kvmesh chat
  kvmesh chat --prompt 'What does os.path.join do?' --temperature 0
  kvmesh chat --url http://gateway:8000 --system 'Be brief.' < questions.txt

exit code: 0; 1 if an answer failed (on a terminal: only if no server was found); 2 wrong usage;
130 if Ctrl-C stopped the answer to --prompt
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser with all flags."""
    made = new_parser(
        "kvmesh chat", "Chats with the model in the terminal and streams its answers.", _EPILOG
    )
    add_url_flag(made, several=True)
    add_ca_flag(made)
    add_state_flag(made)
    add_flag(made, "--model", "", "model name; default: the first served model")
    add_flag(made, "--system", "", "system message", metavar="TEXT")
    add_flag(made, "--prompt", "", "ask this one question and exit", metavar="TEXT")
    add_flag(made, "--temperature", 0.7, "sampling temperature; 0: greedy", kind=not_negative)
    add_flag(made, "--max-tokens", 512, "maximum tokens of an answer", kind=count)
    add_flag(
        made,
        "--api-key",
        "",
        "bearer key; prefer the environment variable, since others can see command lines",
    )
    add_switch(made, "--json", "print one JSON object per completed answer")
    return made
