"""Exchange of chunks over a process group: the only package that uses torch.distributed."""
