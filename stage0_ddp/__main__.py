"""`python -m stage0_ddp`: train with this stage's engine and print what was measured."""

from common.train import main

if __name__ == "__main__":
    main("stage0_ddp")
