"""trl's SFTTrainer, DPOTrainer and GRPOTrainer, the first one with an adapter of peft if it is asked for."""

import argparse

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

WORDS = [f"w{index}" for index in range(60)]


def tokenizer() -> PreTrainedTokenizerFast:
    """Words to tokens, made here as there is no hub to ask."""
    known = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(start: int) -> str:
    return " ".join(WORDS[(start * 7 + step * step) % 60] for step in range(4 + start % 4))


def num_words(completions: list[str], **_: object) -> list[float]:
    """A reward."""
    return [float(len(set(each.split()))) for each in completions]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dpo", action="store_true")
    parser.add_argument("--grpo", action="store_true")
    parser.add_argument("--lora", action="store_true")
    options = parser.parse_args()
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    adapter = None
    if options.lora:
        from peft import LoraConfig

        adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    settings = {
        "output_dir": "out",
        "logging_steps": 1,
        "max_steps": 4,
        "max_length": 16,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    given = {"model": model, "processing_class": tokenizer(), "peft_config": adapter}
    if options.dpo or options.grpo:
        model.save_pretrained("base")  # from which the trainer loads its reference, too
        given["model"] = "base"
    if options.dpo:
        pairs = [{"prompt": text(i), "chosen": " " + text(i + 1), "rejected": " " + text(i + 2)} for i in range(24)]
        trainer = DPOTrainer(args=DPOConfig(**settings), train_dataset=Dataset.from_list(pairs), **given)
    elif options.grpo:
        rows = [{"prompt": text(index)} for index in range(24)]
        del settings["max_length"]
        config = GRPOConfig(**settings, num_generations=2, max_completion_length=6, beta=0.1)
        trainer = GRPOTrainer(args=config, train_dataset=Dataset.from_list(rows), reward_funcs=num_words, **given)
    else:
        rows = [{"text": text(index)} for index in range(24)]
        trainer = SFTTrainer(args=SFTConfig(**settings), train_dataset=Dataset.from_list(rows), **given)
    trainer.train()
    for entry in trainer.state.log_history:
        print({key: value for key, value in entry.items() if "runtime" not in key and "per_second" not in key})
    print(sum(value.double().sum() for value in trainer.model.state_dict().values()).item().hex())


if __name__ == "__main__":
    main()
