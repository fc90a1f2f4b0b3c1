"""The GPT task in small."""

from mpicomp.bench.tasks.gpt import TextGPT


class Tiny(TextGPT):
    """The task with a model that is trained in milliseconds; it is not registered."""

    name = "tiny"
    width = 64
    layers = 2
    length = 16
    vocabulary = 300
