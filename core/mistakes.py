"""The one seam between the user's mistakes and ours."""


class UserError(ValueError):
    """What the user has to mend; the message says what was got, what was expected, and how to fix it.

    The command shows it without a traceback and ends with exit code 2.  Any other exception is a fault of ours or of the
    machine's, a plain ValueError too.
    """
