"""Training, evaluation and checkpoints: where the detector and the devices meet."""
