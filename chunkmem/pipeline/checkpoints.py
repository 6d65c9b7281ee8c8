"""Which calls of blocks are recomputed in backward."""

from __future__ import annotations

CHECKPOINTS = ("auto", "always", "except_last", "never")


def policy_of(checkpoint: str, number: int, num: int) -> str:
    """Return the policy for what micro-batch `number` of `num` saves in a block, as `activations.policy` has them."""
    if checkpoint == "auto":
        return "auto"
    is_recomputed = checkpoint == "always" or (checkpoint == "except_last" and number < num - 1)
    return "recompute" if is_recomputed else "offload"
