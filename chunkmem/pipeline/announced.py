"""What goes from stage to stage, said ahead of it: for a step in which not all ranks can tell it from shapes.

A block may look at values (`.item()`, experts that are chosen by them), or a rank have no inputs to find shapes out
from. Then the sender of what a stage has returned says before what it is, and the receiver waits for that where the
schedule has it receive: sends are posted before. Messages are matched in that order, so no rank waits for itself
(`chunkmem.ranks.neighbours`). Gradients need no such word: their receiver has made what they are of.
"""

from __future__ import annotations

import pickle
from dataclasses import replace

import torch

from chunkmem.pipeline.forms import BoundaryForm
from chunkmem.ranks.neighbours import Message, Neighbours

_FIRST_TAG = 1 << 28
"""First tag of these messages: above the tags of activations, below those of tied parameters."""


class AnnouncedForms(Neighbours):
    """Sends and receives, in RAM, what is about to be sent and received."""

    def send_form(self, form: BoundaryForm, message: Message) -> None:
        """Say what is sent next; `message` is that. Raises a `RankError` if the peer is missing."""
        content = torch.frombuffer(bytearray(pickle.dumps(form)), dtype=torch.uint8)
        length = torch.tensor([len(content)], dtype=torch.int64, device="cpu")
        for number, tensor in enumerate((length, content)):
            self.send([tensor], _ahead(message, number))

    def receive_form(self, message: Message) -> BoundaryForm:
        """Return what is received next, when its sender has said it. Raises what `send` does."""
        found = torch.empty(1, dtype=torch.int64, device="cpu")
        for number in range(2):
            if number:
                found = torch.empty(int(found), dtype=torch.uint8, device="cpu")
            ahead = _ahead(message, number)
            self.receive([found], ahead)
            self.wait(ahead.tag)
        form: BoundaryForm = pickle.loads(found.numpy().data)
        return form


def _ahead(message: Message, number: int) -> Message:
    return replace(message, tag=_FIRST_TAG + 2 * message.tag + number)
