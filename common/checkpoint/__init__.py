"""What survives a run: checkpoints and what they are made of, weights in and out, the folder of a run."""
