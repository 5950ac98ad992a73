"""Writes a Llama's weights as a file that llama.cpp loads; of the Python that has gguf."""

from __future__ import annotations

import json
from pathlib import Path

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}


def export(folder: Path, dtype: str) -> Path:
    """Converts a checkpoint of `benchmarks.random_llama`: bf16 in one file, tied embeddings.

    Returns the file, which lies beside the folder. It names no tokens.
    """
    import gguf  # type: ignore[import-not-found]  # noqa: PLC0415 - of the peer's own environment
    import numpy as np  # noqa: PLC0415

    out = folder.parent / f"{folder.name}-{dtype}.gguf"
    if out.is_file():
        return out
    config = json.loads((folder / "config.json").read_text())
    head_dim = config["head_dim"]
    rotated = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(rotated["attn_q"])
    writer.add_head_count_kv(rotated["attn_k"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begin = file.tell()
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            file.seek(begin + tensor["data_offsets"][0])
            shape = tensor["shape"]
            bits = np.fromfile(file, np.uint16, int(np.prod(shape))).reshape(shape)
            prefix, own = _name(name.removesuffix(".weight"))
            if own in rotated:
                # Values that rotate together are neighbours there, here in two halves of a head.
                halves = bits.reshape(rotated[own], 2, head_dim // 2, -1)
                bits = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(shape)
            if dtype == "bfloat16" and bits.ndim == 2:
                kind = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(f"{prefix}{own}.weight", bits.view(np.uint8), raw_dtype=kind)
            else:
                wide = (bits.astype(np.uint32) << 16).view(np.float32)
                writer.add_tensor(f"{prefix}{own}.weight", wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _name(name: str) -> tuple[str, str]:
    if not name.startswith("model.layers."):
        return "", _OTHER_NAMES[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.", _LAYER_NAMES[rest]
