"""Fine-tune adapters (LoRA) of a frozen bf16 model whose weights move through a capped device memory.

python examples/finetune_lora.py                                   # a tiny Llama, made here, on Python's own sources
python examples/finetune_lora.py --model path/to/llama --data my/text --device-cap 8GiB --checkpointing
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from text import TextError, batch_at, load_text
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import chunkmem
from chunkmem.data.sizes import format_nbytes

TINY = LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="a folder that from_pretrained() loads; default: a tiny Llama")
    add("--data", type=Path, metavar="PATH", help="a file or folder; default: Python's standard library")
    add("--device-cap", metavar="SIZE", help='such as "8GiB"; default: a quarter of the weights, on a GPU all of it')
    add("--out", type=Path, metavar="DIR", help="where the adapter is saved; default: nowhere")
    add("--steps", type=int, default=40, metavar="N")
    add("--batch", type=int, default=4, metavar="N", help="sequences a step")
    add("--seq", type=int, default=64, metavar="N", help="tokens a sequence")
    add("--rank", type=int, default=4, metavar="N", help="of the adapters")
    add("--lr", type=float, default=3e-3)
    add("--checkpointing", action="store_true", help="recompute activations in backward")
    return parser.parse_args()


def load_tokens(args: argparse.Namespace) -> Tensor:
    """Return the text as tokens, 1D: bytes for the tiny model, else those of the model's own tokenizer."""
    text = load_text(args.data, seq=args.seq).training
    if args.model is None:
        return text
    words = bytes(text.tolist()).decode(errors="replace")
    return torch.tensor(AutoTokenizer.from_pretrained(args.model)(words)["input_ids"])


def build(args: argparse.Namespace) -> torch.nn.Module:
    """Return the model to be adapted, in bf16."""
    torch.manual_seed(0)
    if args.model is None:
        return AutoModelForCausalLM.from_config(TINY, dtype=torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)


def make_config(args: argparse.Namespace, device: torch.device) -> chunkmem.Config:
    """Return a cap on DEVICE; on an accelerator it covers activations, too, which only a step can tell."""
    cap: str | int | None = args.device_cap
    if cap is None and device.type == "cpu":
        config = TINY if args.model is None else AutoConfig.from_pretrained(args.model)
        with torch.device("meta"):
            cap = (
                sum(p.nbytes for p in AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).parameters()) // 4
            )
    return chunkmem.Config.from_dict({"memory": {"device": cap}})


def main() -> None:
    args = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        tokens = load_tokens(args)
        manager = chunkmem.ChunkManager(make_config(args, device))
        with manager.init():
            model = build(args)
        model = get_peft_model(model, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"))
        if args.checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable()
        trained = [param for param in model.parameters() if param.requires_grad]  # the adapters, in fp32
        optimizer = chunkmem.AdamW(trained, manager=manager, lr=args.lr)
        train(args, manager, model, optimizer, tokens.to(device))
    except (TextError, chunkmem.ChunkmemError) as error:
        print(f"finetune_lora.py: {error}", file=sys.stderr)
        sys.exit(2)
    if args.out is not None:
        model.save_pretrained(args.out)
        print(f"the adapter: {args.out}")
    manager.close()


def train(
    args: argparse.Namespace,
    manager: chunkmem.ChunkManager,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
) -> None:
    """Train, and show the loss, the speed, and what DEVICE holds against what it would hold in plain PyTorch."""
    frozen = sum(param.nbytes for param in model.parameters() if not param.requires_grad)
    plain_nbytes = frozen + sum(4 * param.nbytes for param in model.parameters() if param.requires_grad)
    adapters_nbytes = plain_nbytes - frozen
    start_s = time.perf_counter()
    losses = []
    with tqdm(total=args.steps, unit="step", mininterval=0.1 if sys.stderr.isatty() else 10) as bar:
        for step in range(args.steps):
            inputs, _ = batch_at(tokens, step, batch=args.batch, seq=args.seq, seed=0, device=tokens.device)
            loss = model(input_ids=inputs, labels=inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            speed = f"{(step + 1) * inputs.numel() / (time.perf_counter() - start_s):,.0f} tokens/s"
            bar.set_postfix_str(f"loss {losses[-1]:.3f}, {speed}, {manager.timeline()}", refresh=False)
            bar.update()
    peak = manager.memory().device.step_peak_nbytes + adapters_nbytes
    print(
        f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {speed}, {manager.timeline()}\n"
        f"DEVICE held {format_nbytes(peak)} of weights, adapters and their states at the peak; "
        f"plain PyTorch would hold {format_nbytes(plain_nbytes)}"
    )


if __name__ == "__main__":
    main()
