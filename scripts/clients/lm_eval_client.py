"""EleutherAI's evaluation harness: choices by the log-probabilities of prompts, and free text."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from scripts.clients.cases import Target, run_cases

DOCUMENTS = [
    {"text": "os.path.join joins one or more path", "choices": [" segments", " elephants"]},
    {"text": "import os opens the", "choices": [" module", " banana"]},
    {"text": "Return the length of the", "choices": [" string", " dinosaur"]},
]


def _score(target: Target, chat: bool = False, **task: Any) -> dict[str, Any]:
    path = "chat/completions" if chat else "completions"
    kind = "local-chat-completions" if chat else "local-completions"
    arguments = f"model={target.model},base_url={target.url}/{path},num_concurrent=2,max_retries=1"
    if not chat:
        arguments += f",tokenizer={target.folder},tokenizer_backend=huggingface"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "documents.jsonl"
        file.write_text("".join(f"{json.dumps(each)}\n" for each in DOCUMENTS))
        told = simple_evaluate(
            model=kind,
            model_args=arguments,
            apply_chat_template=chat,
            # Without its own thousands of tasks, which take a minute to read.
            task_manager=TaskManager(include_defaults=False),
            tasks=[
                {
                    "task": "mesh",
                    "dataset_path": "json",
                    "dataset_kwargs": {
                        "data_files": {"test": str(file)},
                        "cache_dir": f"{folder}/cache",
                    },
                    "test_split": "test",
                    **task,
                }
            ],
        )
    assert told is not None
    samples: dict[str, Any] = told["samples"]["mesh"]
    assert len(samples) == len(DOCUMENTS)
    return told


def choices_by_log_probabilities(target: Target) -> None:
    told = _score(
        target,
        output_type="multiple_choice",
        doc_to_text="{{text}}",
        doc_to_target=0,
        doc_to_choice="{{choices}}",
        metric_list=[{"metric": "acc"}],
    )
    # The model was trained on such texts: it knows better than to expect a dinosaur.
    assert told["results"]["mesh"]["acc,none"] == 1.0, told["results"]


def perplexity_of_texts(target: Target) -> None:
    told = _score(
        target,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "word_perplexity"}],
    )
    found = told["results"]["mesh"]["word_perplexity,none"]
    assert math.isfinite(found), found
    assert found > 1, found


_FREE = {
    "output_type": "generate_until",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
    "metric_list": [{"metric": "exact_match"}],
}


def free_text(target: Target) -> None:
    _score(target, **_FREE)


def free_text_of_chats(target: Target) -> None:
    _score(target, chat=True, **_FREE)


if __name__ == "__main__":
    run_cases([choices_by_log_probabilities, perplexity_of_texts, free_text, free_text_of_chats])
