"""Commands of the bench: ``bench``, ``lab``, ``report``, ``simulate`` and ``train``; see `mpicomp.cli`."""
