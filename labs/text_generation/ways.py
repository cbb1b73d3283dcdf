"""Three ways to generate, and a fourth that traces nothing; :func:`generate` runs any of them.

A decoder writes one token after the other, and every token makes the text longer. XLA compiles one
program for each shape. So the obvious loop (:class:`Growing`) compiles for every token,
:class:`Padded` for every multiple that the length reaches, and :class:`Static`, with a cache of
fixed length, twice.
"""

from collections.abc import Sequence

import torch
import torch_xla
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast as CausalLMOutput

from tpuscope.engine.compiled_step import CompiledStep
from tpuscope.errors import RequestError

from .decoder import END, PAD, decode, encode


def left_padded(prompts: Sequence[str], multiple: int = 1) -> Tensor:
    """Prompts as rows that end together: int64 (batch, width), on the host.

    The next token then comes after the last column, in all rows.

    Args:
        prompts: at least one, none of them empty.
        multiple: the width is the next multiple of this.

    Raises:
        RequestError: a prompt is empty, or the multiple is not positive.
    """
    if multiple <= 0:
        raise RequestError(f"multiple is {multiple}; it has to be 1 or more")
    if isinstance(prompts, str) or not prompts:
        raise RequestError(f"prompts is {prompts!r}; give a list with at least one text")
    rows = [encode(prompt) for prompt in prompts]
    for number, row in enumerate(rows):
        if not row:
            raise RequestError(f"prompt {number} is ''; give it at least one character")
    width = _up(max(map(len, rows)), multiple)
    return torch.tensor([[PAD] * (width - len(row)) + row for row in rows])


def positions(mask: Tensor) -> Tensor:
    """Numbers of the tokens in each row, padding not counted: bool (B, W) → int64 (B, W)."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


class Growing:
    """The text is a tensor that becomes longer. Everything is computed again for each token.

    Args:
        model: on the XLA device.
    """

    name = "growing"
    multiple = 1
    capacity = None

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def begin(self, ids: Tensor) -> None:
        """Take left-padded prompts, int64 (B, W), from the host."""
        self.ids = ids.to(self.model.device)

    def logits(self) -> Tensor:
        """Of the token after the text: float32 (B, vocabulary)."""
        return _last_logits(self.model, self.ids)

    def append(self, token: Tensor) -> None:
        """One more token for each row, int64 (B, 1)."""
        self.ids = torch.cat([self.ids, token], 1)


class Padded:
    """The model sees a multiple of columns: the end of a buffer, with padding on the left.

    The buffer keeps its shape, its content moves to the left by one token a step. How many of its
    columns are needed is known on the host, so nothing is read.

    Args:
        model: on the XLA device.
        capacity: length of the buffer, tokens; a multiple of `multiple`.
        multiple: columns are added in such steps.
    """

    name = "padded"

    def __init__(self, model: PreTrainedModel, capacity: int = 64, multiple: int = 16):
        _check_sizes(capacity, multiple)
        self.model, self.capacity, self.multiple = model, capacity, multiple

    def begin(self, ids: Tensor) -> None:
        """Take left-padded prompts, int64 (B, W), from the host."""
        self._length = int((ids != PAD).sum(1).max())
        buffer = F.pad(ids, (self.capacity - ids.shape[1], 0), value=PAD)
        self.ids = buffer.to(self.model.device)

    def logits(self) -> Tensor:
        """Of the token after the text: float32 (B, vocabulary)."""
        return _last_logits(self.model, self.ids[:, -_up(self._length, self.multiple) :])

    def append(self, token: Tensor) -> None:
        """One more token for each row, int64 (B, 1)."""
        self.ids = torch.cat([self.ids[:, 1:], token], 1)
        self._length += 1


class Static:
    """A cache of fixed length keeps the keys and values. After the prompt, a step sees one token.

    The cache is transformers' ``StaticCache``: its fill level is a tensor, so that writing at
    another place is not another program. Everything else that changes is a tensor here as well.

    Args:
        model: on the XLA device.
        capacity: length of the cache, tokens; a multiple of `multiple`.
        multiple: prompts are padded to a multiple of this, so that few lengths of them occur.
    """

    name = "static"

    def __init__(self, model: PreTrainedModel, capacity: int = 64, multiple: int = 16):
        _check_sizes(capacity, multiple)
        self.model, self.capacity, self.multiple = model, capacity, multiple
        self._columns = torch.arange(capacity)[None].to(model.device)

    def begin(self, ids: Tensor) -> None:
        """Take left-padded prompts, int64 (B, W), from the host."""
        device = self.model.device
        self._prompt = ids.shape[1]
        self._slot = torch.tensor([self._prompt]).to(device)  # the next token's column
        self._token: Tensor | None = None
        self.ids = F.pad(ids, (0, self.capacity - ids.shape[1]), value=PAD).to(device)
        self._cache = StaticCache(config=self.model.config, max_cache_len=self.capacity)

    def logits(self) -> Tensor:
        """Of the token after the text: float32 (B, vocabulary)."""
        if self._token is None:
            return self._prefill(self.ids)
        return self._decode(self._token, self.ids)

    def append(self, token: Tensor) -> None:
        """One more token for each row, int64 (B, 1)."""
        self.ids = torch.where(self._columns == self._slot, token, self.ids)
        self._slot = self._slot + 1
        self._token = token

    def _prefill(self, ids: Tensor) -> Tensor:
        """The whole prompt at once, which fills the cache."""
        mask = ids != PAD
        return self._forward(ids[:, : self._prompt], mask, positions(mask)[:, : self._prompt])

    def _decode(self, token: Tensor, ids: Tensor) -> Tensor:
        """The token that was written last; what came before it is in the cache."""
        mask = ids != PAD  # (B, capacity): places that are still empty are masked like padding
        return self._forward(token, mask, mask.sum(1, keepdim=True) - 1)

    def _forward(self, new: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        output = self.model(
            input_ids=new,
            attention_mask=mask,
            position_ids=places,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]


class Replayed(Static):
    """As :class:`Static`, but the decode step is traced twice and from then on only called.

    The choice of the token stays outside, a small program of its own.
    """

    name = "replayed"
    _cache: StaticCache | None = None  # one for all requests: the program knows its tensors
    _replay: CompiledStep | None = None

    def begin(self, ids: Tensor) -> None:
        """Take left-padded prompts, int64 (B, W), from the host."""
        kept = self._cache
        super().begin(ids)
        if kept is not None and kept.layers[0].keys.shape[0] == ids.shape[0]:
            kept.reset()
            self._cache = kept
        else:
            self._replay = None

    def _decode(self, token: Tensor, ids: Tensor) -> Tensor:
        if self._replay is None:
            state = [*self.model.parameters(), *self.model.buffers()]
            for layer in self._cache.layers:
                state += [layer.keys, layer.values, layer.cumulative_length]
            step = super()._decode
            # A view would keep the tensor below it alive, which CompiledStep takes for a stranger.
            self._replay = CompiledStep(lambda *batch: (step(*batch).clone(),), state)
        return self._replay(token, ids)[0]

    @property
    def fallback_reason(self) -> str | None:
        """Why the step is traced each time after all, or None."""
        return self._replay and self._replay.fallback_reason


Way = Growing | Padded | Static


@torch.no_grad()
def generate(
    way: Way,
    prompts: Sequence[str],
    tokens: int,
    temperature: float | None = None,
    stop_every: int = 0,
) -> list[str]:
    """Continue prompts, as one batch.

    A row that has written END gets padding from there on. Random numbers are the device's:
    ``torch_xla.manual_seed`` makes them repeat.

    Args:
        way: one of the classes above.
        prompts: texts; shorter ones are padded on the left.
        tokens: to be written for each row, at most.
        temperature: None takes the most probable token; a number samples, the bolder the larger.
        stop_every: after so many tokens the host asks whether all rows have ended, which is one
            read; 0 never asks.

    Returns:
        Prompt and continuation of each row, up to its END.

    Raises:
        RequestError: an empty prompt, more tokens than the way has room for, or a number that is
            not positive.
    """
    ids = left_padded(prompts, way.multiple)
    _check_request(way, ids, tokens, temperature, stop_every)
    device = way.model.device
    heat = None if temperature is None else torch.tensor([temperature]).to(device)  # data
    finished = torch.zeros(len(prompts), 1, dtype=torch.bool).to(device)
    way.begin(ids)
    for number in range(1, tokens + 1):
        token = torch.where(finished, PAD, choose(way.logits(), heat))
        way.append(token)
        finished = finished | (token == END)
        all_finished = finished.all()
        torch_xla.sync()
        if stop_every and number % stop_every == 0 and all_finished.item():
            break
    return [decode(row) for row in way.ids.cpu().tolist()]


def choose(logits: Tensor, temperature: Tensor | None = None) -> Tensor:
    """The next token of each row: float32 (B, vocabulary) → int64 (B, 1).

    Args:
        logits: of all tokens.
        temperature: None for the most probable one; (1,) to sample from softmax(logits / it).
    """
    if temperature is None:
        return logits.argmax(-1, keepdim=True)
    # With replacement is the same for one number, and stays one program on XLA.
    return torch.multinomial(torch.softmax(logits / temperature, -1), 1, replacement=True)


def forward(model: PreTrainedModel, ids: Tensor, **options: bool | int) -> CausalLMOutput:
    """One pass over left-padded text, int64 (B, W) on the model's device, without a cache."""
    mask = ids != PAD
    return model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions(mask),
        use_cache=False,
        **options,
    )


def _last_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return forward(model, ids, logits_to_keep=1).logits[:, -1]


def _up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


def _check_sizes(capacity: int, multiple: int) -> None:
    if multiple <= 0:
        raise RequestError(f"multiple is {multiple}; it has to be 1 or more")
    if capacity < multiple or capacity % multiple:
        fitting = max(multiple, _up(capacity, multiple))
        raise RequestError(f"capacity is {capacity}, no multiple of {multiple}; take {fitting}")


def _check_request(
    way: Way, ids: Tensor, tokens: int, temperature: float | None, stop_every: int
) -> None:
    if tokens <= 0:
        raise RequestError(f"tokens is {tokens}; ask for 1 or more")
    if temperature is not None and not temperature > 0:
        raise RequestError(
            f"temperature is {temperature}; it has to be above 0, and None is the greedy choice"
        )
    if stop_every < 0:
        raise RequestError(f"stop_every is {stop_every}; it is 0 (never) or a number of tokens")
    width = ids.shape[1]
    if way.capacity is not None and width + tokens > way.capacity:
        raise RequestError(
            f"a prompt of {width} tokens (padded to a multiple of {way.multiple}) and {tokens} new "
            f"ones are more than the capacity of {way.capacity}; take "
            f"capacity={_up(width + tokens, way.multiple)}"
        )
