"""Lightning: a module that configures its own optimizer and schedule."""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 1))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch), batch.sum(1, keepdim=True))
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        print(f"{index} {loss.item().hex()} {rate}\n", end="")  # at once: other ranks print, too
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        error = nn.functional.mse_loss(self.layers(batch), batch.sum(1, keepdim=True))
        print(f"validated {index} {error.item().hex()}\n", end="")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy")
    parser.add_argument("--chunkmem", help="a configuration of the strategy")
    parser.add_argument("--twice", action="store_true", help="resume from a checkpoint, and validate around it")
    options = parser.parse_args()
    torch.manual_seed(0)
    module, data = Regression(), DataLoader(torch.randn(48, 64), 8)
    trainer = make_trainer(options, num_epochs=2)
    if options.twice:
        trainer.validate(module, data, verbose=False)
    trainer.fit(module, data)
    if options.twice:
        trainer.validate(module, data, verbose=False)
        trainer.save_checkpoint("lightning.ckpt")
        module, trainer = Regression(), make_trainer(options, num_epochs=3)
        trainer.fit(module, data, data, ckpt_path="lightning.ckpt")
    weights = module.state_dict()
    if trainer.is_global_zero:
        print(sum(value.double().sum() for value in weights.values()).item().hex())


def make_trainer(options: argparse.Namespace, *, num_epochs: int) -> lightning.Trainer:
    strategy = options.strategy or ("ddp" if options.devices > 1 else "auto")
    if options.chunkmem:
        from chunkmem.integrations.lightning import ChunkmemStrategy

        strategy = ChunkmemStrategy(options.chunkmem)
    return lightning.Trainer(
        accelerator="cpu",
        precision=options.precision,
        devices=options.devices,
        strategy=strategy,
        max_epochs=num_epochs,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


if __name__ == "__main__":
    main()
