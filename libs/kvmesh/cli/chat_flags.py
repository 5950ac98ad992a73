"""Flags of `kvmesh chat`, and the commands within a conversation.

Tests: tests/unit/cli/test_chat.py.
"""

from __future__ import annotations

import argparse

from kvmesh.cli.flags import add_flag, add_switch, count, new_parser, not_negative
from kvmesh.cli.https import add_ca_flag
from kvmesh.cli.stack_state import add_state_flag, add_url_flag

LINE_COMMANDS = """\
/undo     take the last question and its answer back
/reset    forget the conversation
/system   set the system message: /system You answer in one sentence.
/stats    tokens and times of the last answer
/help     this
/exit     leave (so does Ctrl-D); Ctrl-C stops an answer
"""
_EPILOG = f"""\
On a terminal it asks for your lines until Ctrl-D; Ctrl-C stops an answer; what a model thinks
before it answers is shown dimmed there, and only there. An answer whose gateway dies goes on at the
gateway that answers first. From a pipe it takes
one question per line. With --prompt it asks once. Lines that begin with a slash are commands:

{LINE_COMMANDS}
examples:
  kvmesh chat
  kvmesh chat --prompt 'What does os.path.join do?' --temperature 0
  kvmesh chat --url http://gateway:8000 --system 'Be brief.' < questions.txt

exit code: 0; 1 if an answer failed (on a terminal: only if no server was found); 2 wrong usage;
130 if Ctrl-C cut off the answer to --prompt
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser with all flags."""
    made = new_parser("kvmesh chat", "A conversation with the model, as it streams.", _EPILOG)
    add_url_flag(made, several=True)
    add_ca_flag(made)
    add_state_flag(made)
    add_flag(made, "--model", "", "name of the model; default: the first one served")
    add_flag(made, "--system", "", "system message", metavar="TEXT")
    add_flag(made, "--prompt", "", "ask this and leave", metavar="TEXT")
    add_flag(made, "--temperature", 0.7, "0 is greedy", kind=not_negative)
    add_flag(made, "--max-tokens", 512, "longest answer", kind=count)
    add_flag(made, "--api-key", "", "bearer key; better by environment than on the command line")
    add_switch(made, "--json", "print one JSON object per answer, when it is complete")
    return made
