"""Other libraries' words for these engines, so that a script which has them needs a new import and nothing else."""
