"""Lab 13: TensorFlow's ``jit_compile``, a small Keras generator, and the same things in torch_xla.

TensorFlow and torch_xla both bring LLVM, whose options cannot be registered twice in one process:
import TensorFlow first, and importing torch_xla aborts. So each has its own module, and torch_xla's
runs in a process of its own. Both use XLA on the CPU: tensorflow-cpu has nothing else, and so the
two can be compared.

=================== ==============================================================================
:mod:`.programs`    counting what TensorFlow traces and XLA compiles
:mod:`.text`        characters as numbers, prompts padded to a multiple
:mod:`.generator`   a small GPT in Keras, and compiled functions that write with it (TensorFlow)
:mod:`.compare`     HLO of the same layer, and the same experiments, side by side
:mod:`.keras_side`  TensorFlow's half of the comparison
:mod:`.torch_side`  torch_xla's half, ``python -m labs.jit_compile.torch_side``
=================== ==============================================================================

Source: source document 5 (XLA for TensorFlow models).
"""
