"""The model card and data licence note that accompany the embedded model."""

from __future__ import annotations

from typing import Any

SAMPLE_QUESTIONS = [
    "What does os.path.join do?",
    "Explain json.dumps",
    "How do I use itertools.groupby?",
    "What is the with statement?",
    "What does len do?",
    "What is the collections module?",
    "What does shutil.copytree do?",
    "Explain functools.lru_cache.",
    "Who are you?",
    "hello",
]

LICENSE_DATA = """\
The text that this model was trained on is part of CPython: the docstrings of its standard library
and the help topics in its pydoc_data package. It is

    Copyright (c) 2001 Python Software Foundation; All Rights Reserved

and licensed under the PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2 (PSF License Version 2), whose
full text is at https://docs.python.org/3/license.html and in the LICENSE file of every CPython
distribution. The changes made to it: docstrings were shortened to their first paragraphs, put into
question and answer form, and split into tokens. A few questions and answers about the model itself
and a few short descriptions of Python names were written for this model.

The tokenizer's vocabulary and the model's weights derive from that text and can reproduce parts of
it word for word. Keep this notice when you pass them on.
"""

_CARD = """\
---
library_name: transformers
license: other
license_name: psf-2.0
license_link: LICENSE-DATA
language: en
pipeline_tag: text-generation
---

# {name}

A Llama-architecture language model of {parameters:,} parameters ({size:,} bytes in bfloat16) that
answers short questions about Python's standard library. It exists so that a language-model server
can be tried, tested and demonstrated with a real model: offline, on any CPU, in a few seconds.

## What it is not

It is not an assistant to rely on. It has read about two megabytes of text and mostly recites it.
It knows no other subject, does not write programs, mixes up names that it saw rarely, and invents
descriptions of names that do not exist. Its positions reach 8192 tokens on paper, but it was
trained on rows of {seq} tokens, some of {long_seq}; longer input runs, yet its quality is unknown.
Use it to check that a server gives the right tokens, not to learn Python.

## Data and licence

* The docstrings of CPython {python}'s standard library, read from its sources, and those of a few
  of its modules written in C.
* The language-reference topics in `pydoc_data.topics`.
* Question and answer pairs made of them ({answers:,} answers, asked in many ways); some greetings,
  questions about the model and clearer answers were written for it.

Together {texts:,} texts of {characters:,} characters. All of it comes with CPython under the
**PSF License Version 2**; see `LICENSE-DATA`.

## Format

| | |
|---|---|
| Architecture | `LlamaForCausalLM`, {layers} layers, hidden size {hidden} |
| Attention | {heads} heads and {kv_heads} key-value heads of 32, rotary positions |
| Tokenizer | byte-level BPE, {vocab} tokens, special tokens included |
| Chat | roles system, user and assistant, `chat_template.jinja` |
| End of turn | `<\\|im_end\\|>`; end of document: `<\\|endoftext\\|>` |

## Training

| Measured | |
|---|---|
| Steps | {steps:,} |
| Tokens | {tokens:,} |
| Training loss at the end (chats and documents, running mean) | {loss:.3f} nats per token |
| Loss on {held:,} held-out raw documents | {held_out:.3f} nats per token |
| Time | {minutes:.1f} minutes in {parts}; {speed:,.0f} tokens per second |
| Machine | {threads} threads of a shared {machine} CPU, bfloat16 autocast |
| Versions | Python {python}, {versions} |

The training loss is low because the same documents come by many times: the model is meant to
remember them. The held-out loss is what it makes of raw documentation that it has not seen in that
form (the question and answer pairs cover some of the same names).

## Repeat it

    pip install {requirements}
    python -m models.train_pydoc {command} --out models/{name}

The same seed and Python version give the same data and tokenizer. The schedule follows the clock,
so the number of steps, and with it the weights, depends on the machine.
On a machine busy with other work, set `OMP_WAIT_POLICY=passive`: threads that spin while they wait
for each other lose most of their time there.

## Sample answers

Greedy decoding, exactly as the exported folder gave them, at most 120 new tokens.
Not every answer is right: names that differ by a letter, such as json.dump and json.dumps, get
mixed up.

{samples}
"""


def model_card(name: str, numbers: dict[str, Any], samples: list[tuple[str, str]]) -> str:
    """Returns the model card's Markdown, filled with the run's measured numbers and answers.

    Args:
        name: The folder's name.
        numbers: What the training run measured, and the sizes it ran with.
        samples: Questions and the answers that the exported model gave.
    """
    blocks = []
    for question, answer in samples:
        quoted = "\n".join(f"    {line}".rstrip() for line in answer.splitlines() or ["(nothing)"])
        blocks.append(f"**{question}**\n\n{quoted}")
    versions: dict[str, str] = numbers["versions"]
    # A local build tag such as +cpu is in no package index under that exact name.
    pins = " ".join(f"{package}=={v.partition('+')[0]}" for package, v in versions.items())
    return _CARD.format(
        **{k: v for k, v in numbers.items() if k != "versions"},
        name=name,
        speed=numbers["tokens"] / max(1e-9, numbers["minutes"] * 60),
        versions=", ".join(f"{package} {v}" for package, v in versions.items()),
        requirements=pins,
        samples="\n\n".join(blocks),
    )
