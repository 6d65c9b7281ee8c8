"""Lightning over two ranks: its DDP strategy around a module whose model is in chunks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.helpers.libraries import AMPLE_NBYTES, Side, llama, manager_of, tokens
from tests.helpers.ranks import Team
from tests.helpers.twins import cpu_only

pytest.importorskip("lightning", minversion="2.6")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.full, cpu_only]

SIZE = 2
ACCUMULATED = 2


def fit(side: Side, *, batch_size: int, **options: Any) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """Losses, weights, and the class of the strategy's model."""
    import lightning

    wrappers: list[str] = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def configure_model(self) -> None:
            # Where the process group is there; a manager that is made before would be that of one process.
            if not hasattr(self, "model"):
                self.model = side.ready(llama())
                self.seen: list[float] = []

        def configure_optimizers(self) -> Any:
            return side.adamw(self.parameters())

        def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
            wrappers.append(type(self.trainer.strategy.model).__name__)
            loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
            self.seen.append(loss.item())
            return loss

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.5,
        accumulate_grad_batches=ACCUMULATED,
        **options,
    )
    sampler = None
    if torch.distributed.is_initialized():  # Lightning's own shuffles
        sampler = DistributedSampler(tokens(16), shuffle=False)
    trainer.fit(module, DataLoader(tokens(16), batch_size=batch_size, sampler=sampler))
    weights = module.model.state_dict() if side.manager is None else side.manager.state_dict()
    return module.seen, {key: value.detach().clone() for key, value in weights.items()}, wrappers[-1]


def fit_over_ranks(rank: int) -> Any:
    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": SIZE, "LOCAL_WORLD_SIZE": SIZE, "GROUP_RANK": 0}
    os.environ.update({key: str(value) for key, value in said.items()} | {"TORCHELASTIC_RUN_ID": "none"})
    try:
        with manager_of(AMPLE_NBYTES) as manager:
            return fit(Side(manager), batch_size=1, strategy="ddp", devices=SIZE)
    finally:
        for key in (*said, "TORCHELASTIC_RUN_ID"):
            del os.environ[key]


def test_its_ddp_strategy_trains_as_one_process() -> None:
    """Rows are dealt out in turn: a step of two ranks with one row each has those of one process with two."""
    losses, weights, _ = fit(Side(None), batch_size=SIZE, devices=1)
    with Team(SIZE) as team:
        outcomes = team.run(fit_over_ranks, timeout_s=300.0)
    means = [sum(each) / SIZE for each in zip(*(seen for seen, _, _ in outcomes), strict=True)]
    assert means == pytest.approx(losses, abs=1e-4)
    for _, found, wrapper in outcomes:
        assert wrapper == "ManagedDataParallel"
        assert all(torch.allclose(value, weights[key], atol=1e-4) for key, value in found.items())
        assert all(torch.equal(value, outcomes[0][1][key]) for key, value in found.items())
