"""Lab 10: crop, resize and blur in PyTorch, run eager, under torch_xla, and by torchax on JAX.

jax and torch_xla would both open the TPU, which has one user at a time. So the notebook's process
is jax's, and torch_xla works in one of its own.

===================== ==============================================================================
:mod:`.images`        box of a mask, crop, resize, blur: plain PyTorch, for any device
:mod:`.accuracy`      resizing against OpenCV, and what bfloat16 costs
:mod:`.on_jax`        torchax: environment, timing, MSHNet's training step as a function of jax
:mod:`.on_torch_xla`  torch_xla: the same results, and what crops of changing shape compile
:mod:`.network`       the narrow MSHNet that both run
===================== ==============================================================================

Source: source document 4 (torchax image processing).
"""
