"""A small decoder over the 256 bytes, trained on the lines of a short text."""

import copy
from collections.abc import Iterable
from pathlib import Path

import torch
import torch_xla
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from tpuscope.errors import RequestError

logging.disable_progress_bar()  # of 20 tensors that are read

PAD, END = 0, 10  # bytes: one that no text has, and the end of a line
VOCABULARY = 256

TEXT = """\
The target is small and bright.
The target is far away and dim.
The target is hidden by clouds.
The detector finds the target.
The detector counts what it finds.
The sensor sees heat, not light.
The sensor sees the sky at night.
A cloud is warm at its edge.
A cloud is no target.
A program is compiled once.
A program is run many times.
A shape that grows is a new shape.
A shape that stays costs nothing.
The host writes the graph down.
The host reads the last token.
The device runs what is written.
The device waits for no one.
Padding is cheaper than compiling.
Padding fills the empty places.
The cache keeps keys and values.
The cache has a fixed length.
"""


def encode(text: str) -> list[int]:
    """Return the bytes of the text (UTF-8) as token ids."""
    return list(text.encode())


def decode(tokens: Iterable[int]) -> str:
    """Return the text of token ids, without padding and end of line."""
    kept = bytes(token for token in tokens if token not in (PAD, END))
    return kept.decode(errors="replace")


def build(hidden: int = 64, layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    """Return a small Llama with random weights, float32, on the host.

    Its attention is ``"eager"``, matrix products and a softmax. ``"sdpa"`` reads the mask on the
    host in every call, to see whether it can do without it (transformers 5.23.0).

    Args:
        hidden: width; four heads share it.
        layers: decoder blocks.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=END,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).eval()


def move(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move a model to a device and keep its tied weights tied.

    Between the host and an XLA device ``.to()`` makes new parameters, and then the embedding and
    the output layer, which share their weights, share them no longer, without a word.
    """
    model.to(device)
    model.tie_weights()
    return model


def save(model: PreTrainedModel, folder: Path) -> None:
    """Save a model to a folder for ``from_pretrained``.

    From the host: safetensors asks a tensor where it lies, and an XLA tensor has no such place
    ("Attempted to access the data pointer on an invalid python storage").
    """
    move(copy.deepcopy(model), torch.device("cpu")).save_pretrained(folder)


def load(folder: Path, device: torch.device) -> PreTrainedModel:
    """Load a model saved by :func:`save` to a device, ready to generate.

    Raises:
        RequestError: there is no such folder.
    """
    if not (Path(folder) / "config.json").is_file():
        raise RequestError(f"{folder} holds no model (no config.json): write one with save()")
    # Read on the host, then uploaded: made on the device, each weight would be a program.
    model = LlamaForCausalLM.from_pretrained(
        folder, local_files_only=True, attn_implementation="eager"
    )
    return move(model.eval(), device)


def train(model: PreTrainedModel, text: str = TEXT, steps: int = 140, lr: float = 3e-3) -> Tensor:
    """Train a model on the lines of a text, all lines in every step; return the losses.

    Args:
        model: on the device that is to do it.
        text: lines; each is one sample, which ends in END.
        steps: of AdamW; each ends in ``torch_xla.sync()``.
        lr: learning rate.

    Returns:
        Loss of each step, nats a byte; float32 (steps,), on the host.
    """
    device = model.device
    lines = [encode(line) for line in text.splitlines(keepends=True)]
    width = max(map(len, lines))
    ids = torch.tensor([line + [PAD] * (width - len(line)) for line in lines]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    model.train()
    for _ in range(steps):
        # A mask is given, because without one transformers looks for packed samples: a host read.
        logits = model(input_ids=ids, attention_mask=ids != PAD, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        torch_xla.sync()
    model.eval()
    return torch.stack([loss.cpu() for loss in losses])
