"""`python -m stage3_param`: train with this stage's engine and print what was measured."""

from common.train import main

if __name__ == "__main__":
    main("stage3_param")
