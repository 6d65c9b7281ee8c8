"""Lightning: it passes a closure to the optimizer, clips in between, and moves optimizer states about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import chunkmem
from tests.helpers.libraries import AMPLE_NBYTES, Side, decaying, llama, manager_of, same, tokens
from tests.helpers.twins import cpu_only

lightning = pytest.importorskip("lightning", minversion="2.6")
pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.full,
    cpu_only,
    pytest.mark.filterwarnings(
        "ignore:.*(does not have many workers|LeafSpec|isinstance|pkg_resources|GPU available).*"
    ),
]

PLACES = ("__init__", "configure_model", "setup", "configure_optimizers")
AUTOMATIC: dict[str, dict[str, Any]] = {
    "by norm": {"gradient_clip_val": 0.5},
    "by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulation": {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
    "no clipping": {},
}


class Module(lightning.LightningModule):  # type: ignore[misc]
    """A model handed to chunkmem in one of the places where scripts build or finish theirs."""

    def __init__(self, side: Side, *, place: str = "__init__", is_manual: bool = False) -> None:
        super().__init__()
        self.side, self.place = side, place
        self.automatic_optimization = not is_manual
        self.seen: list[float] = []
        self.model = llama()
        self._reach("__init__")

    def _reach(self, place: str) -> None:
        if place == self.place:
            self.side.ready(self.model)

    def configure_model(self) -> None:
        self._reach("configure_model")

    def setup(self, stage: str) -> None:
        self._reach("setup")

    def configure_optimizers(self) -> Any:
        self._reach("configure_optimizers")
        optimizer = self.side.adamw(self.parameters())
        schedule = {"scheduler": decaying(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        self.seen.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.lr_schedulers().step()
        return loss

    def validation_step(self, batch: torch.Tensor, _index: int) -> None:
        self.seen.append(self.model(input_ids=batch, labels=batch).loss.item())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append(torch.nn.utils.get_total_norm(p.grad for p in self.parameters()).item())


def fit(module: Module, **options: Any) -> Any:
    """Six batches and an evaluation before, during and after; the trainer."""
    trainer = lightning.Trainer(
        **{"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_progress_bar": False}
        | {"enable_checkpointing": False, "enable_model_summary": False, "val_check_interval": 3}
        | options
    )
    trainer.fit(module, DataLoader(tokens(12), batch_size=2), DataLoader(tokens(4, seed=1), batch_size=2))
    return trainer


def result_of(module: Module) -> dict[str, Any]:
    return {"seen": module.seen, "weights": dict(module.model.state_dict())}


@pytest.mark.parametrize("variant", AUTOMATIC)
def test_automatic_optimization(variant: str) -> None:
    """Forward, backward and clipping run inside of the closure that `step` is given."""

    def scenario(side: Side) -> Any:
        module = Module(side)
        fit(module, **AUTOMATIC[variant])
        return result_of(module)

    same(scenario)


@pytest.mark.parametrize("place", PLACES)
def test_the_model_may_be_handed_over_in_any_of_these_places(place: str) -> None:
    def scenario(side: Side) -> Any:
        module = Module(side, place=place)
        fit(module, gradient_clip_val=0.5)
        return result_of(module)

    same(scenario)


@pytest.mark.parametrize("name", ["EMAWeightAveraging", "StochasticWeightAveraging"])
def test_averages_of_weights(name: str) -> None:
    """They begin with a copy of the module, and are put into the model at the end."""

    def scenario(side: Side) -> Any:
        options = (
            {"swa_lrs": 1e-2, "swa_epoch_start": 1, "annealing_epochs": 1} if name.startswith("St") else {"decay": 0.5}
        )
        module = Module(side)
        fit(module, max_epochs=3, callbacks=[getattr(lightning.pytorch.callbacks, name)(**options)])
        return result_of(module)

    same(scenario)


def test_manual_optimization() -> None:
    def scenario(side: Side) -> Any:
        module = Module(side, is_manual=True)
        fit(module)
        return result_of(module)

    same(scenario)


@pytest.mark.filterwarnings("ignore:.*autocast.*:UserWarning")
def test_mixed_precision() -> None:
    """Without clipping, which Lightning refuses in mixed precision for torch's fused optimizers."""

    def scenario(side: Side) -> Any:
        module = Module(side)
        fit(module, precision="bf16-mixed")
        return result_of(module)

    same(scenario)


def test_a_module_built_inside_of_init() -> None:
    """The LightningModule itself is managed then, and not only the model in it."""

    def scenario(side: Side) -> Any:
        if side.manager is None:
            module = Module(side)
        else:
            with side.manager.init():
                module = Module(side, place="nowhere")
        fit(module, gradient_clip_val=0.5)
        return result_of(module)

    same(scenario)


def test_a_checkpoint_of_lightning_is_resumed(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        with manager_of(AMPLE_NBYTES) as another:
            first = Module(Side(side.manager and another))
            fit(first, max_steps=3).save_checkpoint(tmp_path / "half.ckpt")
        second = Module(side)
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=6, logger=False, enable_progress_bar=False, enable_checkpointing=False
        )
        loader = DataLoader(tokens(12), batch_size=2)
        trainer.fit(second, loader, ckpt_path=tmp_path / "half.ckpt", weights_only=False)
        return result_of(second)

    same(scenario)


def test_an_optimizer_of_torch_is_refused() -> None:
    class Torch(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    with manager_of(AMPLE_NBYTES) as manager:
        module = Torch(Side(manager))
        with pytest.raises(chunkmem.StateError, match=r"AdamW\.step\(\): parameter .* is managed.*chunkmem\.AdamW"):
            fit(module)


def test_at_its_end_lightning_calls_cpu_which_a_module_may_answer_itself() -> None:
    """On an accelerator that would move managed parameters, and be refused; docs/integrations.md overrides it."""

    class Stays(Module):
        num_calls = 0

        def cpu(self) -> Stays:
            self.num_calls += 1
            return self

    with manager_of(AMPLE_NBYTES) as manager:
        module = Stays(Side(manager))
        fit(module)
    assert module.num_calls == 1
