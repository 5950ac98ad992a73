"""What the engine is measured against in torch: transformers, and a bare loop by hand.

All have the same two verbs: `prefill` computes prompts and chooses a token, `decode` makes a
callable that computes one more token for each sequence of a batch.
"""

from __future__ import annotations

import random
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from benchmarks.engines import ENGINES
from benchmarks.random_llama import Shape
from benchmarks.result import ROOT
from kvmesh.core.types import SamplingParams
from kvmesh.engine.protocol import SequenceChunk
from kvmesh.engine.runner import TorchRunner

BLOCK_SIZE = 16
Run = Callable[[], object]
"""Once what is timed; gives the seconds itself where that is not all of the call."""


class Engine(Protocol):
    """Something that computes tokens."""

    def prefill(self, num_tokens: int) -> Run:
        """One prompt of this length, from nothing to its first token."""
        ...

    def decode(self, batch: int, context: int) -> Run:
        """One step of a batch whose sequences have `context` positions computed."""
        ...


def prompt(num_tokens: int, vocab: int, seed: int = 0) -> list[int]:
    """Token ids."""
    draw = random.Random(seed)
    return [draw.randrange(vocab) for _ in range(num_tokens)]


class Ours:
    """The engine's own runner."""

    def __init__(
        self,
        folder: Path,
        shape: Shape,
        dtype: str,
        num_blocks: int,
        threads: int,
        device: str = "cpu",
    ) -> None:
        self._vocab = shape.vocab
        self.runner = TorchRunner.load(
            folder,
            served_name=shape.name,
            dtype=dtype,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_threads=threads,
            device=device,
        )

    def _chunk(self, sequence: int, start: int, end: int) -> SequenceChunk:
        blocks = -(-end // BLOCK_SIZE)
        return SequenceChunk(
            sequence_id=sequence,
            token_ids=prompt(end, self._vocab, sequence),
            start=start,
            end=end,
            block_table=list(range(sequence * blocks, (sequence + 1) * blocks)),
            num_prompt_tokens=end,
            sampling=SamplingParams(temperature=0.0),
            sample=True,
        )

    def prefill(self, num_tokens: int) -> Run:
        """See `Engine.prefill`."""
        chunks = [self._chunk(0, 0, num_tokens)]
        return lambda: self.runner.execute(chunks)

    def decode(self, batch: int, context: int) -> Run:
        """See `Engine.decode`."""
        chunks = self.decode_chunks(batch, context)
        return lambda: self.runner.execute(chunks)

    def decode_chunks(self, batch: int, context: int) -> list[SequenceChunk]:
        """The chunks of such a step."""
        return [self._chunk(sequence, context, context + 1) for sequence in range(batch)]


def static_cache(model: Any, length: int) -> Any:
    """A cache of transformers for so many tokens, taken at once."""
    from transformers import StaticCache  # noqa: PLC0415 - slow, and only a peer

    factory: Any = StaticCache
    return factory(config=model.config, max_cache_len=length)


def next_tokens(model: Any, ids: Tensor, first: int, cache: Any) -> Tensor:
    """The likeliest next token of each row, [rows].

    Args:
        ids: [rows, tokens], of which the first is at position `first`.
    """
    positions = torch.arange(first, first + ids.shape[1])[None].expand(len(ids), -1)
    logits = model(
        ids, past_key_values=cache, position_ids=positions, logits_to_keep=1, use_cache=True
    ).logits
    chosen: Tensor = logits[:, -1].argmax(-1)
    return chosen


class Transformers:
    """transformers with its static cache and torch's attention."""

    def __init__(self, folder: Path, shape: Shape, dtype: str) -> None:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow, and only a peer

        self._vocab = shape.vocab
        factory: Any = AutoModelForCausalLM
        self._model = factory.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    def _step(self, ids: Tensor, first: int, cache: Any) -> Run:
        @torch.inference_mode()
        def run() -> Tensor:
            cache.reset()
            # A static cache counts what it holds; the count is set back to the same context.
            for layer in cache.layers:
                if getattr(layer, "cumulative_length", None) is not None:
                    layer.cumulative_length.fill_(first)
            return next_tokens(self._model, ids, first, cache)

        return run

    def prefill(self, num_tokens: int) -> Run:
        """See `Engine.prefill`."""
        return self._step(
            torch.tensor([prompt(num_tokens, self._vocab)]),
            0,
            static_cache(self._model, num_tokens),
        )

    def decode(self, batch: int, context: int) -> Run:
        """See `Engine.decode`. What the cache holds is zeros: they cost as much."""
        ids = torch.tensor([prompt(1, self._vocab, sequence) for sequence in range(batch)])
        return self._step(ids, context, static_cache(self._model, context + 1))


class HandLoop:
    """The least that torch needs: plain weights, keys and values in one tensor per layer."""

    def __init__(self, folder: Path, shape: Shape, dtype: str) -> None:
        self._shape = shape
        self._dtype = getattr(torch, dtype)
        tensors = load_file(folder / "model.safetensors")
        self._w = {name: tensor.to(self._dtype) for name, tensor in tensors.items()}
        for layer in range(shape.layers):
            prefix = f"model.layers.{layer}"
            self._join(f"{prefix}.qkv", [f"{prefix}.self_attn.{n}_proj.weight" for n in "qkv"])
            self._join(
                f"{prefix}.gate_up", [f"{prefix}.mlp.{n}_proj.weight" for n in ("gate", "up")]
            )
        half = shape.head_dim // 2
        angles = torch.outer(torch.arange(4096.0), 10000.0 ** -(torch.arange(half) / half))
        self._cos = angles.cos().repeat(1, 2).to(self._dtype)
        self._sin = angles.sin().repeat(1, 2).to(self._dtype)

    def _join(self, name: str, parts: list[str]) -> None:
        self._w[name] = torch.cat([self._w.pop(part) for part in parts])

    def _rotate(self, x: Tensor, first: int) -> Tensor:
        cos, sin = (table[first : first + x.shape[2]] for table in (self._cos, self._sin))
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-high, low], dim=-1) * sin

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Torch's fast path takes no grouped heads, so they take another axis."""
        if q.shape[2] == 1:
            grouped = q.view(len(q), self._shape.kv_heads, -1, self._shape.head_dim)
            return functional.scaled_dot_product_attention(grouped, k, v).view(q.shape)
        grouped = q[0].view(self._shape.kv_heads, -1, q.shape[2], q.shape[3])
        k, v = (x[0][:, None].expand(-1, grouped.shape[1], -1, -1) for x in (k, v))
        out = functional.scaled_dot_product_attention(grouped, k, v, is_causal=True)
        return out.flatten(0, 1)[None]

    def _step(self, ids: Tensor, first: int) -> Run:
        s, w = self._shape, self._w
        batch, rows = ids.shape
        cache = torch.zeros(
            s.layers, 2, batch, s.kv_heads, first + rows, s.head_dim, dtype=self._dtype
        )

        def norm(x: Tensor, name: str) -> Tensor:
            return functional.rms_norm(x, (s.hidden,), w[f"{name}.weight"], 1e-5)

        @torch.inference_mode()
        def run() -> Tensor:
            x = functional.embedding(ids, w["model.embed_tokens.weight"])
            for layer in range(s.layers):
                prefix = f"model.layers.{layer}"
                qkv = functional.linear(norm(x, f"{prefix}.input_layernorm"), w[f"{prefix}.qkv"])
                heads = qkv.view(batch, rows, -1, s.head_dim).transpose(1, 2)
                q = self._rotate(heads[:, : s.heads], first)
                cut = s.heads + s.kv_heads
                cache[layer, 0, :, :, first:] = self._rotate(heads[:, s.heads : cut], first)
                cache[layer, 1, :, :, first:] = heads[:, cut:]
                out = self._attend(q, cache[layer, 0], cache[layer, 1])
                out = out.transpose(1, 2).reshape(batch, rows, -1)
                x = x + functional.linear(out, w[f"{prefix}.self_attn.o_proj.weight"])
                h = norm(x, f"{prefix}.post_attention_layernorm")
                gate, up = functional.linear(h, w[f"{prefix}.gate_up"]).chunk(2, dim=-1)
                x = x + functional.linear(
                    functional.silu(gate) * up, w[f"{prefix}.mlp.down_proj.weight"]
                )
            last = norm(x[:, -1], "model.norm")
            return functional.linear(last, w["model.embed_tokens.weight"]).argmax(-1)

        return run

    def prefill(self, num_tokens: int) -> Run:
        """See `Engine.prefill`."""
        return self._step(torch.tensor([prompt(num_tokens, self._shape.vocab)]), 0)

    def decode(self, batch: int, context: int) -> Run:
        """See `Engine.decode`."""
        ids = [prompt(1, self._shape.vocab, sequence) for sequence in range(batch)]
        return self._step(torch.tensor(ids), context)


class Child:
    """An engine of `benchmarks.engines`, in a process of the Python that has it.

    Args:
        python: its interpreter.
        steps: of a decode batch, at most.
    """

    def __init__(
        self, name: str, python: str, folder: Path, dtype: str, threads: int, steps: int
    ) -> None:
        self._name = name
        module = f"benchmarks.engines.{ENGINES[name].module}"
        command = [python, "-m", module, str(folder), dtype, "--threads", str(threads)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - ends with the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
        )
        self._steps = steps
        # One after the other: each needs all cores and more memory than it keeps.
        self._answer("start")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def prefill(self, num_tokens: int) -> Run:
        """See `Engine.prefill`."""
        return lambda: self._ask(f"prefill {num_tokens}")

    def decode(self, batch: int, context: int) -> Run:
        """See `Engine.decode`."""
        self._ask(f"decode {batch} {context} {self._steps}")
        return lambda: self._ask("step")

    def _ask(self, line: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer(line)

    def _answer(self, line: str) -> float:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            status = self._process.wait()
            self._log.seek(0)
            said = "".join(self._log.readlines()[-20:])
            raise RuntimeError(f"{self._name} ended with {status} at {line!r}:\n{said}")
        return float(answer)
