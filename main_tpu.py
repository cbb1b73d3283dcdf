"""Train or test MSHNet on a TPU, a GPU or the CPU: the flags of the original, and a few more.

python main_tpu.py --dataset-dir datasets/IRSTD-1k --batch-size 32 --epochs 400 --lr 0.05 --use-tpu
"""

import sys

from mshnet.cli import main_tpu

if __name__ == "__main__":
    sys.exit(main_tpu())
