"""A small GPT in Keras, and compiled functions that generate text with it."""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow.types.experimental import PolymorphicFunction

from tpuscope.errors import RequestError

from .text import CHARACTERS, LONGEST, TEXT, buffer, decode, encode, room

BATCH = 16


def decoder(width: int = 32, heads: int = 2, blocks: int = 1, seed: int = 0) -> keras.Model:
    """Return a small GPT: int32 (batch, length) → next character's logits, float32 (batch, length,
    CHARACTERS). Length is open, up to LONGEST.

    After Radford et al. 2019 (GPT-2): normalisation before attention and before the MLP, learned
    positions.
    """
    keras.utils.set_random_seed(seed)
    tokens = keras.Input((None,), dtype="int32")
    # Counted by an operation, so that the layer works with a length that is not known.
    positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(CHARACTERS, width)(tokens) + layers.Embedding(LONGEST, width)(positions)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))
    return keras.Model(tokens, layers.Dense(CHARACTERS)(layers.LayerNormalization()(x)))


def train(model: keras.Model, text: str = TEXT, epochs: int = 24, seed: int = 0) -> list[float]:
    """Train the model on a text, character by character, with a compiled training step.

    Each epoch sees all windows of LONGEST characters, in batches of BATCH. A rest that does not
    fill a batch is left out, since its shape would be another program.

    Returns:
        Mean loss of each epoch, nats a character.

    Raises:
        RequestError: the text does not fill one batch.
    """
    tokens = encode(text)
    batches = (len(tokens) - LONGEST) // BATCH
    if batches < 1:
        raise RequestError(
            f"the text has {len(tokens)} characters; a batch takes {LONGEST + BATCH} or more"
        )
    starts = np.random.default_rng(seed).permutation(len(tokens) - LONGEST)[: batches * BATCH]
    windows = np.stack([tokens[start : start + LONGEST + 1] for start in starts])
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=True,
    )
    history = model.fit(windows[:, :-1], windows[:, 1:], batch_size=BATCH, epochs=epochs, verbose=0)
    return history.history["loss"]


def next_character(model: keras.Model) -> PolymorphicFunction:
    """Return a compiled function: text, int32 (1, length) → likeliest next character, int32 ()."""

    @tf.function(jit_compile=True)
    def following(tokens):
        return tf.argmax(model(tokens)[0, -1], output_type=tf.int32)

    return following


def generator(model: keras.Model, new: int) -> PolymorphicFunction:
    """Return a compiled function that appends the ``new`` most probable characters to a prompt.

    The loop over the characters is in the program, so a text takes one launch. It has no cache of
    keys and values: every character looks at the whole buffer again.

    Returns:
        A function of ``(tokens, length)``: int32 (1, room) as :func:`buffer` makes it, and the
        prompt's length as a tensor, int32 (). It gives the filled buffer.
    """

    @tf.function(jit_compile=True)
    def generate(tokens, length):
        places = tf.range(tokens.shape[1])
        # Not tf.range(length, …): XLA needs the ends of a range as constants, and would compile for
        # each length.
        for written in tf.range(new):  # becomes a tf.while_loop
            position = length + written
            logits = tf.gather(model(tokens), position - 1, axis=1)
            character = tf.argmax(logits, axis=-1, output_type=tf.int32)
            tokens = tf.where(places == position, character[:, None], tokens)
        return tokens

    return generate


def write_growing(following: Callable, text: str, new: int) -> str:
    """Continue a text with :func:`next_character`: each character makes the input longer."""
    tokens = encode(text)
    room(len(tokens), new)  # refuses what the model cannot see
    for _ in range(new):
        character = following(tf.constant(tokens[None]))
        tokens = np.append(tokens, np.int32(character))
    return decode(tokens)


def write(generate: Callable, text: str, new: int, multiple: int = 1) -> str:
    """Continue a text with :func:`generator`, the prompt padded to a multiple."""
    tokens, length = buffer(text, new, multiple)
    filled = generate(tf.constant(tokens), tf.constant(np.int32(length))).numpy()
    return decode(filled[0, : length + new])
