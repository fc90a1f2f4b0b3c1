"""Commands of the bench: ``bench``, ``lab``, ``report``, ``plan`` and ``train``; see `mpicomp.cli`."""
