"""Published systems, complete, one file or folder each.

Their policies, compressors and collectives register as those of a plugin do: a name such as ``"gravac"`` or ``"lgc"``
finds them, and nothing outside this package imports them.
"""
