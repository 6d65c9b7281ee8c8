"""Checkpoints in the format of torch.distributed.checkpoint, written and read chunk by chunk."""
