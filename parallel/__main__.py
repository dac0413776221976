"""`python -m parallel`: train on several axes, and print what each rank holds and sends."""

from parallel.train import main

if __name__ == "__main__":
    main()
