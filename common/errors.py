"""The one exception for input that a user can correct."""


class InputError(ValueError):
    """One line that says what is wrong with the input and how to correct it.

    Commands print it on one rank and exit with status 2, without a traceback.
    """
