"""transformers' Trainer with its defaults, which makes its own optimizer and schedule."""

import sys

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def main() -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    tokens = torch.randint(64, (24, 12))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=rows, eval_dataset=rows[:4])
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    weights = trainer.model.state_dict()
    if args.process_index:
        return
    for entry in trainer.state.log_history:
        print({key: entry[key] for key in ("loss", "grad_norm", "learning_rate", "eval_loss") if key in entry})
    print(sum(value.double().sum() for value in weights.values()).item().hex())


if __name__ == "__main__":
    sys.exit(main())
