"""L-GreCo: a setting for every layer, the least bytes at an error that is no larger than that of one for all."""

from mpicomp.systems.lgreco.layer_policy import LGreCo

__all__ = ["LGreCo"]
