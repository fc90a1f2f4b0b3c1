"""The one exception of the lab: a sentence for the user."""


class LabError(ValueError):
    """Something the user has to change; its text says what and how, without the leading ``lab:``."""
