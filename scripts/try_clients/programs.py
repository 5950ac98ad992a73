"""Which clients and load generators `scripts.try_clients` runs, and what each is made of."""

from __future__ import annotations

from dataclasses import dataclass

CPU_TORCH = "torch"
"""Installed in the product's version, for which the machine has what it needs; load generators
want it for their tokenizers and would bring a CUDA one."""


@dataclass(frozen=True, slots=True)
class Program:
    """One row of the table.

    Attributes:
        name: how the table calls it; also the folder of its environment.
        distribution: whose version is told; empty for our own program.
        requirements: what pip or npm installs.
        alone: installed by pip without what they depend on.
        script: module or file in `scripts/clients` that tries it.
        remark: what there is to say besides.
    """

    name: str
    distribution: str
    requirements: tuple[str, ...]
    script: str
    alone: tuple[str, ...] = ()
    remark: str = ""

    @property
    def is_node(self) -> bool:
        """Whether it is JavaScript."""
        return self.script.endswith(".mjs")

    @property
    def folder(self) -> str:
        """Name of its environment."""
        return self.name.replace("/", "-").replace("@", "").replace(" ", "-")


_VLLM_NEEDS = (
    CPU_TORCH,
    "transformers",
    *("aiohttp", "blake3", "cachetools", "cbor2", "cloudpickle", "einops", "fastapi", "ijson"),
    *(
        "llguidance",
        "msgspec",
        "numpy",
        "openai",
        "openai-harmony",
        "pandas",
        "partial-json-parser",
        "pillow",
        "psutil",
    ),
    *("prometheus_client", "protobuf", "py-cpuinfo", "pybase64", "pydantic", "pyyaml", "pyzmq"),
    *("regex", "requests", "setproctitle", "tiktoken", "tqdm", "uvloop", "xgrammar"),
    "xxhash",
)

LOAD_GENERATORS = (
    Program("kvmesh bench serve", "", (), "own_load", remark="for comparison"),
    Program(
        "vllm bench serve",
        "vllm",
        _VLLM_NEEDS,
        "vllm_load",
        ("vllm",),
        "only the load generator runs, without vLLM's compiled parts",
    ),
    Program("guidellm", "guidellm", ("guidellm", CPU_TORCH), "guidellm_load"),
    Program("aiperf", "aiperf", ("aiperf",), "aiperf_load"),
)

CLIENTS = (
    Program("openai", "openai", ("openai",), "openai_client"),
    Program("openai 1.30.1", "openai", ("openai==1.30.1", "httpx<0.28"), "openai_client"),
    Program("openai-agents", "openai-agents", ("openai-agents",), "agents_client"),
    Program(
        "langchain",
        "langchain-openai",
        ("langchain", "langchain-openai"),
        "langchain_client",
        remark="the version is that of `langchain-openai`",
    ),
    Program("litellm", "litellm", ("litellm", "mcp"), "litellm_client"),
    Program("pydantic-ai", "pydantic-ai-slim", ("pydantic-ai-slim[openai]",), "pydantic_ai_client"),
    Program("instructor", "instructor", ("instructor",), "instructor_client"),
    Program("llm", "llm", ("llm",), "llm_client"),
    Program("dspy", "dspy", ("dspy",), "dspy_client"),
    Program(
        "llama-index",
        "llama-index-llms-openai-like",
        ("llama-index-llms-openai-like",),
        "llama_index_client",
        remark="the version is that of `llama-index-llms-openai-like`",
    ),
    Program("haystack", "haystack-ai", ("haystack-ai",), "haystack_client"),
    Program("smolagents", "smolagents", ("smolagents[openai]",), "smolagents_client"),
    Program("semantic-kernel", "semantic-kernel", ("semantic-kernel",), "semantic_kernel_client"),
    Program("lm-eval", "lm_eval", ("lm_eval[api]", "transformers"), "lm_eval_client"),
    Program("openai (npm)", "openai", ("openai",), "openai_client.mjs"),
    Program(
        "@ai-sdk/openai-compatible",
        "@ai-sdk/openai-compatible",
        ("ai", "@ai-sdk/openai-compatible"),
        "ai_sdk_client.mjs",
    ),
)

PROGRAMS = {program.name: program for program in (*LOAD_GENERATORS, *CLIENTS)}
