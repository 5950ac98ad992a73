"""Train the small embedded model: a Llama of about 6 M parameters on Python's own documentation.

Everything it learns from is on any machine with CPython: the docstrings of the standard library
(read from its sources with ``ast``), the docstrings of a few modules written in C, and the
language-reference topics in ``pydoc_data``. All of that text is under the PSF License Version 2.

    python -m models.train_pydoc --minutes 45 --out models/pydoc-6m

The learning-rate schedule follows elapsed time, so a run ends on time on any machine; the data and
the tokenizer depend on ``--seed`` and the Python version alone, the number of steps on the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from models.pydoc_card import LICENSE_DATA, SAMPLE_QUESTIONS, model_card
from models.pydoc_chat import CHAT_TEMPLATE, GENERAL_PAIRS, SYSTEM_PROMPTS, render_chat
from models.pydoc_text import Entry, ask, chat_entries, collect

DOC_END, IM_START, IM_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL_TOKENS = [DOC_END, IM_START, IM_END, PAD]
MAX_POSITIONS, ROPE_THETA = 8192, 10000.0
CONFIG_KEYS = [
    "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id", "head_dim", "hidden_act",
    "hidden_size", "initializer_range", "intermediate_size", "max_position_embeddings", "mlp_bias",
    "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id",
    "rms_norm_eps", "tie_word_embeddings", "use_cache", "vocab_size",
]  # fmt: skip


class Batches:
    """Endless packed batches of token ids, a mixture of raw documentation and chats."""

    def __init__(self, tokenizer: Tokenizer, entries: list[Entry], seed: int, raw: float) -> None:
        """Shuffles the entries; ``raw`` is the share of documents that are not chats."""
        self._rng = random.Random(seed)
        self._raw_share = raw
        self._tokenizer = tokenizer
        self._document_end: int = tokenizer.get_vocab()[DOC_END]
        documents = [f"{entry.name}\n\n{entry.text}" for entry in entries]
        self._rng.shuffle(documents)
        held = max(1, len(documents) // 50)
        self.held_out, documents = documents[:held], documents[held:]
        self._raw = self._cycle([e.ids for e in tokenizer.encode_batch(documents)])
        self._pairs = self._cycle(chat_entries(entries))

    def reseed(self, seed: int) -> None:
        """Draws other batches from here on; the held-out documents stay the same."""
        self._rng.seed(seed)

    def _cycle(self, items: list[Any]) -> Iterator[Any]:
        while True:
            yield from self._rng.sample(items, len(items))

    def _chat(self) -> str:
        rng = self._rng
        turns = rng.choice([1, 1, 1, 1, 2, 3])
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.3 else None
        messages = [{"role": "system", "content": system}] if system else []
        for _ in range(turns):
            if rng.random() < 0.06:
                questions, answer = rng.choice(GENERAL_PAIRS)
                question = rng.choice(questions)
            else:
                entry, answer = next(self._pairs)
                question = ask(entry, rng)
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        return render_chat(messages)

    def _document(self) -> list[int]:
        if self._rng.random() < self._raw_share:
            ids: list[int] = next(self._raw)
            # A long topic is cut at a random place, so that all of it is seen over the run.
            start = self._rng.randrange(max(1, len(ids) - 400))
            ids = ids[start : start + 400]
        else:
            ids = self._tokenizer.encode(self._chat()).ids
        return [*ids, self._document_end]

    def next(self, rows: int, length: int) -> torch.Tensor:
        """Returns a ``rows`` x ``length`` batch; every row starts at the start of a document."""
        batch = []
        for _ in range(rows):
            row: list[int] = []
            while len(row) < length:
                row += self._document()
            batch.append(row[:length])
        return torch.tensor(batch)


def train_tokenizer(entries: list[Entry], vocab_size: int, seed: int) -> Tokenizer:
    """Trains the byte-level BPE tokenizer on the documentation and on sample chats."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = random.Random(seed)
    chats = [f"{ask(entry, rng)}\n{answer}" for entry, answer in chat_entries(entries)]
    texts = [f"{entry.name}\n\n{entry.text}" for entry in entries]
    tokenizer.train_from_iterator(itertools.chain(texts, chats), trainer)
    return tokenizer


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> int:
    """Writes the folder that Hugging Face loaders read; returns the weight file's size."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    specials = {"bos_token": DOC_END, "eos_token": IM_END, "pad_token": PAD}
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    _write_json(out / "special_tokens_map.json", specials)
    _write_json(
        out / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_eos_token": False,
            "added_tokens_decoder": {
                str(number): {
                    "content": token, "lstrip": False, "normalized": False, "rstrip": False,
                    "single_word": False, "special": True,
                }
                for token, number in ids.items()
            },
            **specials,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_POSITIONS,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )  # fmt: skip
    tensor_names = [n for n in model.state_dict() if n != "lm_head.weight"]  # Tied, so left out.
    state = model.state_dict()
    tensors = {n: state[n].detach().to(torch.bfloat16).contiguous() for n in tensor_names}
    # Written aside and renamed, so that a reader of the folder never sees half a file.
    partial = out / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(out / "model.safetensors")
    config = {key: getattr(model.config, key) for key in CONFIG_KEYS}
    config.update(architectures=["LlamaForCausalLM"], dtype="bfloat16", rope_theta=ROPE_THETA)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": ROPE_THETA}
    config["transformers_version"] = version("transformers")
    _write_json(out / "config.json", config)
    _write_json(
        out / "generation_config.json",
        {
            "bos_token_id": ids[DOC_END],
            "eos_token_id": [ids[IM_END], ids[DOC_END]],
            "pad_token_id": ids[PAD],
        },
    )
    (out / "LICENSE-DATA").write_text(LICENSE_DATA, encoding="utf-8")
    return (out / "model.safetensors").stat().st_size


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def build_model(tokenizer: Tokenizer, args: argparse.Namespace) -> LlamaForCausalLM:
    """Returns the freshly initialised model."""
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 64,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(DOC_END),
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Returns the mean next-token loss of a batch, computed in bfloat16 where that is faster."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
    )


def train(
    model: LlamaForCausalLM, tokenizer: Tokenizer, batches: Batches, args: argparse.Namespace
) -> dict[str, Any]:
    """Trains until ``args.minutes`` have passed; returns the measured numbers of the run."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    step, tokens, before = 0, 0, 0.0
    if args.resume:
        saved = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, tokens, before = saved["step"], saved["tokens"], saved["elapsed"]
        batches.reseed(args.seed + step)  # Not the batches of the first part once more.
    total, start = args.minutes * 60.0, time.monotonic() - before
    printed = saved_at = time.monotonic()
    smooth = None
    while (elapsed := time.monotonic() - start) < total:
        done = elapsed / total
        # Decays to zero in time rather than in steps, so that a slower machine still finishes.
        rate = args.lr * min(1.0, (done + 1e-3) / 0.03, (1.0 - done) / 0.9 + 0.005)
        for group in optimizer.param_groups:
            group["lr"] = rate
        # A few longer rows keep the model usable in chats longer than the usual row.
        long_row = step % 12 == 11
        length = args.seq * 4 if long_row else args.seq
        ids = batches.next(max(1, args.batch // 4) if long_row else args.batch, length)
        loss = loss_of(model, ids)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step, tokens = step + 1, tokens + ids.numel()
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        now = time.monotonic()
        if now - printed > 15 or step == 1:
            printed = now
            speed = tokens / (now - start)
            print(
                f"step {step} loss {smooth:.3f} lr {rate:.1e} {tokens / 1e6:.2f} M tokens "
                f"{speed:.0f} tok/s, {max(0.0, total - now + start) / 60:.1f} min left",
                flush=True,
            )
        if args.checkpoint and now - saved_at > args.checkpoint_every * 60:
            saved_at = now
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            numbers = {"step": step, "tokens": tokens, "elapsed": now - start}
            torch.save(state | numbers, args.checkpoint)
            export(model, tokenizer, args.out)
    minutes = (time.monotonic() - start) / 60
    return {"steps": step, "tokens": tokens, "loss": smooth or 0.0, "minutes": minutes}


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, tokenizer: Tokenizer, texts: list[str]) -> float:
    """Returns the mean loss per token on documents that were in no raw training row."""
    total, count = 0.0, 0
    for encoding in tokenizer.encode_batch(texts):
        ids = torch.tensor([encoding.ids[:512]])
        if ids.shape[1] > 1:
            total += loss_of(model, ids).item() * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
    return total / max(1, count)


@torch.inference_mode()
def sample_answers(folder: Path) -> list[tuple[str, str]]:
    """Loads the exported folder as any user would and answers the sample questions greedily."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    answers = []
    for question in SAMPLE_QUESTIONS:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer.encode(str(text))])
        output = model.generate(ids, max_new_tokens=120, do_sample=False)
        answer = str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
        answers.append((question, answer.strip()))
    return answers


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path(__file__).parent / "pydoc-6m", help="folder to write")
    add("--minutes", type=float, default=45.0, help="training time; the schedule fits itself to it")
    add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads to train with")
    add("--seed", type=int, default=7, help="seed of the data order and the initial weights")
    add("--batch", type=int, default=8, help="rows in a training step")
    add("--seq", type=int, default=384, help="tokens in a row; every twelfth step uses 4x as many")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--raw-share", type=float, default=0.2, help="share of documents that are not chats")
    add("--vocab", type=int, default=4096, help="vocabulary size, special tokens included")
    add("--hidden", type=int, default=256, help="hidden size, a multiple of 64")
    add("--layers", type=int, default=6, help="transformer layers")
    add("--checkpoint", type=Path, help="file to save training state to")
    add("--checkpoint-every", type=float, default=5.0, help="minutes between two checkpoints")
    add("--resume", action="store_true", help="go on from the file that --checkpoint names")
    args = parser.parse_args(argv)
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint")
    return args


def main(argv: list[str] | None = None) -> int:
    """Collects, trains, exports, reloads the export and writes its model card."""
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    entries = collect()
    tokenizer = train_tokenizer(entries, args.vocab, args.seed)
    batches = Batches(tokenizer, entries, args.seed, args.raw_share)
    model = build_model(tokenizer, args)
    characters = sum(len(entry.text) for entry in entries)
    chats = len(set(chat_entries(entries)))
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{len(entries)} texts, {characters} characters, {chats} answers, {parameters} parameters"
    )
    export(model, tokenizer, args.out)  # Fails now, rather than after the training, if it fails.
    numbers = train(model, tokenizer, batches, args)
    numbers |= {
        "held_out": held_out_loss(model, tokenizer, batches.held_out),
        "texts": len(entries),
        "characters": characters,
        "answers": chats,
        "parameters": parameters,
        "size": export(model, tokenizer, args.out),
        "parts": "two parts, resumed from a checkpoint" if args.resume else "one go",
        "held": len(batches.held_out),
        "seq": args.seq,
        "long_seq": args.seq * 4,
        "layers": args.layers,
        "hidden": args.hidden,
        "heads": args.hidden // 32,
        "kv_heads": args.hidden // 64,
        "vocab": args.vocab,
        "threads": args.threads,
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "python": platform.python_version(),
        "versions": {n: version(n) for n in ("torch", "transformers", "tokenizers", "safetensors")},
        "command": f"--minutes {args.minutes:g} --threads {args.threads} --seed {args.seed}",
    }
    samples = sample_answers(args.out)
    (args.out / "README.md").write_text(model_card(args.out.name, numbers, samples), "utf-8")
    print(json.dumps(numbers, indent=2))
    for question, answer in samples:
        print(f"> {question}\n{answer}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
