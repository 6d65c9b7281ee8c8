"""Train a causal language model by transformers' Trainer; with --chunkmem, in chunks, to the same bits.

python examples/trainer.py --output_dir out    # a tiny Llama, made here, on Python's own sources
python examples/trainer.py --output_dir out --chunkmem chunkmem.json --resume_from_checkpoint out/checkpoint-20
python examples/trainer.py --output_dir out --chunkmem chunkmem.json --model path/to/llama --data my/text --bf16
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from text import load_text
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

from chunkmem.integrations.trainer import ChunkmemArguments, TrainsInChunks

TINY = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@dataclass
class Arguments(ChunkmemArguments, TrainingArguments):
    model: str | None = field(default=None, metadata={"help": "What from_pretrained() loads; default: a tiny Llama."})
    data: Path | None = field(default=None, metadata={"help": "A file or folder; default: Python's standard library."})
    seq: int = field(default=64, metadata={"help": "Tokens a sequence."})


class ChunkTrainer(TrainsInChunks, Trainer):
    pass


def main() -> None:
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    text = load_text(args.data, seq=args.seq).training
    if args.model is None:
        model, tokens = AutoModelForCausalLM.from_config(TINY), text.long()
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        words = bytes(text.tolist()).decode(errors="replace")
        tokens = torch.tensor(AutoTokenizer.from_pretrained(args.model)(words)["input_ids"])
    rows = [{"input_ids": row, "labels": row} for row in tokens.split(args.seq)[:-1]]

    trainer = ChunkTrainer(model=model, args=args, train_dataset=rows)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    if trainer.manager is not None and trainer.is_world_process_zero():
        print(trainer.manager.memory())


if __name__ == "__main__":
    main()
