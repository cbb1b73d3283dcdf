"""TensorFlow's half of the comparison."""

from collections import Counter
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from .compare import LOOP, Effort, Linear, experiments
from .programs import Programs


def keras_linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, dtype: str) -> Linear:
    """Return the HLO of ``relu(x @ weightᵀ + bias)`` as a Keras layer under ``jit_compile``.

    Args:
        x: float32 (batch, in).
        weight: float32 (out, in), as PyTorch keeps it.
        bias: float32 (out,).
        dtype: that the layer computes in, one of DTYPES.
    """
    layer = keras.layers.Dense(len(bias), activation="relu", dtype=dtype)
    layer.build(x.shape)
    layer.set_weights([weight.T, bias])
    compiled = tf.function(layer, jit_compile=True)
    text = compiled.experimental_get_compiler_ir(tf.constant(x))
    result = tf.cast(compiled(tf.constant(x)), tf.float32).numpy()
    return Linear(text("hlo_no_metadata"), text("optimized_hlo"), result)


def keras_experiments(programs: Programs) -> dict[str, Effort]:
    """Run the experiments and a loop under ``jit_compile``."""

    def measured(function: Callable, arguments: list[tuple]) -> Effort:
        runs = Counter()

        def body(*values):
            runs["python"] += 1
            return function(*values)

        all_calls = programs.calls(tf.function(body, jit_compile=True), arguments)
        return Effort(runs["python"], all_calls.compiled, len(arguments))

    def loop(x):
        for _ in tf.range(3):
            x = tf.tanh(x)
        return x

    several = experiments(tf.ones, tf.constant)
    found = {name: measured(*experiment) for name, experiment in several.items()}
    return found | {LOOP: measured(loop, [(tf.ones((10, 16)),)])}
