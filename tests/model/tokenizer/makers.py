"""Small tokenizers like the published ones, trained during the tests."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = "once upon a time there was a lily\n\n    in 2024:\t「漢字」 and café!\nonce upon a time, 1999 lilies\n" * 20
# The regular expression that divides LLaMA 3's texts into words.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NASTY = [
    "", "a\nb", "a\tb", "a\r\nb\r", "\n\n\n", " lead", "trail ", "  two  spaces  ", "   ", "a\0b", "\0", "🙂🏽",
    "\ufeffBOM", "e\u0301", "ﬁ①\u00a0\u2028", "it's\n\n\n  I'LL  \n\t\n 12345 678\n ?!\n\n?! \n x", "a" * 300,
    "漢字。\n\n漢字, \r\n\r\n「🙂」", "<s>", "</s>", "<unk><0x0A>", "<|begin|><|end|>", " \u2047 ", TEXT,
]  # fmt: skip


def byte_level(folder: Path, digits: bool = False) -> Path:
    """LLaMA 3's tokenizer.json: bytes, its regular expression, its post-processor. `digits` makes it SmolLM2's."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    words = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if digits:
        words = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = ["<|begin|>", "<|end|>", "<|eot|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=sorted(alphabet), special_tokens=names
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.decoder = decoders.ByteLevel()
    begin = tokenizer.token_to_id("<|begin|>")
    if not digits:
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]),
            ]
        )
    end = {"__type": "AddedToken", "content": "<|end|>"}
    return write(folder, tokenizer, {"bos_token": "<|begin|>", "eos_token": end})


def sentencepiece_like(folder: Path, scheme: str | None = None) -> Path:
    """LLaMA 2's tokenizer.json, with a space before every stretch of text, or with a Metaspace of the given scheme."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=120, show_progress=False))
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = [piece for piece in pieces if "\n" not in piece]  # as in LLaMA, where a line break is a byte
    merges = [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    merges = [merge for merge in merges if "\n" not in "".join(merge)]
    vocab = {piece: id for id, piece in enumerate([*first, *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if scheme is None:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = decoders.Strip(content=" ", left=1)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in first[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return write(folder, tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


def write(folder: Path, tokenizer: Tokenizer, config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
