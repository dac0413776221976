"""`python -m stage1_os`: train with this stage's engine and print what was measured."""

from common.train import main

if __name__ == "__main__":
    main("stage1_os")
