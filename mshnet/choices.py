"""Values that flags can take. Imports nothing, so that ``--help`` does not wait for torch."""

DEVICES = ("auto", "tpu", "cuda", "cpu")
ENGINES = ("auto", "torch_xla", "torch_tpu")  # of the device tpu
PRECISIONS = ("fp32", "bf16")
STRATEGIES = ("spmd", "launch")
CACHES = ("ram", "disk", "none")
FOLDS = (0, 1, 2, 4, 8, 16)  # space-to-depth factors
PHASES = ("train", "warmup", "eval")  # of a step that `mshnet aot` compiles
