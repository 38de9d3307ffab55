"""Write a Llama of two layers, with a real tokenizer, into a folder: tiny_model.py DIR

Run by the engine's own Python. It has no weights: serve it with --load-format dummy. Doing it twice changes nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

# Two layers and two KV heads of 32: small enough that two cores decode hundreds of tokens a second.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "dtype": "float32",  # the one every CPU computes in natively
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
SPECIAL = ["<s>", "</s>", "<pad>"]
VOCAB = 2048
# Enough different words that the tokenizer reaches its full vocabulary: every id the model can emit is then a token.
SYLLABLES = ("ka", "lo", "mi", "ne", "ru", "so", "ta", "vi", "pel", "dor", "fin", "gus", "han", "jem")


def corpus() -> list[str]:
    """Invented words, three syllables each, and some plain English around them."""
    words = [a + b + c for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES]
    plain = "the ship may be loaded down to this line and not one inch further, said the inspector to the owner. "
    return [plain * 20, " ".join(words), " ".join(reversed(words))]


def write(folder: Path) -> None:
    """Write tokenizer and configuration into an empty folder."""
    # Imported by name: only the engine's environment has the library, ours is type-checked without it.
    tokenizers = importlib.import_module("tokenizers")
    byte_level = importlib.import_module("tokenizers.pre_tokenizers").ByteLevel
    tokenizer = tokenizers.Tokenizer(importlib.import_module("tokenizers.models").BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = importlib.import_module("tokenizers.decoders").ByteLevel()
    trainer = importlib.import_module("tokenizers.trainers").BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    assert tokenizer.get_vocab_size() == VOCAB, f"{tokenizer.get_vocab_size()} tokens: the corpus is too poor"
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "model_max_length": LLAMA["max_position_embeddings"],
        "chat_template": "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": VOCAB}, indent=1), encoding="utf-8")


def main(target: Path) -> None:
    """Make `target` hold the model as this script writes it, whatever was there before."""
    made_by = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    stamp = target / ".made-by"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == made_by:
        return
    # Written beside and moved into place: a server never sees half a model.
    fresh = target.with_name(target.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    write(fresh)
    (fresh / ".made-by").write_text(made_by, encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
